"""The commands that train many runs in the simulator: ``lab compare`` and ``lab sweep``."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import TaskID

from securevfl.core.command_line import AsJson, Device, FederationFile, FileDataRoot
from securevfl.core.errors import ConfigError
from securevfl.core.formatting import format_figure
from securevfl.core.memory import keep_freed_memory, loading
from securevfl.core.progress import EpochDone, ProgressEvent, Warned
from securevfl.core.shown_progress import bars
from securevfl.desk.printing import print_figures, say, wrap_text

if TYPE_CHECKING:
    from securevfl.lab.one_run import LeftOut, Run, StudyOptions

app = typer.Typer()

_Jobs = Annotated[int, typer.Option("--jobs", help="Runs at a time, with one thread each.")]
_Folder = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Folder; finished runs in it are kept. Default: runs/NAME-compare or runs/NAME-sweep.",
    ),
]
_Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        help="The task's metric to compare by; trains nothing anew. Default: training.metric.",
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
            help="Families; alone, solo, combine, boosting; the file's \\[methods.NAME] "
            "tables; and auto, the family among them that is best on validation rows.",
        ),
    ],
    seeds: Annotated[int, typer.Option(help="Run seeds, counting up from the file's.")] = 5,
    jobs: _Jobs = 1,
    out: _Folder = None,
    as_published: Annotated[
        bool,
        typer.Option(
            "--as-published",
            help="Presets such as fedsim-paper train for their papers' epochs and batches, not "
            "the file's.",
        ),
    ] = False,
    metric: _Metric = None,
    device: Device = "cpu",
    data_root: FileDataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Compare methods in the simulator; the same command resumes after Ctrl-C."""
    with loading():
        from securevfl.config.reading import read_federation
        from securevfl.core import files
        from securevfl.lab.comparison import Comparison, compare_and_write, published
        from securevfl.lab.study_outputs import comparison_plot

    if seeds < 1:
        raise ConfigError(f"--seeds: must be at least 1, got {seeds}")
    config = read_federation(federation)
    names = tuple(name.strip() for name in methods.split(",") if name.strip())
    comparison = Comparison(
        config=published(config, names) if as_published else config,
        methods=names,
        seeds=seeds,
        data_root=data_root or federation.parent,
        folder=out or Path("runs") / f"{config.federation.name}-compare",
        device=device,
        metric=metric,
    )
    figures = _train(
        comparison, compare_and_write, jobs=jobs, names=len(comparison.trained_methods), seeds=seeds
    )
    values = {
        name: method["seeds"]
        for name, method in figures["methods"].items()
        if method["mean"] is not None
    }
    title = f"{figures['federation']}: test {figures['metric']}"
    plot = comparison_plot(values, title=title)
    files.write_text(comparison.folder / "comparison.svg", plot, for_others=True)
    if as_json:
        print(json.dumps(figures))
    else:
        _print_comparison(figures, comparison.folder)


def _title(figures: Mapping[str, Any]) -> str:
    """Return the title of a comparison's or a sweep's table."""
    better = "higher" if figures["higher_is_better"] else "lower"
    seeds = len(figures["seed_numbers"])
    return (
        f"{figures['federation']}: test {figures['metric']} ({better} is better), mean ± deviation "
        f"over {seeds} seed{'s' if seeds > 1 else ''}; best epochs by validation "
        f"{figures['chosen_by']}"
    )


def _print_comparison(figures: Mapping[str, Any], folder: Path) -> None:
    from securevfl.lab.comparison import table_rows
    from securevfl.lab.one_run import cell

    seeds = figures["seed_numbers"]
    console = Console()
    print_figures(console, table_rows(figures, narrow=True), title=_title(figures))
    for name, entry in figures["left_out"].items():
        say(console, "", f"{name} {entry['status']}: {entry['reason']}")
    for name, method in figures["methods"].items():
        if "chosen" in method:
            counted = Counter(method["chosen"]).most_common()
            text = ", ".join(f"{model} with {number} of {len(seeds)}" for model, number in counted)
            console.print(f"{name} is {text} seeds", highlight=False, markup=False)
        if "candidates" in method:
            text = ", ".join(
                f"{model} {cell(spread)}" for model, spread in method["candidates"].items()
            )
            console.print(f"{name}, model by model: {text}", highlight=False, markup=False)
    for name, notes in figures["adapted"].items():
        text = f"{name} adapted: {'; '.join(notes)}; more of its own: [methods.{name}]"
        console.print(text, soft_wrap=True, highlight=False, markup=False)
    for name in ("comparison.json", "comparison.csv", "comparison.md", "comparison.svg"):
        console.print(str(folder / name), soft_wrap=True)


