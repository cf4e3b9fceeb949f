"""Pretraining as a stage of a run: where it starts, what it saves, what fine-tuning starts from.

Written once: a party's own process and a simulation call the same functions.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.files import read_json, write_json
from securevfl.core.progress import Observer, ProgressEvent, Stage, Warned
from securevfl.data.tables import PartyTable
from securevfl.federation.checkpoint import DamagedError, read_state, write_state
from securevfl.federation.pretraining.messages import PretrainingValidator
from securevfl.federation.pretraining.pretraining_run import PretrainingRun, projection_mechanism
from securevfl.federation.pretraining.pretraining_secondary import (
    LearnerWithRecords,
    PretrainingSecondary,
    even_batches,
    pretraining_rows,
)
from securevfl.federation.rounds.primary import Primary
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.party_files import PartyFiles
from securevfl.federation.session.peers import Peers
from securevfl.linkage.links import Alignment
from securevfl.linkage.spec import LinkedSecondary

# The file in which a party keeps its pretrained encoders.

_ENCODERS_NAME: Final = "encoders.pt"


def load_encoders(run_folder: Path, party: str) -> dict[str, dict[str, Tensor]]:
    """Read a party's encoders from the run folder of an earlier pretraining.

    Raises:
        ConfigError: If there are none, or the file is damaged.
    """
    path = run_folder.expanduser() / "parties" / party / _ENCODERS_NAME
    try:
        return read_state(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"pretraining.checkpoint: {path}: {error.strerror}; name the run folder of a finished "
            f"securevfl train --pretrain-only"
        ) from None
    except DamagedError as error:
        raise ConfigError(
            f"pretraining.checkpoint: {error}; restore it from a copy, or pretrain again"
        ) from None


# Pretraining as a stage of a run: where it starts, what it keeps, what fine-tuning starts from.

_NAME: Final = "pretraining.json"


def wants_pretraining(config: FederationConfig) -> bool:
    """Whether a run begins with pretraining of its own."""
    return bool(config.family.pretraining) and config.pretraining.checkpoint is None


def load_checkpoint(config: FederationConfig, party: str, model: nn.Module) -> None:
    """Start a party's model from the encoders of an earlier pretraining, if the file names one.

    Raises:
        ConfigError: If they are not there, or belong to another model.
    """
    folder = config.pretraining.checkpoint
    if config.family.pretraining and folder is not None:
        config.family.load_pretrained(model, load_encoders(Path(folder), party))


def earlier_figures(run_folder: Path) -> dict[str, Any] | None:
    """Return the figures of a pretraining that has ended in this folder, or None."""
    path = run_folder / _NAME
    if not path.exists():
        return None
    content = read_json(path)
    return {
        key: value for key, value in content.items() if key not in ("history", "bytes", "alignment")
    }


def write_pretraining(
    run_folder: Path,
    figures: Mapping[str, Any] | None,
    traffic: Mapping[str, Mapping[str, int]],
    *,
    alignment: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Add what was sent to ``pretraining.json``, unless it says so already; return its figures.

    Args:
        run_folder: Where it lies.
        figures: What pretraining came to.
        traffic: What each party sent and received.
        alignment: How many rows are linked where; None where nobody asked.

    Raises:
        ConfigError: If the federation file has nothing to pretrain.
    """
    if figures is None:
        raise nothing_to_pretrain()
    path = run_folder / _NAME
    content = read_json(path)
    content.setdefault("bytes", {name: dict(row) for name, row in traffic.items()})
    if alignment is not None:
        content.setdefault("alignment", dict(alignment))
    write_json(path, content)
    return {key: value for key, value in content.items() if key != "history"}


def nothing_to_pretrain() -> ConfigError:
    """Return the refusal of a pretraining that has no steps."""
    return ConfigError(
        "model.family: there is nothing to pretrain: choose a family that pretrains, such as "
        '"fedhssl", and no pretraining.checkpoint'
    )


def common_start(config: FederationConfig, saved: Sequence[Sequence[int]]) -> int:
    """Return after how many iterations all parties can go on, 0 for a fresh start."""
    if not wants_pretraining(config):
        return 0
    return max(set.intersection(*(set(one) for one in saved)), default=0)


# Each party's part, built from the federation file.


def build_learner(
    config: FederationConfig,
    features: Tensor,
    own: npt.NDArray[np.int64],
    *,
    table: PartyTable,
) -> LearnerWithRecords:
    """Return a party's learner with its records.

    Args:
        config: The federation file.
        features: The party's features, scaled, on its device.
        own: Its records that it may learn from.
        table: The party's table, for its name and its columns.

    Raises:
        DataError: If there are too few records.
        ConfigError: If the encoder does not fit the features.
    """
    name = table.name
    if "local" in config.family.pretraining and len(own) < 2:
        raise DataError(
            f"pretraining: {name!r} has {len(own)} records of its own to learn from; at least 2"
        )
    learner = config.family.build_learner(
        config.model,
        config.pretraining,
        features=features[torch.as_tensor(own, device=features.device)],
        feature_names=table.feature_names,
        party=name,
        seed=config.federation.seed,
    )
    return LearnerWithRecords(learner, features, own, name=name, seed=config.federation.seed)


def _warn(config: FederationConfig, table: PartyTable, observe: Observer) -> None:
    text = config.family.pretraining_warning(config.model, table.feature_names)
    if text is not None:
        observe(Warned(text=f"{table.name}: {text}"))


