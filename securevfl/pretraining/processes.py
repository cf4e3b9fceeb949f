"""Pretraining as a stage of a party's own process."""

from pathlib import Path
from typing import Any

from securevfl.core.progress import Observer, ProgressEvent, Stage, Warned
from securevfl.data.tables import PartyTable
from securevfl.federation.party_files import PartyFiles
from securevfl.federation.primary import Primary
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.secondary import Secondary
from securevfl.linkage.alignment import Alignment
from securevfl.linkage.linked import LinkedSecondary
from securevfl.mpc.sum_to import SumTo
from securevfl.pretraining.allowance import PretrainingAllowance
from securevfl.pretraining.build import build_pretraining_secondary, build_run
from securevfl.pretraining.encoders_file import save_encoders
from securevfl.pretraining.federated import FederatedPretraining, PretrainingServer
from securevfl.pretraining.stage import (
    earlier_figures,
    hand_over,
    load_checkpoint,
    run_pretraining,
    wants_pretraining,
)
from securevfl.transport.star import PrimaryTransport, SecondaryTransport


def pretrain_as_primary(
    plan: RunPlan,
    table: PartyTable,
    primary: Primary,
    transport: PrimaryTransport,
    files: PartyFiles,
    *,
    alignment: Alignment | None,
    run_folder: Path,
    observe: Observer,
) -> dict[str, Any] | None:
    """Let the primary's model start from pretrained encoders, where its family has such.

    Args:
        plan: The run.
        table: The primary's table.
        primary: The primary with its top model.
        transport: Its end of the star.
        files: Its own.
        alignment: Which rows are linked where; None where nothing is learned across parties.
        run_folder: Gets ``pretraining.json``.
        observe: Hears of progress.

    Returns:
        What pretraining came to, for ``metrics.json``; None if there was none.

    Reveals:
        What :class:`securevfl.pretraining.exchange.PretrainingExchange` says.
    """
    config, start = plan.config, plan.facts.resume_pretraining
    if plan.facts.resume_epoch:
        return earlier_figures(run_folder)
    load_checkpoint(config, table.name, primary.top)
    if not wants_pretraining(config):
        return None
    observe(Stage(text="pretraining", of=config.pretraining.iterations))
    exchange = FederatedPretraining(transport, plan, device=primary.data.features.device)
    run = build_run(
        config,
        table,
        primary,
        exchange,
        files,
        alignment=alignment,
        start=start,
        observe=observe,
    )
    figures = run_pretraining(run, config, run_folder, start=start, split=primary.data.split)
    encoders = run.learning.learner.encoders()
    save_encoders(files.folder, encoders)
    hand_over(config, primary.top, encoders, party=table.name)
    return figures


def pretrain_as_secondary(
    plan: RunPlan,
    table: PartyTable,
    secondary: Secondary,
    transport: SecondaryTransport,
    sum_to: SumTo,
    files: PartyFiles,
    *,
    linked: LinkedSecondary,
    observe: Observer,
) -> None:
    """Let a secondary's model start from pretrained encoders, where its family has such.

    Args:
        plan: The run.
        table: The party's table.
        secondary: The party with its bottom model.
        transport: Its end of the star.
        sum_to: Its end of secure sums.
        files: Its own.
        linked: What linking left here.
        observe: Hears of warnings.

    Reveals:
        What :class:`PretrainingServer` reveals.
    """
    config = plan.config
    if plan.facts.resume_epoch:
        return
    load_checkpoint(config, table.name, secondary.bottom)
    if not wants_pretraining(config):
        return

    def warn(event: ProgressEvent) -> None:
        if isinstance(event, Warned):
            files.log("warning", text=event.text)
        observe(event)

    part = build_pretraining_secondary(
        config,
        table,
        secondary.data,
        files.checkpoints,
        start=plan.facts.resume_pretraining,
        observe=warn,
    )
    PretrainingServer(
        part,
        transport,
        sum_to,
        plan,
        allowance=PretrainingAllowance(plan, secondary.allowance, linked=linked.linked_rows()),
        device=secondary.device,
        log=files.log,
    ).serve()
    encoders = part.learning.learner.encoders()
    save_encoders(files.folder, encoders)
    hand_over(config, secondary.bottom, encoders, party=table.name)
