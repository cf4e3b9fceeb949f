"""The whole federation in one process: the same parties, the same noise, no cryptography."""

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from torch import Tensor

from securevfl.config.disclosure import require_covered_channels
from securevfl.config.federation import FederationConfig, link_spec
from securevfl.config.rules import require_enough_records
from securevfl.core import files
from securevfl.core.conventions import stream
from securevfl.core.devices import few_threads
from securevfl.core.errors import ConfigError
from securevfl.core.formatting import Summarised, epsilon_in_words
from securevfl.core.progress import Observer, Stage, Warned, event_fields, unheard
from securevfl.data.tables import PartyTable
from securevfl.dp.privacy import Privacy
from securevfl.federation.base import Base, require_estimator
from securevfl.federation.build import begin_secondary, primary_data, save_secondary
from securevfl.federation.checkpoint import last_common
from securevfl.federation.link_counts import book_link_counts, link_count, require_link_counts
from securevfl.federation.rounds.exchanges import SimulatedExchange
from securevfl.federation.rounds.recording import Recorder, recording
from securevfl.federation.rounds.secondary import EpochSaver, Secondary
from securevfl.federation.run_plan import RunFacts, RunPlan, plan_run, run_facts
from securevfl.federation.session.peers import PeersHere
from securevfl.federation.stage import OtherParts, SecondaryContext, run_stages, secondary_parts
from securevfl.ledger.ledger_file import lines_of_run
from securevfl.linkage.spec import LinkedSecondary
from securevfl.linkage.stage.linkage_parts import protection_of
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.runtime import run_folder
from securevfl.runtime.predictions import Predictions
from securevfl.runtime.primary_run import PrimaryRun, measure_run
from securevfl.runtime.run_options import RunOptions, require_precision
from securevfl.runtime.run_tables import table_warnings
from securevfl.runtime.trained_run import TrainedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult(Summarised):
    """The result of a run in memory."""

    metrics: dict[str, Any]
    """The content of ``metrics.json``."""

    history: list[dict[str, Any]]
    """One mapping an epoch."""

    losses: list[float]
    """Loss of every training round of this call, in order."""

    ledger: list[dict[str, Any]]
    """Lines of the primary's ledger about the run, one mapping a line."""

    base: Base | None = field(default=None, repr=False)
    """The base that is averaged with the joint model; None without one."""

    joint_outputs: Tensor | None = field(default=None, repr=False)
    """The joint model's for the test rows of a simulation, as the task reads them."""

    trained: TrainedRun | None = field(default=None, repr=False)
    """Where the models are; None where they were not kept."""

    def summary(self) -> tuple[str, dict[str, str]]:
        """Return a heading and the main figures."""
        figures = self.metrics
        test = {"the joint model": figures["test"], "the local baseline": figures["alone_test"]}
        measured = [f"{value:.4f} by {name}" for name, value in test.items() if value is not None]
        shown = {
            f"test {figures['metric']}": ", ".join(measured) or "not tested",
            "epsilon": epsilon_in_words(figures["privacy"]["epsilon"]),
        }
        if figures["gain"] is not None:
            shown["verdict"] = figures["gain"]["verdict"]
        epochs = figures["epochs"]
        heading = (
            f"{figures['federation']}: {figures['family']}, {figures['task']}, "
            f"{figures['parties']} parties, {epochs} epoch{'' if epochs == 1 else 's'}"
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
        """Predict new rows of the primary with the model of this run; see :class:`TrainedRun`.

        Args:
            rows: As of :meth:`TrainedRun.predict`.
            id_column: The column that names rows; None numbers them from 1 on.
            without: Secondaries that are absent: they are not asked, and not waited for.
            out: A file that gets the predictions too.
            observe: Called with progress.

        Raises:
            ConfigError: If models were not kept; and what :meth:`TrainedRun.predict` raises.

        Reveals:
            What :meth:`TrainedRun.predict` says.
        """
        return self._kept.predict(
            rows, id_column=id_column, without=without, out=out, observe=observe
        )

    def report(self) -> Path:
        """Write the report page of this run, and return its path in the run folder.

        A temporary folder is there as long as the result is: copy the page, or give the run
        ``out``.

        Raises:
            ConfigError: If models were not kept, or the run's folder is gone.

        Reveals:
            Nothing: it is made of what the run's folder holds.
        """
        from securevfl.desk.report.page import write_report  # plots take long to load

        return write_report(self._kept.folder, self._kept.config)

    def plot(self) -> "Figure":
        """Return a matplotlib figure of the metric over epochs, next to the local baseline."""
        from securevfl.desk.report.page import metric_figure  # plots take long to load

        return metric_figure(self.metrics, self.history)

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
        return self._kept.features(own=own)

    @property
    def _kept(self) -> TrainedRun:
        if self.trained is None:
            raise ConfigError("the run has not kept its models; its figures are run.metrics")
        return self.trained


def simulate_federation(
    config: FederationConfig,
    tables: Mapping[str, PartyTable],
    options: RunOptions,
    *,
    with_alone: bool = True,
    with_placebo: bool = False,
    with_noise_cost: bool = False,
    kept: bool = True,
) -> RunResult:
    """Run all parties of a federation in this process.

    Args:
        config: The federation file.
        tables: Every party's table, by name.
        options: Where and how; the run folder gets no report.
        with_alone: Find the best model of the primary alone too; None is reported for it otherwise.
        with_placebo: Train once more with each partner's rows permuted against its keys, and report
            how much of the gain comes from the partners.
        with_noise_cost: Train once more without noise where all of it is in one release, so that
            training again is cheap.
        kept: Save every party's part of the model, to predict with later.

    Raises:
        SecureVflError: As a federated run would.

    Reveals:
        Everything is in one process: a simulation protects nobody's table.
    """
    require_covered_channels(config)
    require_estimator(config, options.base, options.top)
    require_precision(config, options.device)
    files.require_writable_folder(options.run_folder)
    for party in config.table_parties:
        for text in table_warnings(config, party, tables[party.name]):
            options.observe(Warned(text=text))
    with contextlib.ExitStack() as held:
        if options.device.type == "cpu":
            numbers = sum(table.features.size + table.keys.size for table in tables.values())
            held.enter_context(few_threads(numbers * config.model.neighbours))
        simulation = _Simulation(config, tables, options, held)
        run = simulation.begin()
        run.prepare()
        run.train()
        if kept:
            run.keep()
            simulation.keep(run.plan)
        if with_placebo and run.tested is not None:
            options.observe(Stage(text="placebo, permuted rows"))
            run.placebo = simulation.placebo(run.base)
        if with_noise_cost and run.tested is not None and _noises_once(config):
            options.observe(Stage(text="the same run without noise"))
            run.without_noise = simulation.without_noise(run.base)
        final_figures = measure_run(
            run,
            options.run_folder,
            mode="simulated",
            traffic={},
            with_alone=with_alone,
        )
        run_folder.write_figures(options.run_folder, final_figures)
        return RunResult(
            metrics=final_figures.as_json(),
            history=run.primary.history,
            losses=run.primary.losses,
            ledger=lines_of_run(run.files.run_ledger, run.plan.facts.run),
            base=run.base,
            joint_outputs=run.joint_outputs,
            trained=TrainedRun(
                config=config, place=options.run_folder, tables=tables, device=str(options.device)
            )
            if kept
            else None,
        )


def _noises_once(config: FederationConfig) -> bool:
    """Return whether all noise is in one release, so that the same run without it is cheap."""
    return config.privacy.mechanism != "none" and config.privacy.regime.releases_once


@dataclass(frozen=True, kw_only=True, eq=False)
class _Links:
    """What linking left at every party of a simulation."""

    linker: Linker
    """Has the primary's part."""
    secondaries: Mapping[str, LinkedSecondary]
    """By name."""
    counts: dict[str, Any]
    """Each secondary's numbers of links, for the figures."""
    linked_rows: dict[str, Any] | None
    """Linked-row count that each secondary has reported to the primary."""


class _Simulation:
    """All parties of a run in this process: their files, links and halves of the network."""

    def __init__(
        self,
        config: FederationConfig,
        tables: Mapping[str, PartyTable],
        options: RunOptions,
        held: contextlib.ExitStack,
        *,
        links: "_Links | None" = None,
    ) -> None:
        """Open every party's files, plan the run, and link.

        Args:
            config: The federation file.
            tables: Every party's table, by name.
            options: Where and how.
            held: Closes files and secondaries in the end.
            links: Links of another run of the same keys; None links.
        """
        self._config, self._tables, self._options, self._held = config, tables, options, held
        self._files = held.enter_context(
            run_folder.simulated_files(
                config, config.table_parties, options.run_folder, resume=options.resume
            )
        )
        self._split, facts = run_facts(config, tables[config.primary.name])
        if options.resume:
            facts = replace(facts, run=self._resumed_run())
        self._plan = plan_run(config, facts)
        for party_files in self._files.values():
            party_files.open_ledger(self._plan)
        self._links = self._link() if links is None else links
        self._secondaries: dict[str, Secondary] = {}
        self._recorders: dict[str, Recorder] = {}

    def begin(self) -> PrimaryRun:
        """Build all parties' halves of the network.

        Where a run is resumed, they are taken from their checkpoints.
        """
        config, options, links = self._config, self._options, self._links
        name, linked = config.primary.name, links.linker.primary
        table, own = self._tables[name], self._files[name]
        data = primary_data(config, table, self._split, linked, device=options.device)
        plan = replace(
            self._plan, facts=self._start(self._plan.facts), training_rows=len(data.training_rows)
        )
        self._record(plan.facts.run)
        for party in config.secondaries:
            self._secondaries[party.name] = secondary = begin_secondary(
                plan,
                party.name,
                self._tables[party.name],
                links.secondaries[party.name],
                self._files[party.name],
                device=options.device,
            )
            self._held.callback(secondary.close)
            if party.name in self._recorders:
                samples = config.privacy.sampling_rate < 1
                self._recorders[party.name].attend(secondary, samples=samples)
        if not options.resume:
            for party_files in self._files.values():
                party_files.checkpoints.begin(plan.facts.run)
        run_folder.write_federation(options.run_folder, config)
        by_rank = {plan.ranks[party]: partner for party, partner in self._secondaries.items()}
        exchange = SimulatedExchange(
            by_rank,
            plan.cut,
            end_epoch={
                plan.ranks[party]: EpochSaver(partner, self._files[party].checkpoints)
                for party, partner in self._secondaries.items()
            },
            links=config.model.neighbours,
            ledger=own.ledger,
            recorder=self._recorders.get(name),
        )
        parts = {
            plan.ranks[party]: secondary_parts(self._context(plan, party))
            for party in self._secondaries
        }
        run = PrimaryRun(
            plan,
            table,
            data,
            linked,
            own,
            exchange,
            options,
            parts=OtherParts(
                peers=lambda stage: PeersHere(
                    {
                        rank: {**own_parts[stage].opening, **own_parts[stage].beside_rounds}
                        for rank, own_parts in parts.items()
                        if stage in own_parts
                    }
                ),
                here={
                    stage.name: [own[stage.name] for own in parts.values() if stage.name in own]
                    for stage in run_stages(config)
                },
            ),
        )
        run.links, run.linked_rows = links.counts, links.linked_rows
        return run

    def _start(self, facts: RunFacts) -> RunFacts:
        """Return the facts with the epoch and the step of a stage that all parties go on from."""
        if not self._options.resume:
            return facts
        own = [party_files.checkpoints for party_files in self._files.values()]
        primary, *others = own
        common = set[int].intersection(*(set(checkpoints.stage_steps()) for checkpoints in own))
        return replace(
            facts,
            resume_epoch=last_common(
                self._config, primary, [checkpoints.epochs() for checkpoints in others]
            ),
            resume_stage=max(common, default=0),
        )

    def _context(self, plan: RunPlan, name: str) -> SecondaryContext:
        """Return what a secondary's parts of stages work with."""
        return SecondaryContext(
            plan=plan,
            party=self._config.party(name),
            table=self._tables[name],
            secondary=self._secondaries[name],
            linked=self._links.secondaries[name],
            files=self._files[name],
            data_root=self._options.data_root,
            observe=self._options.observe,
        )

    def _record(self, run: str) -> None:
        """Record what every party receives until the simulation ends, where that is asked for."""
        most, observe = self._options.record_mib, self._options.observe
        coordinator = self._config.helper("coordinator")
        folders = {name: own.folder for name, own in self._files.items()}
        if coordinator is not None:
            folders[coordinator.name] = self._options.run_folder / "parties" / coordinator.name
        for name, folder in folders.items():
            recorder = self._held.enter_context(
                recording(name, folder, run=run, most_mib=most, observe=observe)
            )
            if recorder is not None:
                self._recorders[name] = recorder
        # A run that is resumed does not link again.
        if coordinator is not None and most is not None and not self._options.resume:
            links = self._links
            for party in self._config.secondaries:
                keys = keys_of(links.linker.spec.keys, self._tables[party.name])
                links.linker.record_coordinator(keys, self._recorders[coordinator.name].take)

    def keep(self, plan: RunPlan) -> None:
        """Keep what secondaries keep of a run that is through."""
        links = self._links
        for name, secondary in self._secondaries.items():
            table, linked, own = self._tables[name], links.secondaries[name], self._files[name]
            save_secondary(plan, table, linked, secondary, own.ledger, folder=own.folder)
            if name in self._recorders:
                batch = plan.config.training.batch_size
                self._recorders[name].hold_secondary(secondary, batch=batch)
                self._recorders[name].hold_keys(table)

    def placebo(self, fitted_base: Base | None) -> Tensor | None:
        """Return the joint model's outputs for the test rows with partners' rows permuted.

        Each secondary's features are permuted against its keys: links, similarities and each
        column's values are as they were, and none of them belongs to the row that it is linked to.

        Args:
            fitted_base: The run's; None where it has no base.
        """
        permuted, seed = dict(self._tables), self._config.federation.seed
        for party in self._config.secondaries:
            table = permuted[party.name]
            order = stream(seed, "placebo", party.name).permutation(table.num_rows)
            permuted[party.name] = replace(table, features=table.features[order])
        return self._train_again(self._config, permuted, fitted_base)

    def without_noise(self, fitted_base: Base | None) -> Tensor | None:
        """Return the joint model's outputs for the test rows of the same run without a promise.

        Args:
            fitted_base: The run's; None where it has no base.
        """
        privacy = self._config.privacy
        plain = Privacy(
            mechanism="none",
            encoder=privacy.encoder,
            clip_norm=privacy.clip_norm,
            links_per_record=privacy.links_per_record,
        )
        return self._train_again(replace(self._config, privacy=plain), self._tables, fitted_base)

    def _train_again(
        self, config: FederationConfig, tables: Mapping[str, PartyTable], fitted_base: Base | None
    ) -> Tensor | None:
        """Return the test rows' outputs of a run over the same links, in a folder that goes."""
        with (
            tempfile.TemporaryDirectory(prefix="securevfl-again-") as folder,
            contextlib.ExitStack() as held,
        ):
            there = RunOptions(
                run_folder=Path(folder),
                data_root=self._options.data_root,
                device=self._options.device,
                base=self._options.base,
                top=self._options.top,
                fitted_base=fitted_base,
            )
            again = _Simulation(config, tables, there, held, links=self._links)
            run = again.begin()
            run.is_for_comparison = True
            run.prepare()
            run.train()
            return run.joint_outputs

    def _link(self) -> "_Links":
        """Link every secondary's records to the primary's rows, and let each say how many are."""
        config, tables, options = self._config, self._tables, self._options
        options.observe(Stage(text="linking", of=len(config.secondaries)))
        spec = link_spec(config)
        own = keys_of(spec.keys, tables[config.primary.name])
        link = Linker(spec, own, data_root=options.data_root, folder=options.run_folder / "parties")
        for party in config.secondaries:
            require_enough_records(config, tables[party.name])
        linked, counts = {}, {}
        for party in config.secondaries:
            keys = keys_of(spec.keys, tables[party.name])
            own_links = protection_of(spec).report_links(spec, keys, link(keys), options.observe)
            linked[party.name] = own_links
            if own_links.counts is not None:
                counts[party.name] = event_fields(own_links.counts)
        linked_rows, observe = None, options.observe
        if book_link_counts(self._plan, self._files[config.primary.name].ledger, observe):
            link_counts = {
                name: link_count(self._plan, links, self._files[name].ledger)
                for name, links in linked.items()
            }
            linked_rows = require_link_counts(self._plan, link_counts, observe)
        return _Links(linker=link, secondaries=linked, counts=counts, linked_rows=linked_rows)

    def _resumed_run(self) -> str:
        """Return the id of the run that is resumed in all parties' folders."""
        kept = self._files
        for name, own in kept.items():
            for text in own.checkpoints.resume():
                self._options.observe(Warned(text=f"{name}: {text}"))
        run = kept[self._config.primary.name].checkpoints.run
        others = [name for name, own in kept.items() if own.checkpoints.run != run]
        if others:
            raise ConfigError(
                f"{kept[others[0]].folder}: belongs to another run than the primary's folder; "
                f"restore it, or start afresh with another --out"
            )
        return run
