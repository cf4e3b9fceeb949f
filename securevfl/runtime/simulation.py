"""The whole federation in one process: the same parties, the same noise, no cryptography."""

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.config.rules import require_covered_channels, require_enough_records
from securevfl.config.sections import PartySettings
from securevfl.core import files
from securevfl.core.conventions import stream
from securevfl.core.errors import ConfigError
from securevfl.core.formatting import Summarised, epsilon_in_words
from securevfl.core.progress import Observer, Stage, Warned, told, unheard
from securevfl.data.tables import PartyTable
from securevfl.federation.base import Base, require_estimator
from securevfl.federation.build import build_secondary, keep_secondary, primary_data
from securevfl.federation.checkpoint import last_common
from securevfl.federation.class_means.class_means_stage import vote_in_process
from securevfl.federation.pretraining.pretraining_stage import (
    common_start,
    finish_pretraining,
    pretrain_as_primary,
    pretraining_secondary,
    write_pretraining,
)
from securevfl.federation.rounds.in_process import SimulatedExchange
from securevfl.federation.rounds.primaries import require_top
from securevfl.federation.rounds.primary import Primary
from securevfl.federation.rounds.secondary import EpochKeeper, Secondary
from securevfl.federation.run_plan import RunPlan, plan_run, run_facts
from securevfl.federation.session.party_files import PartyFiles
from securevfl.federation.session.peers import PeersHere
from securevfl.ledger.ledger import lines_of_run
from securevfl.linkage.links import Alignment
from securevfl.linkage.spec import LinkedPrimary, LinkedSecondary
from securevfl.linkage.stage.linking import Linker, protection_of
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.models.layers import PositionsTaken
from securevfl.runtime.predictions import Predictions
from securevfl.runtime.primary_run import PrimaryRun, tell_alignment
from securevfl.runtime.run_folder import write_explanation, write_federation, write_figures
from securevfl.runtime.run_tables import table_warnings
from securevfl.runtime.trained_run import TrainedRun


@dataclass(frozen=True, eq=False)
class SimulatedParty:
    """A secondary of a simulated federation, with what it keeps of the run."""

    secondary: Secondary
    files: PartyFiles


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult(Summarised):
    """What a run leaves behind in memory."""

    metrics: dict[str, Any]
    """The content of ``metrics.json``."""

    history: list[dict[str, Any]]
    """One mapping an epoch."""

    losses: list[float]
    """Loss of every training round of this call, in order."""

    ledger: list[dict[str, Any]]
    """What the primary's ledger holds of the run, one mapping a line."""

    base: Base | None = field(default=None, repr=False)
    """What the joint model is averaged with; None where there is none."""

    joint_outputs: Tensor | None = field(default=None, repr=False)
    """The joint model's for the test rows of a simulation, as the task reads them."""

    trained: TrainedRun | None = field(default=None, repr=False)
    """Where the models are; None of a run that has only pretrained."""

    def summary(self) -> tuple[str, dict[str, str]]:
        """Return what the run was, and what it came to."""
        figures = self.metrics
        if "metric" not in figures:
            return f"pretraining, {figures.get('method', 'encoders')}", {}
        test = {"the joint model": figures["test"], "the primary alone": figures["alone_test"]}
        measured = [f"{one:.4f} by {name}" for name, one in test.items() if one is not None]
        shown = {
            f"test {figures['metric']}": ", ".join(measured) or "not tested",
            "epsilon": epsilon_in_words(figures["privacy"]["epsilon"]),
        }
        if figures["gain"] is not None:
            shown["verdict"] = figures["gain"]["verdict"]
        heading = (
            f"{figures['federation']}: {figures['family']}, {figures['task']}, "
            f"{figures['parties']} parties, {figures['epochs']} epochs"
        )
        return heading, shown

    def predict(
        self,
        rows: Any,
        *,
        id_column: str | None = None,
        without: Sequence[str] = (),
        out: str | Path | None = None,
        observe: Observer = unheard,
    ) -> Predictions:
        """Predict new rows of the primary with the model of this run.

        Every call is a request like one of ``securevfl predict``: under a promise, every party's
        ledger is charged for it, and ``[prediction] epsilon`` is what all of them may spend.

        Args:
            rows: A frame (pandas, polars, pyarrow) or the path of a file, with the columns of the
                table of training, in any order and among others; or a :class:`PartyTable` that is
                encoded as that table was, of a simulation alone. Labels are not needed; with them
                there are metrics.
            id_column: The column that names rows; None numbers them from 1 on.
            without: Secondaries that are absent: they are not asked, and not waited for.
            out: A file that gets the predictions too.
            observe: Hears of progress.

        Returns:
            Predictions in the order of the rows.

        Raises:
            BudgetExceededError: If a party's ledger has no room for the request; nothing was
                released then.
            ConfigError: If the run has kept no model, or its folder is gone.
            DataError: If the rows' columns are not those of training.

        Reveals:
            Of a simulation, nothing: everything is in one process. Of a run of ``sv.train``, what
            a real request reveals between this machine's processes.
        """
        if self.trained is None:
            raise ConfigError("the run has pretrained encoders, and there is no model to predict")
        path = None if out is None else Path(out)
        return self.trained.predict(
            rows, id_column=id_column, without=without, out=path, observe=observe
        )

    def features(self, *, own: bool = False) -> pd.DataFrame:
        """Return what a frozen run has released, for models of the primary's own.

        It costs nothing, however often it is asked for: see
        :func:`securevfl.runtime.released_table.released_table`, which says what the columns and
        ``attrs["securevfl"]`` are.

        Args:
            own: Whether the primary's own encoded columns and its label come too.

        Raises:
            ConfigError: If the run's encoders are not frozen, or its folder is gone or damaged.
            PrivacyError: If the primary's ledger was altered.

        Reveals:
            Nothing: it is made of what was released before.
        """
        if self.trained is None:
            raise ConfigError("the run has pretrained encoders and released no row")
        return self.trained.features(own=own)


