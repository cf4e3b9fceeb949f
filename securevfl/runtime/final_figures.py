"""The figures of a run that is trained and tested: its model against the primary's own."""

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from securevfl.core.progress import Stage
from securevfl.federation.base import own_inputs, train_alone
from securevfl.ledger.chain import now
from securevfl.models.alone.gain import AloneMeasured, Placebo, measure_alone
from securevfl.models.fet.positions import PositionsTaken
from securevfl.models.tasks import Metrics
from securevfl.runtime import metrics_file, run_folder
from securevfl.runtime.primary_run import PrimaryRun
from securevfl.version import __version__


def measure_run(
    run: PrimaryRun,
    folder: Path,
    *,
    mode: str,
    traffic: Mapping[str, Mapping[str, int]],
    with_alone: bool = True,
    positions: Mapping[str, PositionsTaken] = MappingProxyType({}),
) -> metrics_file.RunFigures:
    """Measure the primary alone if asked for; return the run's figures.

    The run folder gets ``history.csv`` and, where the top model can tell, ``explanation.json``;
    the figures are written when all of them are known.

    Args:
        run: Trained and tested.
        folder: The run's.
        mode: ``simulated`` or ``federated``.
        traffic: Bytes that each party sent and received.
        with_alone: Whether to measure.
        positions: Secondaries' positional encodings around the first average, by name, where a
            simulation shows them.

    Reveals:
        Nothing: the primary works alone here.
    """
    tested = run.tested
    placebos = {} if tested is None else _placebos(run, with_alone=with_alone)
    outputs, alone = run.joint_outputs, None
    if with_alone and tested is not None and outputs is not None:
        alone = _measure_alone(run, outputs, placebos)
    primary, config, head = run.primary, run.plan.config, run.data.head
    choice = run.choice
    validation = primary.best_validation if choice is None else choice.validation
    run_folder.write_history(folder, primary.history)
    run_folder.write_explanation(folder, primary.explanation(positions), for_others=True)
    return metrics_file.RunFigures(
        federation=config.federation.name,
        task=config.federation.task,
        family=config.family.name,
        metric=head.metric_name,
        higher_is_better=head.higher_is_better,
        train=primary.best_line["train"],
        validation=head.headline(validation),
        test=None if tested is None else head.headline(tested.metrics),
        alone_test=None if alone is None else head.headline(alone.metrics),
        alone=None if alone is None else alone.as_json(),
        gain=None if alone is None else alone.gain.as_json(),
        placebos={name: _test_metrics(run, outputs) for name, outputs in placebos.items()},
        validation_metrics=validation,
        test_metrics={} if tested is None else tested.metrics,
        evaluation={} if tested is None else tested.as_json(),
        untested=metrics_file.UNTESTED if tested is None else None,
        base=None if choice is None else choice.as_json(config),
        joint_test_metrics=None if choice is None else choice.joint_test,
        epochs=primary.epoch,
        best_epoch=primary.best_epoch,
        seconds=round(time.monotonic() - run.started, 3),
        ended=now(),
        rows={
            "train": len(run.data.split.train),
            "validation": len(run.data.split.validation),
            "test": len(run.data.split.test),
        },
        parties=len(config.parties),
        bytes={name: dict(row) for name, row in traffic.items()},
        mode=mode,
        privacy=metrics_file.privacy_figures(run.plan, run.ledger),
        stages=run.stage_figures(),
        alignment=run.alignment,
        links=run.links,
        announced_keys=run.linked.announced,
        linked_rows=run.linked_rows,
        absences=None if run.presence is None else run.presence.absences() or None,
        run=run.plan.facts.run,
        ledger=str(run.files.run_ledger.relative_to(folder)),
        version=__version__,
    )


def _test_metrics(run: PrimaryRun, outputs: Tensor) -> Metrics:
    """Return every metric of outputs for the test rows."""
    rows = torch.from_numpy(run.data.split.test).to(outputs.device)
    targets = run.data.targets[rows]
    return run.data.head.metrics(outputs, targets, threshold=run.primary.threshold)


def _placebos(run: PrimaryRun, *, with_alone: bool) -> dict[Placebo, Tensor]:
    """Return the outputs of every placebo for the test rows."""
    placebos: dict[Placebo, Tensor] = {}
    own = None if run.choice is None else run.choice.own
    if run.choice is None and with_alone:
        own = run.train_own_network()
    if own is not None:
        placebos["own"] = own.predict(run.data.split.test, "test")
    if run.placebo is not None:
        placebos["permuted"] = run.placebo
    return placebos


def _measure_alone(
    run: PrimaryRun, outputs: Tensor, placebos: Mapping[Placebo, Tensor]
) -> AloneMeasured:
    run.options.observe(Stage(text="fitting the primary alone"))
    rows, choice = run.data.split.test, run.choice
    return measure_alone(
        train_alone(run.plan.config, run.table, run.data) if choice is None else choice.alone,
        own_inputs(run.table).take(rows),
        run.data.targets[torch.from_numpy(rows).to(outputs.device)],
        outputs,
        threshold=run.primary.threshold,
        seed=run.plan.config.federation.seed,
        decision=None if choice is None else choice.decision,
        placebos=placebos,
    )