@app.command()
def sweep(
    federation: FederationFile,
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="NAME=VALUES",
            help="A setting and what to try it with: model.neighbours=1,10,50, seed=0..4. As often "
            "as there are settings.",
        ),
    ],
    jobs: _Jobs = 1,
    out: _Folder = None,
    metric: _Metric = None,
    device: Device = "cpu",
    data_root: FileDataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Train one file under many settings in the simulator; the same command resumes."""
    with loading():
        from securevfl.config.reading import read_federation
        from securevfl.core import files
        from securevfl.lab.study_outputs import sweep_plot
        from securevfl.lab.sweep import Sweep, parse_setting, sweep_and_write

    config = read_federation(federation)
    asked = Sweep(
        config=config,
        tried=tuple(parse_setting(text) for text in settings),
        data_root=data_root or federation.parent,
        folder=out or Path("runs") / f"{config.federation.name}-sweep",
        device=device,
        metric=metric,
    )
    names = len(asked.grid()) + asked.has_alone
    figures = _train(asked, sweep_and_write, jobs=jobs, names=names, seeds=len(asked.seeds))
    files.write_text(asked.folder / "sweep.svg", sweep_plot(figures), for_others=True)
    if as_json:
        print(json.dumps(figures))
        return
    console = Console()
    _print_grid(console, figures)
    for name, entry in figures["left_out"].items():
        say(console, "", f"{name} {entry['status']}: {entry['reason']}")
    if any(point["epsilon"] is not None for point in figures["points"].values()):
        say(
            console,
            "",
            "These runs were simulated: they released nothing to anyone, and no ledger is charged. "
            "But settings that were chosen by real tables are a function of them, and no epsilon "
            "counts that.",
        )
    for ending in ("json", "csv", "md", "svg"):
        console.print(str(asked.folder / f"sweep.{ending}"), soft_wrap=True)


def _print_grid(console: Console, figures: Mapping[str, Any]) -> None:
    from securevfl.lab.one_run import cell
    from securevfl.lab.sweep import table_rows

    names = max(1, len(figures["settings"]))
    print_figures(console, table_rows(figures, narrow=True), title=_title(figures), names=names)
    if figures["best"] is not None and len(figures["points"]) > 1:
        best = figures["points"][figures["best"]]
        say(
            console,
            "",
            f"best on validation rows: {_in_words(best['settings'])}, with "
            f"{format_figure(best['validation'])} there and {cell(best)} on test rows; the best of "
            f"{len(figures['points'])} looks better on validation rows than it is",
        )


def _in_words(settings: Mapping[str, Any]) -> str:
    from securevfl.lab.sweep import text_of

    return ", ".join(f"{name} = {text_of(value)}" for name, value in settings.items())


def _train(
    plan: Any,
    enter: "Callable[[Any, StudyOptions], dict[str, Any]]",
    *,
    jobs: int,
    names: int,
    seeds: int,
) -> dict[str, Any]:
    """Train a study's runs with their progress shown, and return its figures."""
    from securevfl.lab.one_run import StudyOptions
    from securevfl.runtime.run_options import warnings_about

    options = StudyOptions(jobs=jobs)
    for warning in warnings_about(plan.config):
        print(wrap_text(f"securevfl: warning: {warning}"), file=sys.stderr)
    keep_freed_memory()
    with StudyProgress(names=names, seeds=seeds, folder=plan.folder) as shown:
        return enter(plan, shown.reporting(options))


class StudyProgress:
    """Progress of a study's runs on stderr; call the object with each run's events.

    Args:
        names: Number of methods or points.
        seeds: Number of seeds of each.
        folder: Folder of finished runs.
    """

    def __init__(self, *, names: int, seeds: int, folder: Path) -> None:
        self._console = Console(stderr=True)
        self._stdout = redirect_stdout(sys.stderr)
        self._live = self._console.is_terminal
        self._progress = bars(self._console, name_width=28)
        self._seeds = seeds
        self._folder = folder
        self._of = names * seeds
        self._all = self._progress.add_task("runs", total=self._of, figures="")
        self._done: Counter[str] = Counter()
        self._tasks: dict[Run, TaskID] = {}
        self._warned: set[str] = set()

    def __enter__(self) -> "StudyProgress":
        # Other libraries' prints do not belong to the command's answer.
        self._stdout.__enter__()
        self._progress.start()
        text = f"{self._of} run{'s' if self._of > 1 else ''}, kept in {self._folder}: tables first"
        self._say(text, text)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        self._stdout.__exit__(kind, error, trace)
        if kind is KeyboardInterrupt:
            print(
                f"{self._done.total()} of {self._of} runs are kept in {self._folder}; the same "
                f"command resumes from there",
                file=sys.stderr,
            )

    def __call__(self, run: "Run", event: ProgressEvent) -> None:
        """Show a run's event, if it is a warning or an epoch."""
        if run not in self._tasks:
            name = f"{run.name}, seed {run.seed}"
            self._tasks[run] = self._progress.add_task(name, total=1, figures="")
            if not self._live:
                print(f"begun: {name}", file=sys.stderr, flush=True)
        if isinstance(event, Warned) and event.text not in self._warned:
            self._warned.add(event.text)
            text = f"securevfl: warning: {event.text}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif isinstance(event, EpochDone):
            self._progress.update(
                self._tasks[run],
                completed=event.epoch,
                total=event.epochs,
                figures=f"validation {format_figure(event.validation)}",
            )

    def reporting(self, options: "StudyOptions") -> "StudyOptions":
        """Return options whose callbacks are this object's."""
        return replace(options, tell=self, done=self.done, leave_out=self.left_out)

    def done(self, run: "Run", result: Mapping[str, Any]) -> None:
        """Show a finished run's result."""
        self._done[run.name] += 1
        self._forget(run)
        self._progress.update(self._all, completed=self._done.total())
        text = f"{run.name}, seed {run.seed}: {result['metric']} {format_figure(result['test'])}"
        self._say(text, f"done {self._done.total()}/{self._of}: {text}")

    def left_out(self, method: "LeftOut") -> None:
        """Show a skipped or failed name, and count its remaining runs as not due."""
        for run in [run for run in self._tasks if run.name == method.name]:
            self._forget(run)
        self._of -= self._seeds - self._done[method.name]
        self._progress.update(self._all, total=self._of)
        text = f"{method.name} {method.status}: {method.reason}"
        self._say(text, text)

    def _forget(self, run: "Run") -> None:
        task = self._tasks.pop(run, None)
        if task is not None:
            self._progress.remove_task(task)

    def _say(self, live: str, plain: str) -> None:
        if self._live:
            self._progress.console.print(live, highlight=False, markup=False)
        else:
            print(plain, file=sys.stderr, flush=True)