def simulate_federation(
    config: FederationConfig,
    tables: Mapping[str, PartyTable],
    run_folder: Path,
    *,
    device: torch.device,
    resume: bool = False,
    with_alone: bool = True,
    observe: Observer = unheard,
    pretrain_only: bool = False,
    base: Any = None,
    top: Any = None,
    fitted: Base | None = None,
    with_placebo: bool = False,
) -> RunResult:
    """Run all parties of a federation in this process.

    Args:
        config: The federation file.
        tables: Every party's table, by name.
        run_folder: Gets the files that docs/run-folder.md lists, but no report.
        device: Where models and noise are computed.
        resume: Go on from the last epoch that was saved in ``run_folder``.
        with_alone: Find the best model of the primary alone too; None is reported for it otherwise.
        observe: Hears of progress.
        pretrain_only: End when pretraining is done; the metrics are its figures.
        base: An estimator of scikit-learn, where the file's ``base.estimator`` is ``python``.
        top: The same where ``model.top`` is one that Python handed over.
        fitted: The base of another run of the same table, seed and ``[base]``, which is taken if
            its rows were split alike.
        with_placebo: Train once more with each partner's rows permuted against its keys, and say
            what of the gain is the partners'.

    Raises:
        SecureVflError: As a federated run would.

    Reveals:
        Everything is in one process: a simulation protects nobody's table.
    """
    require_covered_channels(config)
    require_estimator(config, base)
    require_top(config, top)
    files.require_writable_folder(run_folder)
    for party in config.table_parties:
        for text in table_warnings(config, party, tables[party.name]):
            observe(Warned(text=text))
    split, facts = run_facts(config, tables[config.primary.name])
    with contextlib.ExitStack() as open_files:

        def files_of(party: PartySettings) -> PartyFiles:
            folder = run_folder / "parties" / party.name
            own = PartyFiles(folder, config, party=party.name, resume=resume, simulated=True)
            return open_files.enter_context(own)

        kept = {party.name: files_of(party) for party in config.table_parties}
        if resume:
            facts = replace(facts, run=_go_on(config, kept, observe))
        plan = plan_run(config, facts)
        for own in kept.values():
            own.open_ledger(plan)
        linked_primary, linked, links = _link(config, tables, run_folder, observe)
        own = kept[config.primary.name]
        data = primary_data(
            config, tables[config.primary.name], split, linked_primary, device=device
        )
        plan = replace(plan, training_rows=len(data.training_rows))
        alignment = tell_alignment(
            link_spec(config),
            linked_primary.alignment,
            training_rows=plan.training_rows,
            log=own.log,
            observe=observe,
        )
        parties = {}
        for party in config.secondaries:
            files_there = kept[party.name]
            secondary = build_secondary(
                plan,
                party,
                tables[party.name],
                linked[party.name],
                files_there.ledger,
                files=files_there.checkpoints.files,
                device=device,
            )
            open_files.callback(secondary.close)
            parties[party.name] = SimulatedParty(secondary, files_there)
        epoch = _resume_epoch(plan, own, parties) if resume else 0
        saved = [one.checkpoints.pretrained() for one in kept.values()]
        start = common_start(config, saved) if resume else 0
        plan = replace(plan, facts=replace(facts, resume_epoch=epoch, resume_pretraining=start))
        if not resume:
            for one in kept.values():
                one.checkpoints.begin(facts.run)
        write_federation(run_folder, config)
        run = PrimaryRun(
            plan,
            tables[config.primary.name],
            data,
            linked_primary,
            SimulatedExchange(
                {plan.ranks[name]: party.secondary for name, party in parties.items()},
                plan.cut,
                end_epoch={
                    plan.ranks[name]: EpochKeeper(one.secondary, one.files.checkpoints)
                    for name, one in parties.items()
                },
                links=config.model.neighbours,
            ),
            own,
            observe=observe,
            traffic=lambda: 0,
            countersigning=None,
            estimator=base,
            top=top,
            vote=partial(vote_in_process, [party.secondary for party in parties.values()])
            if plan.votes
            else None,
            fitted=fitted,
        )
        run.alignment = alignment
        run.links = links
        run.pretraining = _pretrain(
            plan,
            tables,
            run.primary,
            own,
            parties,
            linked=linked,
            alignment=linked_primary.alignment,
            run_folder=run_folder,
            observe=observe,
        )
        if pretrain_only:
            pretrained = write_pretraining(run_folder, run.pretraining, {}, alignment=alignment)
            return RunResult(metrics=pretrained, history=[], losses=[], ledger=[])
        run.train()
        for name, simulated in parties.items():
            _keep(plan, tables[name], linked[name], simulated)
        if with_placebo and run.tested is not None:
            observe(Stage(text="placebo: the same training with partners' rows permuted"))
            run.placebo = _placebo(
                config, tables, device=device, base=base, top=top, fitted=run.base
            )
        figures = run.finish(
            run_folder,
            mode="simulated",
            traffic={},
            with_alone=with_alone,
            positions=_shown_positions(config, parties),
        )
        write_figures(run_folder, figures)
        return RunResult(
            metrics=figures.as_json(),
            history=run.primary.history,
            losses=run.primary.losses,
            ledger=lines_of_run(own.run_ledger, facts.run),
            base=run.base,
            joint_outputs=run.joint_outputs,
            trained=TrainedRun(config=config, place=run_folder, tables=tables, device=str(device)),
        )


