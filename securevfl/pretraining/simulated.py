"""Pretraining with all parties in one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from securevfl.config.federation import FederationConfig
from securevfl.core.progress import Observer
from securevfl.data.tables import PartyTable
from securevfl.federation.checkpoint import Checkpoints
from securevfl.federation.primary import Primary
from securevfl.federation.secondary import Secondary
from securevfl.pretraining.build import build_pretraining_secondary, build_run
from securevfl.pretraining.encoders_file import save_encoders
from securevfl.pretraining.exchange import SimulatedPretraining
from securevfl.pretraining.stage import (
    common_start,
    hand_over,
    load_checkpoint,
    run_pretraining,
    wants_pretraining,
)


def pretrain_in_process(
    config: FederationConfig,
    tables: Mapping[str, PartyTable],
    primary: Primary,
    secondaries: Mapping[str, Secondary],
    stores: Mapping[str, Checkpoints],
    run_folder: Path,
    *,
    resume: bool,
    observe: Observer,
) -> dict[str, Any] | None:
    """Let all parties' models start from pretrained encoders, where the family has such.

    They are pretrained here, or taken from the checkpoint that the federation file names.

    Args:
        config: The federation file.
        tables: Every party's table.
        primary: The primary with its top model.
        secondaries: The secondaries by name, with their bottom models.
        stores: Every party's checkpoints by name.
        run_folder: Gets ``pretraining.json``; each party's folder its encoders.
        resume: Go on from the last iteration that all have saved.
        observe: Hears of progress.

    Returns:
        What pretraining came to, for ``metrics.json``; None if there was none.

    Raises:
        ConfigError: If the checkpoint is missing, or of another model.
        DataError: If there are too few rows or records.
        PrivacyError: If training diverges.

    Reveals:
        Nothing leaves the process.
    """
    name = config.primary.name
    models = {name: primary.top, **{party: one.bottom for party, one in secondaries.items()}}
    for party, model in models.items():
        load_checkpoint(config, party, model)
    if not wants_pretraining(config):
        return None
    start = common_start(config, [one.pretrained() for one in stores.values()]) if resume else 0
    observe({"event": "stage", "text": "pretraining", "of": config.pretraining.iterations})
    parts = [
        build_pretraining_secondary(
            config,
            tables[party],
            secondary.features,
            secondary.links,
            primary_rows=secondary.primary_rows,
            checkpoints=stores[party],
            start=start,
            observe=observe,
        )
        for party, secondary in secondaries.items()
    ]
    run = build_run(
        config,
        tables[name],
        primary.data.features,
        primary.data.split,
        SimulatedPretraining(parts, plain=config.pretraining.exchange == "plain"),
        rounds=primary.rounds,
        folder=run_folder / "parties" / name,
        checkpoints=stores[name],
        start=start,
        observe=observe,
    )
    figures = run_pretraining(run, config, run_folder, start=start, split=primary.data.split)
    learners = {one.name: one.learner for one in (run.learning, *(part.learning for part in parts))}
    for party, model in models.items():
        encoders = learners[party].encoders()
        save_encoders(run_folder / "parties" / party, encoders)
        hand_over(config, model, encoders, party=party)
    return figures
