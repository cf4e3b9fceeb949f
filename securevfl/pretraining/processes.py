"""Pretraining as a stage of a party's own process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from securevfl.config.federation import FederationConfig
from securevfl.core.progress import Observer
from securevfl.core.ranks import PRIMARY_RANK
from securevfl.data.tables import PartyTable
from securevfl.federation.checkpoint import Checkpoints
from securevfl.federation.exchange_over_star import PrimaryWire
from securevfl.federation.primary import Primary
from securevfl.federation.run_plan import RunFacts
from securevfl.federation.secondary import Secondary
from securevfl.mpc.crypten_bridge import CrypTenBridge
from securevfl.mpc.sum_to import CrypTenSumTo, SumTo
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
    config: FederationConfig,
    table: PartyTable,
    primary: Primary,
    transport: PrimaryTransport,
    facts: RunFacts,
    *,
    run_folder: Path,
    checkpoints: Checkpoints,
    device: torch.device,
    observe: Observer,
) -> dict[str, Any] | None:
    """Let the primary's model start from pretrained encoders, where its family has such.

    Returns:
        What pretraining came to, for ``metrics.json``; None if there was none.

    Reveals:
        What :class:`securevfl.pretraining.exchange.PretrainingExchange` says.
    """
    name = config.primary.name
    if facts.resume_epoch:
        return earlier_figures(run_folder)
    load_checkpoint(config, name, primary.top)
    if not wants_pretraining(config):
        return None
    observe({"event": "stage", "text": "pretraining", "of": config.pretraining.iterations})
    names = {config.ranks[party.name]: party.name for party in config.secondaries}
    # Between two messages a secondary may go through all of its records.
    wire = PrimaryWire(transport, names, deadline_s=config.runtime.idle_timeout_s)
    run = build_run(
        config,
        table,
        primary.data.features,
        primary.data.split,
        FederatedPretraining(
            transport,
            names=names,
            sum_to=CrypTenSumTo(CrypTenBridge(wire, rank=PRIMARY_RANK), None),
            plain=config.pretraining.exchange == "plain",
            runtime=config.runtime,
            device=device,
        ),
        rounds=primary.rounds,
        folder=run_folder / "parties" / name,
        checkpoints=checkpoints,
        start=facts.resume_pretraining,
        observe=observe,
    )
    figures = run_pretraining(
        run, config, run_folder, start=facts.resume_pretraining, split=primary.data.split
    )
    encoders = run.learning.learner.encoders()
    save_encoders(run_folder / "parties" / name, encoders)
    hand_over(primary.top, encoders, party=name)
    return figures


def pretrain_as_secondary(
    config: FederationConfig,
    table: PartyTable,
    secondary: Secondary,
    transport: SecondaryTransport,
    sum_to: SumTo,
    facts: RunFacts,
    *,
    folder: Path,
    checkpoints: Checkpoints,
    device: torch.device,
    observe: Observer,
    log: Callable[..., None],
) -> None:
    """Let a secondary's model start from pretrained encoders, where its family has such.

    Reveals:
        What :class:`PretrainingServer` reveals.
    """
    if facts.resume_epoch:
        return
    load_checkpoint(config, table.name, secondary.bottom)
    if not wants_pretraining(config):
        return

    def warn(event: Mapping[str, object]) -> None:
        if event.get("event") == "warning":
            log("warning", text=event["text"])
        observe(event)

    part = build_pretraining_secondary(
        config,
        table,
        secondary.features,
        secondary.links,
        primary_rows=secondary.primary_rows,
        checkpoints=checkpoints,
        start=facts.resume_pretraining,
        observe=warn,
    )
    PretrainingServer(
        part,
        transport,
        sum_to,
        parties=1 + len(config.secondaries),
        width=config.pretraining.projection_width,
        plain=config.pretraining.exchange == "plain",
        runtime=config.runtime,
        device=device,
        log=log,
    ).serve()
    encoders = part.learning.learner.encoders()
    save_encoders(folder, encoders)
    hand_over(secondary.bottom, encoders, party=table.name)