def _pretrain(
    plan: RunPlan,
    tables: Mapping[str, PartyTable],
    primary: Primary,
    own: PartyFiles,
    parties: Mapping[str, SimulatedParty],
    *,
    linked: Mapping[str, LinkedSecondary],
    alignment: Alignment | None,
    run_folder: Path,
    observe: Observer,
) -> dict[str, Any] | None:
    """Pretrain all parties' encoders, where the family has such; return the run's figures."""
    parts = {}
    for name, one in parties.items():
        part = pretraining_secondary(
            plan, tables[name], one.secondary, one.files, linked=linked[name], observe=observe
        )
        if part is not None:
            parts[name] = part
    figures = pretrain_as_primary(
        plan,
        tables[plan.config.primary.name],
        primary,
        PeersHere({plan.ranks[name]: part.handlers for name, part in parts.items()}),
        own,
        alignment=alignment,
        run_folder=run_folder,
        observe=observe,
        simulated=tuple(parts.values()),
    )
    for name, part in parts.items():
        one = parties[name]
        finish_pretraining(plan.config, one.secondary.bottom, part.learning, one.files.folder)
    return figures


def _placebo(
    config: FederationConfig,
    tables: Mapping[str, PartyTable],
    *,
    device: torch.device,
    base: Any,
    top: Any,
    fitted: Base | None,
) -> Tensor | None:
    """Return the joint model's outputs for the test rows if partners' rows said nothing.

    Each secondary's features are permuted against its keys: links, similarities and each column's
    values are as they were, and none of them belongs to the row that it is linked to.
    """
    permuted = dict(tables)
    for party in config.secondaries:
        table = tables[party.name]
        order = stream(config.federation.seed, "placebo", party.name).permutation(table.num_rows)
        permuted[party.name] = replace(table, features=table.features[order])
    with tempfile.TemporaryDirectory(prefix="securevfl-placebo-") as folder:
        return simulate_federation(
            config,
            permuted,
            Path(folder),
            device=device,
            with_alone=False,
            base=base,
            top=top,
            fitted=fitted,
        ).joint_outputs


