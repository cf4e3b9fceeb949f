"""Pretraining with all parties in one process."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securevfl.core.progress import Observer, Stage
from securevfl.data.tables import PartyTable
from securevfl.federation.pretraining.pretraining_exchange import SimulatedPretraining
from securevfl.federation.pretraining.pretraining_run import build_pretraining_secondary, build_run
from securevfl.federation.pretraining.pretraining_stage import (
    common_start,
    earlier_figures,
    hand_over,
    load_checkpoint,
    run_pretraining,
    save_encoders,
    wants_pretraining,
)
from securevfl.federation.rounds.primary import Primary
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.party_files import PartyFiles
from securevfl.linkage.links import Alignment


@dataclass(frozen=True, eq=False)
class SimulatedParty:
    """A secondary of a simulated federation, with what it keeps of the run."""

    secondary: Secondary
    files: PartyFiles


def pretrain_in_process(
    plan: RunPlan,
    tables: Mapping[str, PartyTable],
    primary: Primary,
    files: PartyFiles,
    parties: Mapping[str, SimulatedParty],
    run_folder: Path,
    *,
    alignment: Alignment | None,
    observe: Observer,
) -> dict[str, Any] | None:
    """Let all parties' models start from pretrained encoders, where the family has such.

    They are pretrained here, or taken from the checkpoint that the federation file names.

    Args:
        plan: The run.
        tables: Every party's table.
        primary: The primary with its top model.
        files: The primary's own; a run that goes on starts from the last iteration that all have
            saved.
        parties: The secondaries by name, with their bottom models.
        run_folder: Gets ``pretraining.json``; each party's folder its encoders.
        alignment: Which rows are linked where; None where nothing is learned across parties.
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
    config, name = plan.config, plan.config.primary.name
    if plan.facts.resume_epoch:
        return earlier_figures(run_folder)
    models = {
        name: primary.top,
        **{party: one.secondary.bottom for party, one in parties.items()},
    }
    for party, model in models.items():
        load_checkpoint(config, party, model)
    if not wants_pretraining(config):
        return None
    stores = {name: files, **{party: one.files for party, one in parties.items()}}
    saved = [one.checkpoints.pretrained() for one in stores.values()]
    start = common_start(config, saved) if files.resume else 0
    observe(Stage(text="pretraining", of=config.pretraining.iterations))
    parts = [
        build_pretraining_secondary(
            config,
            tables[party],
            one.secondary.data,
            one.files.checkpoints,
            start=start,
            observe=observe,
        )
        for party, one in parties.items()
    ]
    exchange = SimulatedPretraining(parts, plain=config.pretraining.exchange == "plain")
    run = build_run(
        config,
        tables[name],
        primary,
        exchange,
        files,
        alignment=alignment,
        start=start,
        observe=observe,
    )
    figures = run_pretraining(run, config, run_folder, start=start, split=primary.data.split)
    learners = {one.name: one.learner for one in (run.learning, *(p.learning for p in parts))}
    for party, model in models.items():
        encoders = learners[party].encoders()
        save_encoders(stores[party].folder, encoders)
        hand_over(config, model, encoders, party=party)
    return figures
