"""The command ``bench``: what securevfl's building blocks cost on this machine."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Measure securevfl's building blocks beside their baselines.", no_args_is_help=True
)


@app.callback()
def bench() -> None:
    """Measure securevfl's building blocks beside their baselines."""


@app.command()
def splitavg(
    parties: Annotated[int, typer.Option(help="Secondaries; the primary comes on top.")] = 5,
    elements: Annotated[int, typer.Option(help="Numbers in each secondary's tensor.")] = 640_000,
    repeats: Annotated[int, typer.Option(help="Interleaved runs; medians are printed.")] = 15,
    keep_memory: Annotated[
        bool,
        typer.Option(help="All variants keep freed memory, as parties of a run do; or none does."),
    ] = True,
    spu_python: Annotated[
        Path | None,
        typer.Option(
            help="A Python that has SecretFlow's SPU (pip install spu==0.9.5, in an environment "
            "of its own); it is then measured beside the others."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Time the secure average between real processes, beside CrypTen and plain gathers."""
    # Loaded here, so that the other commands need not wait for CrypTen.
    from securevfl.lab.bench.bench_splitavg import SplitAvgBenchmark, measure

    settings = SplitAvgBenchmark(
        parties=parties,
        elements=elements,
        repeats=repeats,
        keeps_memory=keep_memory,
        spu_python=spu_python,
    )
    result = measure(settings)
    print(json.dumps(result) if as_json else _table(result))


def _table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['parties']} secondaries, {result['elements']:,} numbers each, "
        f"medians of {result['repeats']} interleaved runs",
        f"{'variant':20}{'wall ms':>10}{'CPU ms':>10}{'sent kB':>10}{'max error':>12}",
    ]
    for name, figures in result["variants"].items():
        sent = figures["bytes_sent"]["secondary1"] / 1000
        lines.append(
            f"{name:20}{figures['wall_ms']:>10.1f}{figures['cpu_ms']:>10.1f}{sent:>10,.0f}"
            f"{figures['max_error']:>12.1e}"
        )
    lines.append(
        "CPU is the sum over all parties; the error of splitavg is against the mean without noise."
    )
    if result["spu_version"] is not None:
        lines.append(
            f"SPU {result['spu_version']}: semi2k over 64 bits, no noise, no TLS; in one process "
            f"nothing is sent."
        )
    return "\n".join(lines)