def _link(
    config: FederationConfig,
    tables: Mapping[str, PartyTable],
    run_folder: Path,
    observe: Observer,
) -> tuple[LinkedPrimary, dict[str, LinkedSecondary], dict[str, Any]]:
    """Return the primary's side of all links, and each secondary's with its counts."""
    observe(Stage(text="linking", of=len(config.secondaries)))
    spec = link_spec(config)
    own = keys_of(spec.keys, tables[config.primary.name])
    link = Linker(spec, own, folder=run_folder / "parties")
    for party in config.secondaries:
        require_enough_records(config, tables[party.name])
    linked, links = {}, {}
    for party in config.secondaries:
        keys = keys_of(spec.keys, tables[party.name])
        found = protection_of(spec).report_links(spec, keys, link(keys), observe)
        assert found.counts is not None, "a run counts its links"
        linked[party.name], links[party.name] = found, told(found.counts)
    return link.primary, linked, links


def _keep(
    plan: RunPlan, table: PartyTable, linked: LinkedSecondary, simulated: SimulatedParty
) -> None:
    """Keep what a secondary keeps of a run that is through."""
    own = simulated.files
    keep_secondary(plan, table, linked, simulated.secondary, own.ledger, folder=own.folder)
    write_explanation(own.folder, simulated.secondary.explanation())


def _shown_positions(
    config: FederationConfig, parties: Mapping[str, SimulatedParty]
) -> dict[str, PositionsTaken]:
    """Return secondaries' own positional encodings, for the report: none behind a promise."""
    if config.privacy.mechanism != "none":
        return {}
    taken = {name: one.secondary.positions_taken for name, one in parties.items()}
    return {name: one for name, one in taken.items() if one is not None}


def _go_on(config: FederationConfig, kept: Mapping[str, PartyFiles], observe: Observer) -> str:
    """Return the id of the run that goes on in all parties' folders."""
    for name, own in kept.items():
        for text in own.checkpoints.resume():
            observe(Warned(text=f"{name}: {text}"))
    run = kept[config.primary.name].checkpoints.run
    others = [name for name, own in kept.items() if own.checkpoints.run != run]
    if others:
        raise ConfigError(
            f"{kept[others[0]].folder}: belongs to another run than the primary's folder; restore "
            f"it, or start afresh with another --out"
        )
    return run


def _resume_epoch(plan: RunPlan, primary: PartyFiles, parties: Mapping[str, SimulatedParty]) -> int:
    """Return the last epoch that every party whose model trains has saved, 0 for none.

    The secondaries go back to it.
    """
    trained = [] if plan.frozen else list(parties.values())
    saved = [party.files.checkpoints.epochs() for party in trained]
    epoch = last_common(plan.config, primary.checkpoints, saved)
    for party in trained:
        if epoch:
            party.files.checkpoints.load(epoch, partial(party.secondary.resume, epoch))
        else:
            party.files.checkpoints.forget_after(0)
    return epoch