def pretraining_secondary(
    plan: RunPlan,
    table: PartyTable,
    secondary: Secondary,
    files: PartyFiles,
    *,
    linked: LinkedSecondary,
    observe: Observer,
) -> PretrainingSecondary | None:
    """Return a secondary's part in pretraining, which :func:`finish_pretraining` ends.

    Args:
        plan: The run.
        table: The party's table.
        secondary: The party with its bottom model, which starts from the checkpoint that the
            federation file names.
        files: Its own.
        linked: Its side of the links.
        observe: Receives warnings.

    Returns:
        Its part; None where the run pretrains nothing, or has done so.

    Raises:
        ConfigError: If the checkpoint is missing, or of another model.
    """
    config, start = plan.config, plan.facts.resume_pretraining
    if plan.facts.resume_epoch:
        return None
    load_checkpoint(config, table.name, secondary.bottom)
    if not wants_pretraining(config):
        return None

    def warn(event: ProgressEvent) -> None:
        if isinstance(event, Warned):
            files.log("warning", text=event.text)
        observe(event)

    def build(own: npt.NDArray[np.int64]) -> LearnerWithRecords:
        return build_learner(config, secondary.data.features, own, table=table)

    _warn(config, table, warn)
    checkpoints = files.checkpoints
    return PretrainingSecondary(
        secondary.data,
        PretrainingValidator(
            config.pretraining,
            steps=config.family.pretraining,
            learning_rows=plan.facts.train_rows + plan.facts.unlabelled_rows,
            linked=linked.linked_rows(),
            done=start,
            take_round=secondary.validator.take_round,
        ),
        config.pretraining,
        parties=len(plan.secondaries),
        build=build,
        save=checkpoints.save_pretraining,
        observe=warn,
        log=files.log,
        restore=partial(checkpoints.load_pretraining, start) if start else None,
    )


def pretrain_as_primary(
    plan: RunPlan,
    table: PartyTable,
    primary: Primary,
    peers: Peers,
    files: PartyFiles,
    *,
    alignment: Alignment | None,
    run_folder: Path,
    observe: Observer,
    simulated: Sequence[PretrainingSecondary] = (),
) -> dict[str, Any] | None:
    """Let the primary's model start from pretrained encoders, where its family has such.

    They are pretrained here, or taken from the checkpoint that the federation file names.

    Args:
        plan: The run.
        table: The primary's table.
        primary: The primary with its top model.
        peers: The secondaries.
        files: The primary's own.
        alignment: Which rows are linked where; None where nothing is learned across parties.
        run_folder: Gets ``pretraining.json``.
        observe: Receives progress.
        simulated: Secondaries of this process, whose figures are averaged into the history.

    Returns:
        Figures for ``metrics.json``: algorithm, iterations, seconds and the last iteration's
        figures; None if there was no pretraining.

    Raises:
        ConfigError: If the checkpoint is missing, or of another model.
        DataError: If there are too few rows or records.
        PrivacyError: If training diverges.

    Reveals:
        What :class:`securevfl.federation.pretraining.pretraining_run.PretrainingRun` reveals.
    """
    config, start = plan.config, plan.facts.resume_pretraining
    if plan.facts.resume_epoch:
        return earlier_figures(run_folder)
    load_checkpoint(config, table.name, primary.top)
    if not wants_pretraining(config):
        return None
    observe(Stage(text="pretraining", of=config.pretraining.iterations))
    settings, data = config.pretraining, primary.data
    _warn(config, table, observe)
    rows = pretraining_rows(
        data.split,
        linked=None if alignment is None else alignment.everywhere,
        aligned=settings.aligned,
        seed=config.federation.seed,
    )
    run = PretrainingRun(
        build_learner(config, data.features, rows.own, table=table),
        peers,
        rows,
        steps=config.family.pretraining,
        projection_mechanism=projection_mechanism(
            settings,
            batches=len(even_batches(rows.aligned, batch_size=settings.batch_size)),
            rows=len(rows.aligned),
            ledger=files.ledger_path("pretraining-ledger"),
            run=files.ledger.run,
            party=config.primary.name,
        ),
        rounds=primary.exchange.rounds,
        save=files.checkpoints.save_pretraining,
        observe=observe,
        simulated=simulated,
    )
    if start:
        files.checkpoints.load_pretraining(start, run.load_state)
    try:
        run.run(start=start)
    finally:
        run.projection_mechanism.close()
    figures = _written(run, config, run_folder, start=start, labelled=len(data.split.train))
    finish_pretraining(config, primary.top, run.learning, files.folder)
    return figures


def _written(
    run: PretrainingRun, config: FederationConfig, run_folder: Path, *, start: int, labelled: int
) -> dict[str, Any]:
    """Write ``pretraining.json`` to the run folder, and return its figures."""
    settings = config.pretraining
    earlier = earlier_figures(run_folder)
    if start >= settings.iterations and earlier is not None:
        # It had ended, and nothing was learned now: its file keeps what was sent, too.
        return earlier
    figures: dict[str, Any] = {
        "method": config.family.name,
        "algorithm": settings.algorithm,
        "steps": list(config.family.pretraining),
        "iterations": settings.iterations,
        **({"aligned_rows": len(run.rows.aligned)} if "cross" in run.steps else {}),
        "own_rows": len(run.rows.own),
        "labelled_rows": labelled,
        **run.history[-1],
        "seconds": round(sum(line["seconds"] for line in run.history), 3),
    }
    figures.pop("iteration")
    write_json(run_folder / _NAME, {**figures, "history": run.history})
    return figures


def finish_pretraining(
    config: FederationConfig, model: nn.Module, learning: LearnerWithRecords, party_folder: Path
) -> None:
    """Save a party's encoders in its folder, and let its bottom or top model start from them.

    Raises:
        ConfigError: Naming the party, if the encoders do not fit.
    """
    encoders = learning.learner.encoders()
    write_state(party_folder / _ENCODERS_NAME, encoders)
    try:
        config.family.load_pretrained(model, encoders)
    except ConfigError as error:
        raise ConfigError(f"{learning.name}: {error}") from None
