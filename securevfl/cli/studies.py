"""The commands that train many runs in the simulator."""

from pathlib import Path
from typing import Annotated

import typer

from securevfl.cli.options import AsJson, Device, FederationFile, FileDataRoot

app = typer.Typer()

_Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        help="Runs at a time, with one thread each; default: 1, and with --engine ray as many as "
        "there is room for.",
    ),
]
_EngineName = Annotated[
    str,
    typer.Option("--engine", help="local, or ray: whole runs on the nodes of one's own cluster."),
]
_Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="The Ray cluster, or auto; default: one of this machine alone.",
    ),
]
_GpusPerRun = Annotated[
    float | None,
    typer.Option(
        "--gpus-per-run", help="GPUs that a run takes of a Ray node, such as 0.25; default: 1."
    ),
]


@app.command()
def compare(
    federation: FederationFile,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            metavar="A,B,...",
            # The backslash keeps rich from reading a style into the brackets.
            help="Families; alone, solo, combine, boosting, fedcvt; the file's \\[methods.NAME] "
            "tables; and auto, the family among them that is best on validation rows.",
        ),
    ],
    seeds: Annotated[int, typer.Option(help="Run seeds, counting up from the file's.")] = 5,
    jobs: _Jobs = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder; what it holds is kept. Default: runs/NAME-compare.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="The task's metric to compare by; trains nothing anew. Default: training.metric.",
        ),
    ] = None,
    device: Device = "cpu",
    engine: _EngineName = "local",
    address: _Address = None,
    gpus_per_run: _GpusPerRun = None,
    data_root: FileDataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Train methods side by side in the simulator; the same command goes on after Ctrl-C."""
    from securevfl.cli.compare import run_compare
    from securevfl.lab.study import Engines

    run_compare(
        federation,
        methods=methods,
        seeds=seeds,
        engines=Engines(engine=engine, jobs=jobs, address=address, gpus_per_run=gpus_per_run),
        out=out,
        metric=metric,
        device=device,
        data_root=data_root,
        as_json=as_json,
    )


@app.command()
def sweep(
    federation: FederationFile,
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="NAME=VALUES",
            help="A setting and what to try it with: model.neighbours=1,10,50, seed=0..4; with "
            "--search also ranges, log: before them by logarithms. As often as there are settings.",
        ),
    ],
    search: Annotated[
        int | None,
        typer.Option(
            "--search",
            metavar="N",
            help="N trials that Optuna chooses by validation rows, in place of every combination.",
        ),
    ] = None,
    jobs: _Jobs = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder; what it holds is kept. Default: runs/NAME-sweep, and NAME-search.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="The task's metric to compare by. Default: training.metric.",
        ),
    ] = None,
    device: Device = "cpu",
    engine: _EngineName = "local",
    address: _Address = None,
    gpus_per_run: _GpusPerRun = None,
    data_root: FileDataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Train one file under many settings in the simulator; the same command goes on."""
    from securevfl.cli.sweep_command import run_sweep
    from securevfl.lab.study import Engines

    run_sweep(
        federation,
        settings=settings,
        trials=search,
        engines=Engines(engine=engine, jobs=jobs, address=address, gpus_per_run=gpus_per_run),
        out=out,
        metric=metric,
        device=device,
        data_root=data_root,
        as_json=as_json,
    )
