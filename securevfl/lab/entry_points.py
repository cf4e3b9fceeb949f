"""Entry points of linkage alone, comparisons and sweeps, for Python and the command line."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from securevfl.core import files
from securevfl.core.progress import Observer
from securevfl.lab.comparison import (
    Comparison,
    adaptations,
    compare_methods,
    summary,
    write_comparison,
)
from securevfl.lab.engine import StudyOptions
from securevfl.lab.links_alone import LinkStudy, study_links
from securevfl.lab.one_run import LeftOut
from securevfl.lab.sweep import Sweep, train_grid, write_sweep
from securevfl.lab.sweep import summary as grid_summary
from securevfl.lab.sweep_settings import setting_of
from securevfl.runtime.run_folder import require_own_folder
from securevfl.runtime.run_options import FederationSource, resolve_federation

_DEFAULTS: Final = StudyOptions()


def link(
    federation: FederationSource,
    *,
    out: Path | None = None,
    data_root: Path | None = None,
    estimate: bool = False,
    observe: Observer = lambda _event: None,
) -> LinkStudy:
    """Link the tables of a federation in this process, and measure the quality of the links.

    Args:
        federation: Path of a federation file, or result of :func:`securevfl.read_federation`.
        out: Folder for every party's lists, which later calls reuse; default: a temporary one.
        data_root: Folder at which relative data paths start; default: that of the file, or the
            current one.
        estimate: Whether FedSim's Delta over simpler linkage is estimated too.
        observe: Receives progress events.

    Returns:
        Figures by secondary, never a row or a record, and the curves of similarities.

    Raises:
        ConfigError: If a setting is impossible.
        DataError: If a table can't be linked.

    Reveals:
        Nothing leaves the process, which holds all tables.
    """
    config, root = resolve_federation(federation, data_root, only_linkage=True)
    with _kept_or_temporary(out) as folder:
        require_own_folder(config, folder)
        files.require_writable_folder(folder)
        return study_links(config, root, folder, estimate=estimate, observe=observe)


def compare(
    federation: FederationSource,
    methods: Sequence[str],
    *,
    seeds: int = 5,
    out: Path | None = None,
    metric: str | None = None,
    device: str = "cpu",
    data_root: Path | None = None,
    options: StudyOptions = _DEFAULTS,
) -> dict[str, Any]:
    """Compare methods in the simulator on equal rows and seeds.

    Args:
        federation: Path of a federation file, or result of :func:`securevfl.read_federation`.
        methods: Families; ``alone``, ``solo``, ``boosting``, ``boosting-links``, ``combine``,
            ``boosting-combine``; names of the file's ``[methods.NAME]`` tables; and
            ``auto``, with each seed the family among them that is best on validation rows.
        seeds: Number of run seeds, counting up from the file's.
        out: Folder for the table and the runs, from which a later call continues; default: a
            temporary one.
        metric: Metric to compare by; another one needs no training. Default: ``training.metric``.
        device: ``"cpu"`` or ``"cuda"``.
        data_root: Folder at which relative data paths start; default: that of the file, or the
            current one.
        options: Number of parallel runs, and callbacks.

    Returns:
        Content of ``comparison.json``; see :func:`securevfl.lab.comparison.summary`.

    Raises:
        ConfigError: If a setting is impossible, ``out`` holds runs of other settings, or no method
            fits.
        DataError: If a table can't be read.
        SecureVflError: If every method that fits has failed.

    Reveals:
        Everything is inside one organisation: a comparison protects no party's table.
    """
    config, root = resolve_federation(federation, data_root)
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
        figures = compare_and_write(comparison, options)
        if out is None:
            del figures["folder"]
        return figures


def compare_and_write(comparison: Comparison, options: StudyOptions) -> dict[str, Any]:
    """Compare methods, and write ``comparison.json``, ``.csv`` and ``.md``.

    Args:
        comparison: The methods and the folder.
        options: Number of parallel runs, and callbacks.

    Returns:
        Content of ``comparison.json``.

    Raises:
        SecureVflError: As :func:`compare_methods`.
    """
    require_own_folder(comparison.config, comparison.folder, resume=True)
    out: list[LeftOut] = []

    def note(method: LeftOut) -> None:
        out.append(method)
        options.leave_out(method)

    results = compare_methods(comparison, replace(options, leave_out=note))
    federation = comparison.config.federation
    figures = summary(
        results,
        federation=federation.name,
        task=federation.task,
        metric=comparison.metric,
        left_out=out,
        adapted=adaptations(comparison, without={method.name for method in out}),
    )
    figures["folder"] = str(comparison.folder)
    write_comparison(comparison.folder, figures, results)
    return figures


def sweep(
    federation: FederationSource,
    settings: Mapping[str, str | Sequence[Any]],
    *,
    out: Path | None = None,
    metric: str | None = None,
    device: str = "cpu",
    data_root: Path | None = None,
    options: StudyOptions = _DEFAULTS,
) -> dict[str, Any]:
    """Compare settings of one federation file in the simulator.

    Args:
        federation: Path of a federation file, or result of :func:`securevfl.read_federation`.
        settings: Values by ``table.field``, or by ``seed``: a list, or a text such as
            ``"1,10,50"`` or ``"0..4"``.
        out: Folder for the table and the runs, from which a later call continues; default: a
            temporary one.
        metric: Metric to compare by; default: ``training.metric``.
        device: ``"cpu"`` or ``"cuda"``.
        data_root: Folder at which relative data paths start; default: that of the file, or the
            current one.
        options: Number of parallel runs, and callbacks.

    Returns:
        Contents of ``sweep.json``; see :func:`securevfl.lab.sweep.summary`.

    Raises:
        ConfigError: If a setting is impossible, or ``out`` holds runs of other settings.
        DataError: If a table can't be read.
        PrivacyError: If the privacy settings of a point contradict one another.
        SecureVflError: If every point has failed.

    Reveals:
        Everything is inside one organisation: a sweep protects no party's table.
    """
    config, root = resolve_federation(federation, data_root)
    tried = tuple(setting_of(name, values) for name, values in settings.items())
    with _kept_or_temporary(out) as folder:
        asked = Sweep(
            config=config, tried=tried, data_root=root, folder=folder, device=device, metric=metric
        )
        figures = sweep_and_write(asked, options)
        if out is None:
            del figures["folder"]
        return figures


def sweep_and_write(sweep: Sweep, options: StudyOptions) -> dict[str, Any]:
    """Train a sweep, and write ``sweep.json``, ``.csv`` and ``.md``.

    Args:
        sweep: The settings to try, and the folder.
        options: Number of parallel runs, and callbacks.

    Returns:
        Contents of ``sweep.json``.

    Raises:
        SecureVflError: As :func:`securevfl.lab.sweep.train_grid`.
    """
    require_own_folder(sweep.config, sweep.folder, resume=True)
    results, failed = train_grid(sweep, options)
    figures = grid_summary(sweep, results, left_out=failed)
    figures["folder"] = str(sweep.folder)
    write_sweep(sweep.folder, figures, results)
    return figures


@contextmanager
def _kept_or_temporary(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="securevfl-") as folder:
        yield Path(folder)
