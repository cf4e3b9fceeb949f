"""Where linkage alone and comparisons start, from Python and from the command line alike."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from securevfl.core import files
from securevfl.core.progress import Observer, ProgressEvent
from securevfl.runtime.entry import FederationSource, opened
from securevfl.studies.compare.comparison import Comparison, adaptations, compare_methods
from securevfl.studies.compare.run import LeftOut, MethodRun
from securevfl.studies.compare.table import summary, write_comparison
from securevfl.studies.links import LinkStudy, study_links


def link(
    federation: FederationSource,
    *,
    out: Path | None = None,
    data_root: Path | None = None,
    estimate: bool = False,
    observe: Observer = lambda _event: None,
) -> LinkStudy:
    """Link the tables of a federation in this process, and measure how good the links are.

    Args:
        federation: The path of a federation file, or what :func:`securevfl.read_federation`
            returned.
        out: Folder for every party's lists, which a later call finds there; default: a temporary
            one that is removed.
        data_root: Where relative data paths start; default: next to the file, and the current
            folder if there is no file.
        estimate: Whether FedSim's Delta over simpler linkage is estimated too.
        observe: Hears of progress.

    Returns:
        Figures by secondary, never a row or a record, and the curves of similarities.

    Raises:
        ConfigError: If a setting is impossible.
        DataError: If a table can't be linked.

    Reveals:
        Nothing leaves the process, which holds everybody's table.
    """
    config, root = opened(federation, data_root, only_linkage=True)
    with _kept_or_temporary(out) as folder:
        files.require_writable_folder(folder)
        return study_links(config, root, folder, estimate=estimate, observe=observe)


def compare(
    federation: FederationSource,
    methods: Sequence[str],
    *,
    seeds: int = 5,
    jobs: int = 1,
    out: Path | None = None,
    metric: str | None = None,
    device: str = "cpu",
    data_root: Path | None = None,
    tell: Callable[[MethodRun, ProgressEvent], None] = lambda _run, _event: None,
    done: Callable[[dict[str, Any]], None] = lambda _result: None,
    leave_out: Callable[[LeftOut], None] = lambda _method: None,
) -> dict[str, Any]:
    """Train methods side by side in the simulator, and return how they compare.

    Args:
        federation: The path of a federation file, or what :func:`securevfl.read_federation`
            returned.
        methods: Families; ``alone``, ``solo``, ``boosting``, ``combine``, ``boosting-combine``,
            ``fedcvt``; or names of the file's ``[methods.NAME]`` tables.
        seeds: How many run seeds, counting up from the file's.
        jobs: Processes at a time, with one thread each.
        out: Folder that gets the table and a folder a run, and where a comparison that was cut off
            goes on; default: a temporary one that is removed.
        metric: Which of the task's metrics the methods are compared by; nothing is trained again
            for another one. Default: the one that training goes by, ``training.metric``.
        device: ``"cpu"`` or ``"cuda"``.
        data_root: Where relative data paths start; default: next to the file, and the current
            folder if there is no file.
        tell: Hears of the progress of each run.
        done: Gets each run's result as soon as it is there.
        leave_out: Gets each method that does not fit or has failed; the others go on.

    Returns:
        What ``comparison.json`` holds; see :func:`securevfl.studies.compare.table.summary`.

    Raises:
        ConfigError: If a setting is impossible, ``out`` holds runs of other settings, or no method
            fits.
        DataError: If a table is not what it should be.
        SecureVflError: If every method that fits has failed.

    Reveals:
        Everything is on one machine: a comparison protects nobody's table.
    """
    config, root = opened(federation, data_root)
    with _kept_or_temporary(out) as folder:
        comparison = Comparison(
            config=config,
            methods=tuple(methods),
            seeds=seeds,
            data_root=root,
            folder=folder,
            device=device,
            metric=metric,
        )
        figures = compare_and_write(
            comparison, jobs=jobs, tell=tell, done=done, leave_out=leave_out
        )
        if out is None:
            del figures["folder"]
        return figures


def compare_and_write(
    comparison: Comparison,
    *,
    jobs: int,
    tell: Callable[[MethodRun, ProgressEvent], None],
    done: Callable[[dict[str, Any]], None],
    leave_out: Callable[[LeftOut], None],
) -> dict[str, Any]:
    """Train what is compared, and write ``comparison.json``, ``.csv`` and ``.md``.

    Args:
        comparison: What is compared, and where.
        jobs: Processes at a time, with one thread each.
        tell: Hears of the progress of each run.
        done: Gets each run's result as soon as it is there.
        leave_out: Gets each method that has no figures, and why.

    Returns:
        What ``comparison.json`` holds.

    Raises:
        SecureVflError: As :func:`compare_methods`.
    """
    out: list[LeftOut] = []

    def note(one: LeftOut) -> None:
        out.append(one)
        leave_out(one)

    results = compare_methods(comparison, jobs=jobs, tell=tell, done=done, leave_out=note)
    federation = comparison.config.federation
    figures = summary(
        results,
        federation=federation.name,
        task=federation.task,
        metric=comparison.metric,
        left_out=out,
        adapted=adaptations(comparison, without={one.method for one in out}),
    )
    figures["folder"] = str(comparison.folder)
    write_comparison(comparison.folder, figures, results)
    return figures


@contextmanager
def _kept_or_temporary(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="securevfl-") as folder:
        yield Path(folder)
