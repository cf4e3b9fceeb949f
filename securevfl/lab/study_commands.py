"""The command that trains many runs in the simulator: ``lab compare``."""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from securevfl.core.command_line import AsJson, Device, FederationFile, FileDataRoot
from securevfl.core.errors import ConfigError
from securevfl.core.formatting import format_figure
from securevfl.core.memory import keep_freed_memory, loading
from securevfl.core.progress import EpochDone, ProgressEvent, Warned
from securevfl.core.shown_progress import bars
from securevfl.desk.printing import print_figures, say, wrap_text

if TYPE_CHECKING:
    from securevfl.lab.one_run import LeftOut, Run

app = typer.Typer()


@app.command()
def compare(
    federation: FederationFile,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="A,B,...",
            # The backslash keeps rich from reading a style into the brackets.
            help="Families; alone, solo, combine, boosting; the file's \\[methods.NAME] "
            "tables; and auto, the one among them that is best on validation rows. Default beside "
            "--set: alone.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUES",
            help="A setting of the file and what to try it with: model.neighbours=1,10,50. As "
            "often as there are settings; each combination is compared.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Run seeds, counting up from the file's.")] = 5,
    jobs: Annotated[int, typer.Option("--jobs", help="Runs at a time, with one thread each.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder; finished runs in it are kept. Default: runs/NAME-compare.",
        ),
    ] = None,
    as_published: Annotated[
        bool,
        typer.Option(
            "--as-published",
            help="Presets such as fedsim-paper train for their papers' epochs and batches, not "
            "the file's.",
        ),
    ] = False,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="The task's metric to compare by; trains nothing anew. Default: training.metric.",
        ),
    ] = None,
    device: Device = "cpu",
    data_root: FileDataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Compare methods, or settings, in the simulator; the same command resumes after Ctrl-C."""
    with loading():
        from securevfl.config.reading import read_federation
        from securevfl.core import files
        from securevfl.lab.comparison import Comparison, compare_and_write, published
        from securevfl.lab.one_run import StudyOptions
        from securevfl.lab.settings_grid import parse_setting
        from securevfl.lab.study_outputs import comparison_plot
        from securevfl.runtime.run_options import warnings_about

    if seeds < 1:
        raise ConfigError(f"--seeds: must be at least 1, got {seeds}")
    config = read_federation(federation)
    names = tuple(name.strip() for name in (methods or "").split(",") if name.strip())
    comparison = Comparison(
        config=published(config, names) if as_published else config,
        methods=names,
        settings=tuple(parse_setting(text) for text in settings or ()),
        seeds=seeds,
        data_root=data_root or federation.parent,
        folder=out or Path("runs") / f"{config.federation.name}-compare",
        device=device,
        metric=metric,
    )
    shown = StudyProgress(names=len(comparison.names), seeds=seeds, folder=comparison.folder)
    options = StudyOptions(jobs=jobs, tell=shown, done=shown.done, leave_out=shown.left_out)
    for warning in warnings_about(config):
        print(wrap_text(f"securevfl: warning: {warning}"), file=sys.stderr)
    keep_freed_memory()
    with shown:
        figures = compare_and_write(comparison, options)
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
    """Return the title of a comparison's table."""
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
    _print_best(console, figures)
    for name in ("comparison.json", "comparison.csv", "comparison.md", "comparison.svg"):
        console.print(str(folder / name), soft_wrap=True)


def _print_best(console: Console, figures: Mapping[str, Any]) -> None:
    """Print which settings are best, and what no epsilon counts; nothing without settings."""
    from securevfl.lab.one_run import cell

    tried = {name: each for name, each in figures["methods"].items() if "settings" in each}
    if len(tried) > 1 and figures["best"] is not None:
        best = tried[figures["best"]]
        say(
            console,
            "",
            f"best on validation rows: {figures['best']}, with "
            f"{format_figure(best['validation'])} there and {cell(best)} on test rows; the best of "
            f"{len(tried)} looks better on validation rows than it is",
        )
    if any(each["epsilon"] is not None for each in tried.values()):
        say(
            console,
            "",
            "These runs were simulated: they released nothing to anyone, and no ledger is charged. "
            "But settings that were chosen by real tables are a function of them, and no epsilon "
            "counts that.",
        )


class StudyProgress:
    """Progress of a study's runs on stderr; call the object with each run's events.

    Args:
        names: Number of methods and combinations of settings.
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
        self._begun: set[Run] = set()
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
        name = f"{run.name}, seed {run.seed}"
        if run not in self._begun:
            self._begun.add(run)
            if not self._live:
                print(f"begun: {name}", file=sys.stderr, flush=True)
        if isinstance(event, Warned) and event.text not in self._warned:
            self._warned.add(event.text)
            text = f"securevfl: warning: {event.text}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif isinstance(event, EpochDone):
            validation = format_figure(event.validation)
            text = f"{name}: epoch {event.epoch} of {event.epochs}, validation {validation}"
            self._progress.update(self._all, figures=text)

    def done(self, run: "Run", result: Mapping[str, Any]) -> None:
        """Show a finished run's result."""
        self._done[run.name] += 1
        self._progress.update(self._all, completed=self._done.total())
        text = f"{run.name}, seed {run.seed}: {result['metric']} {format_figure(result['test'])}"
        self._say(text, f"done {self._done.total()}/{self._of}: {text}")

    def left_out(self, method: "LeftOut") -> None:
        """Show a skipped or failed name, and count its remaining runs as not due."""
        self._of -= self._seeds - self._done[method.name]
        self._progress.update(self._all, total=self._of)
        text = f"{method.name} {method.status}: {method.reason}"
        self._say(text, text)

    def _say(self, live: str, plain: str) -> None:
        if self._live:
            self._progress.console.print(live, highlight=False, markup=False)
        else:
            print(plain, file=sys.stderr, flush=True)
