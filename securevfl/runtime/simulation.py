"""The whole federation in one process: the same parties, the same noise, no cryptography."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import link_spec
from securevfl.config.parties import PartySettings
from securevfl.config.rules import require_covered_channels
from securevfl.core import files
from securevfl.core.progress import Observer
from securevfl.data.tables import PartyTable
from securevfl.federation.build import build_secondary, require_enough_records
from securevfl.federation.checkpoint import Checkpoints, require_resumable
from securevfl.federation.epochs import EpochKeeper
from securevfl.federation.exchange_in_process import SimulatedExchange
from securevfl.federation.ledger import Ledger
from securevfl.federation.rounds import EpochMark, RoundCounter
from securevfl.federation.run_plan import is_frozen, release_plan, ring_format, run_facts, slots
from securevfl.linking.in_process import Linker
from securevfl.linking.keys import keys_of
from securevfl.pretraining.simulated import pretrain_in_process
from securevfl.pretraining.stage import earlier_figures, write_pretraining
from securevfl.runtime.preflight import open_ledger, table_warnings
from securevfl.runtime.primary_run import PrimaryRun
from securevfl.runtime.run_folder import write_federation


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """What a simulated run leaves behind in memory."""

    metrics: dict[str, Any]
    """The content of ``metrics.json``."""

    history: list[dict[str, Any]]
    """One mapping an epoch."""

    losses: list[float]
    """Loss of every training round."""

    ledger: list[dict[str, Any]]
    """The primary's ledger, one mapping a line."""


def simulate_federation(
    config: FederationConfig,
    tables: Mapping[str, PartyTable],
    run_folder: Path,
    *,
    device: torch.device,
    resume: bool = False,
    with_solo: bool = True,
    observe: Observer = lambda _event: None,
    pretrain_only: bool = False,
) -> SimulationResult:
    """Run all parties of a federation in this process.

    Args:
        config: The federation file.
        tables: Every party's table, by name.
        run_folder: Gets the files of DESIGN 5.3, without a report.
        device: Where models and noise are computed.
        resume: Go on from the last epoch that was saved in ``run_folder``.
        with_solo: Train the solo baseline too; None is reported for it otherwise.
        observe: Hears of progress.
        pretrain_only: End when pretraining is done; the metrics are its figures.

    Raises:
        SecureVflError: As a federated run would.

    Reveals:
        Everything is in one process: a simulation protects nobody's table.
    """
    with contextlib.ExitStack() as ledgers:
        return _simulate(
            config,
            tables,
            run_folder,
            device=device,
            resume=resume,
            with_solo=with_solo,
            observe=observe,
            ledgers=ledgers,
            pretrain_only=pretrain_only,
        )


def _simulate(
    config: FederationConfig,
    tables: Mapping[str, PartyTable],
    run_folder: Path,
    *,
    device: torch.device,
    resume: bool,
    with_solo: bool,
    observe: Observer,
    ledgers: contextlib.ExitStack,
    pretrain_only: bool,
) -> SimulationResult:
    require_covered_channels(config)
    files.require_writable_folder(run_folder)
    for party in config.table_parties:
        for text in table_warnings(config, party, tables[party.name]):
            observe({"event": "warning", "text": text})

    def own_ledger(party: PartySettings, folder: Path) -> Ledger:
        ledger = open_ledger(folder, config, plan, party=party.name, resume=resume, simulated=True)
        ledgers.callback(ledger.close)
        return ledger

    primary_table = tables[config.primary.name]
    split, facts = run_facts(config, primary_table)
    plan = release_plan(config, facts)
    ring = ring_format(config, plan)
    observe({"event": "stage", "text": "linking", "of": len(config.secondaries)})
    spec = link_spec(config)
    link = Linker(spec, keys_of(spec.keys, primary_table), folder=run_folder / "parties")
    secondaries, keepers, stores = {}, [], []
    for party in config.secondaries:
        folder = run_folder / "parties" / party.name
        book = own_ledger(party, folder)
        require_enough_records(config, tables[party.name])
        secondary = build_secondary(
            config,
            party,
            tables[party.name],
            link(keys_of(spec.keys, tables[party.name])),
            plan=plan,
            ring=ring,
            ledger=book,
            device=device,
        )
        store = Checkpoints(folder, settings_digest=config.settings_digest)
        store.guard(book)
        ledgers.callback(secondary.close)
        secondaries[config.ranks[party.name]] = secondary
        stores.append(store)
        keepers.append(EpochKeeper(secondary, store))

    def end_epoch(mark: EpochMark) -> None:
        for keeper in keepers:
            keeper(mark)

    folder = run_folder / "parties" / config.primary.name
    store = Checkpoints(folder, settings_digest=config.settings_digest)
    ledger = own_ledger(config.primary, folder)
    store.guard(ledger)
    epoch = _resume_epoch(config, store, stores) if resume else 0
    for secondary, saved in zip(secondaries.values(), stores, strict=True):
        if epoch and not is_frozen(config):
            secondary.load_state(saved.load(epoch))
    write_federation(run_folder, config)
    run = PrimaryRun(
        config,
        primary_table,
        split,
        link.primary,
        plan=plan,
        exchange=SimulatedExchange(
            secondaries, ring=ring, slots=slots(config, plan), end_epoch=end_epoch
        ),
        rounds=RoundCounter(),
        ledger=ledger,
        checkpoints=store,
        device=device,
        observe=observe,
        traffic=lambda: 0,
    )
    names = {party.name: secondaries[config.ranks[party.name]] for party in config.secondaries}
    if epoch:
        run.pretraining = earlier_figures(run_folder)
    else:
        run.pretraining = pretrain_in_process(
            config,
            tables,
            run.primary,
            names,
            {config.primary.name: store, **dict(zip(names, stores, strict=True))},
            run_folder,
            resume=resume,
            observe=observe,
        )
    if pretrain_only:
        figures = write_pretraining(run_folder, run.pretraining, {})
        return SimulationResult(metrics=figures, history=[], losses=[], ledger=[])
    run.train(resume_epoch=epoch)
    metrics = run.finish(run_folder, mode="simulated", traffic={}, with_solo=with_solo)
    assert ledger.path is not None
    lines = ledger.path.read_text(encoding="utf-8").splitlines()
    return SimulationResult(
        metrics=metrics,
        history=run.primary.history,
        losses=run.primary.losses,
        ledger=[json.loads(line) for line in lines],
    )


def _resume_epoch(
    config: FederationConfig, primary: Checkpoints, secondaries: Sequence[Checkpoints]
) -> int:
    """Return the last epoch that every party whose model trains has saved, 0 for none."""
    trained = [primary] if is_frozen(config) else [primary, *secondaries]
    common = set.intersection(*(set(one.epochs()) for one in trained))
    require_resumable(config, primary, common)
    return max(common, default=0)
