"""Pretraining as a stage of a run: where it starts, what it saves, what fine-tuning starts from."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.core import progress
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.files import read_json, write_json
from securevfl.data.tables import PartyTable
from securevfl.federation.checkpoint import write_state
from securevfl.federation.stage import (
    PrimaryContext,
    RunStage,
    SecondaryContext,
    StageAtPrimary,
    StageAtSecondary,
)
from securevfl.stages.pretraining.learning import LearnerWithRecords, pretraining_rows
from securevfl.stages.pretraining.messages import PretrainingValidator
from securevfl.stages.pretraining.parties import PretrainingRun, PretrainingSecondary


class PretrainingStage(RunStage):
    """Encoders that learn without labels, before supervised rounds."""

    def primary(self, context: PrimaryContext) -> StageAtPrimary:
        """Return the primary's part."""
        return PretrainingPrimary(context)

    def secondary(self, context: SecondaryContext) -> StageAtSecondary | None:
        """Return a secondary's part; None where the run has pretrained already."""
        plan, files, secondary = context.plan, context.files, context.secondary
        config, start = plan.config, plan.facts.resume_stage
        if plan.facts.resume_epoch:
            return None

        def warn(event: progress.ProgressEvent) -> None:
            if isinstance(event, progress.Warned):
                files.log("warning", text=event.text)
            context.observe(event)

        def build(own: npt.NDArray[np.int64]) -> LearnerWithRecords:
            return build_learner(config, secondary.data.features, own, table=context.table)

        def finish(learning: LearnerWithRecords) -> None:
            finish_pretraining(config, secondary.bottom, learning, files.folder)

        _warn(config, context.table, warn)
        checkpoints = files.checkpoints
        return PretrainingSecondary(
            secondary.data,
            PretrainingValidator(
                config.pretraining,
                steps=config.family.pretraining,
                learning_rows=plan.facts.train_rows + plan.facts.unlabelled_rows,
                linked=context.linked.linked_rows(),
                done=start,
                take_round=secondary.validator.take_round,
            ),
            config.pretraining,
            parties=len(plan.secondaries),
            build=build,
            save=checkpoints.save_stage,
            finish=finish,
            observe=warn,
            log=files.log,
            restore=partial(checkpoints.load_stage, start) if start else None,
        )


class PretrainingPrimary(StageAtPrimary):
    """The primary's part: pretrain with the secondaries."""

    def __init__(self, context: PrimaryContext) -> None:
        self._context = context
        self._figures: Mapping[str, Any] | None = None

    @property
    def figures(self) -> Mapping[str, Any] | None:
        """Algorithm, iterations, seconds and the last iteration's figures; None without any."""
        return self._figures

    def prepare(self) -> None:
        """Let the primary's model start from pretrained encoders.

        Raises:
            DataError: If there are too few rows or records.
            PrivacyError: If training diverges.

        Reveals:
            What :class:`securevfl.stages.pretraining.parties.PretrainingRun` reveals.
        """
        context, config = self._context, self._context.plan.config
        if context.plan.facts.resume_epoch:
            self._figures = earlier_figures(context.run_folder)
            return
        self._figures = self._pretrain(config)

    def _pretrain(self, config: FederationConfig) -> dict[str, Any]:
        context, settings, data = self._context, config.pretraining, self._context.primary.data
        start, files = context.plan.facts.resume_stage, context.files
        context.observe(progress.Stage(text="pretraining", of=settings.iterations))
        _warn(config, context.table, context.observe)
        alignment = context.linked.alignment
        rows = pretraining_rows(
            data.split,
            linked=None if alignment is None else alignment.everywhere,
            aligned=settings.aligned,
            seed=config.federation.seed,
        )
        run = PretrainingRun(
            build_learner(config, data.features, rows.own, table=context.table),
            context.peers,
            rows,
            steps=config.family.pretraining,
            rounds=context.primary.exchange.rounds,
            save=files.checkpoints.save_stage,
            observe=context.observe,
            simulated=[part for part in context.here if isinstance(part, PretrainingSecondary)],
        )
        if start:
            files.checkpoints.load_stage(start, run.load_state)
        run.run(start=start)
        figures = write_figures(
            run, config, context.run_folder, start=start, labelled=len(data.split.train)
        )
        finish_pretraining(config, context.primary.top, run.learning, files.folder)
        return figures


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


def _warn(config: FederationConfig, table: PartyTable, observe: progress.Observer) -> None:
    text = config.family.pretraining_warning(config.model, table.feature_names)
    if text is not None:
        observe(progress.Warned(text=f"{table.name}: {text}"))


_ENCODERS_NAME: Final = "encoders.pt"


_NAME: Final = "pretraining.json"


def earlier_figures(run_folder: Path) -> dict[str, Any] | None:
    """Return the figures of a pretraining that has ended in this folder, or None."""
    path = run_folder / _NAME
    if not path.exists():
        return None
    return {key: value for key, value in read_json(path).items() if key != "history"}


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


def write_figures(
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
