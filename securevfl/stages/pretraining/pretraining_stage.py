"""Pretraining as a stage of a run: where it starts, what it saves, what fine-tuning starts from.

Written once: a party's own process and a simulation call the same functions.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.core import progress
from securevfl.core.conventions import stream
from securevfl.core.devices import read_together, reads, to_device
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.files import read_json, write_json
from securevfl.data.tables import PartyTable
from securevfl.dp.clipping import clip_rows
from securevfl.dp.privacy import Privacy
from securevfl.dp.release_plan import ReleasePlan
from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.federation.rounds.iso_noise import with_iso_noise
from securevfl.federation.rounds.primary import Primary
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RoundCounter, RunPlan
from securevfl.federation.session.party_files import PartyFiles
from securevfl.federation.session.peers import Peers, average_weights
from securevfl.federation.state_folder import DamagedError, read_state, write_state
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.links import Alignment
from securevfl.linkage.spec import LinkedSecondary
from securevfl.models.family import PretrainingSettings
from securevfl.models.fedhssl.learner import unit
from securevfl.mpc.codec import quantise, to_float
from securevfl.mpc.ring_format import RingFormat
from securevfl.stages.pretraining.pretraining_secondary import (
    CollapseWatch,
    CrossBatch,
    IterationBegin,
    IterationEnd,
    IterationFigures,
    LearnerWithRecords,
    LearnLocally,
    PretrainingRows,
    PretrainingSecondary,
    PretrainingValidator,
    Projections,
    TopsRequest,
    even_batches,
    pretraining_rows,
    projection_cut,
)

# What the primary sends in pretraining: as it is, with ISO noise, or accounted for.

# What torch's batch norms call their running statistics.
_STATISTICS: Final = ("running_mean", "running_var")


@runtime_checkable
class ProjectionMechanism(Protocol):
    """Protects the primary's projections before they leave."""

    def __call__(
        self, projections: Float[Tensor, "batch width"], *, round_number: int
    ) -> Float[Tensor, "batch width"]:
        """Return what is sent in place of the projections, which are of any length.

        Reveals:
            To every secondary: what is returned.
        """
        ...

    def close(self) -> None:
        """Close the files that are held open."""
        ...


@dataclass(frozen=True)
class PlainProjections:
    """Their directions, without lengths; or, with ISO noise, as they are.

    ISO noise is a heuristic that promises nothing. Without it losses read directions alone.

    References:
        [FedHSSL] section VI-B ("applies ISO to the output of its cross-party encoder"), Equation 7.
    """

    scale: float = 0.0
    """Scale of ISO noise; 0 adds none."""

    def __call__(
        self,
        projections: Float[Tensor, "batch width"],
        *,
        round_number: int,
    ) -> Float[Tensor, "batch width"]:
        """Return unit vectors, or the projections with noise.

        Reveals:
            To every secondary: a representation of each of the primary's aligned rows; with ISO
            noise, noisy ones, and from the size of the noise how long the longest of the batch is.
            No guarantee goes with them.
        """
        return with_iso_noise(projections, self.scale) if self.scale else unit(projections)

    def close(self) -> None:
        """Do nothing."""


class GaussianProjections:
    """Clipped vectors with discrete Gaussian noise, each batch booked before it is sent.

    The encoder was trained on the rows, so one row may change all B vectors of a batch, by up to
    2C each: this is the unit ``secondary-record`` of a trained encoder (docs/privacy.md, section
    3), with the primary as the only party that contributes.
    """

    def __init__(self, plan: ReleasePlan, ledger: Ledger, *, noise_share_std: float) -> None:
        """Make it.

        Args:
            plan: What pretraining sends in all.
            ledger: Books every batch.
            noise_share_std: ``tau`` at which the plan keeps its promise.
        """
        tau = noise_share_std
        self.ledger = ledger
        self.ring = RingFormat.choose(
            clip_norm=plan.privacy.clip_norm, noise_share_std=tau, parties=1
        )
        self.clip_norm = plan.privacy.clip_norm
        self.noise = ExactDiscreteGaussian(tau / self.ring.granularity)

    def __call__(
        self, projections: Float[Tensor, "batch width"], *, round_number: int
    ) -> Float[Tensor, "batch width"]:
        """Book the batch and return its unit vectors with noise.

        Raises:
            BudgetExceededError: If the budget does not cover it; nothing was sent.

        Reveals:
            To every secondary: the noised vectors, covered by the ledger's epsilon.
        """
        # Which rows they are does not matter to the price of a trained encoder.
        rows = np.arange(len(projections))
        self.ledger.charge(round_number=round_number, rows=rows, purpose="pretraining")
        clipped = clip_rows(unit(projections).unsqueeze(1), self.clip_norm).squeeze(1)
        units = quantise(clipped, self.ring)
        units += self.noise.sample(units.shape, device=units.device)
        return to_float(units, self.ring, divisor=1)

    def close(self) -> None:
        """Close the ledger."""
        self.ledger.close()


def projection_mechanism(
    settings: PretrainingSettings, *, batches: int, rows: int, ledger: Path, run: str, party: str
) -> ProjectionMechanism:
    """Return what the federation file chooses.

    Args:
        settings: How to pretrain.
        batches: Batches of aligned rows in one pass.
        rows: Aligned rows.
        ledger: The path of the primary's ledger of pretraining.
        run: The run's id.
        party: The primary's name.

    Raises:
        ConfigError: If the ledger is in use, or the noise does not fit the ring.
        PrivacyError: If the ledger was altered.
    """
    if settings.primary_sends == "plain":
        return PlainProjections(settings.iso_projections)
    if settings.epsilon is None:
        raise ConfigError('pretraining.epsilon: primary_sends = "gaussian" needs it')
    passes = settings.iterations * settings.cross_epochs
    plan = ReleasePlan(
        privacy=Privacy(
            mechanism="gaussian",
            epsilon=settings.epsilon,
            delta=settings.delta,
            clip_norm=1.0,
            unit="secondary-record",
            encoder="trained",
        ),
        parties=1,
        min_active=1,
        rounds=passes * batches,
        rows_per_round=-(-rows // batches),
        row_releases=passes * rows,
        # Batches are booked by their sizes, not by their rows.
        releases_per_row=passes * batches,
        links=1,
    )
    tau = plan.noise_share_std()
    book = Ledger(ledger, party=party, plan=plan, noise_share_std=tau, run=run)
    return GaussianProjections(plan, book, noise_share_std=tau)


def sent_weights(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the primary's weights as they enter the mean of all parties': with ISO noise.

    Each parameter gets noise of its own size. A batch norm's running statistics are no parameters,
    and stay as they are: a noised variance may be negative.

    Args:
        weights: The primary's local top encoder and heads, by name.
        scale: lambda of ``pretraining.iso_weights``; 0 adds no noise.

    Reveals:
        Nothing by itself. From the mean, of two parties the other one takes the noisy weights, the
        statistics as they are, and from the noise each parameter's longest row. No guarantee goes
        with them.

    References:
        [FedHSSL] section VI-B ("and parameters of its local top encoder"), Equation 7.
    """
    return {
        name: value if name.endswith(_STATISTICS) else with_iso_noise(value, scale)
        for name, value in weights.items()
    }


# The primary's run of pretraining.


@dataclass(eq=False)
class PretrainingRun:
    """Iterate cross-party learning, local learning and aggregation.

    References:
        [FedHSSL] Algorithm 1.
    """

    learning: LearnerWithRecords
    """The primary's learner with its records."""
    peers: Peers
    rows: PretrainingRows
    _: KW_ONLY
    steps: tuple[str, ...]
    """Steps of an iteration that the family has."""
    projection_mechanism: ProjectionMechanism
    """Protects the primary's projections."""
    rounds: RoundCounter
    save: Callable[[int, dict[str, Any]], None]
    """Saves a checkpoint's state after so many iterations."""
    observe: progress.Observer
    simulated: Sequence[PretrainingSecondary] = ()
    """Secondaries of this process, whose figures are averaged into the history."""
    history: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._watch = CollapseWatch(self.learning.name, self.observe)

    def run(self, *, start: int = 0) -> None:
        """Do the iterations from ``start``, counted from 0, to the last.

        Reveals:
            To the secondaries: which rows are for validation and testing, and the iteration. In
            cross-party steps, what :meth:`exchange_projections` reveals; in aggregation, to every
            party the mean of all local top encoders, and to the primary the sum of their weights:
            the number of parties or, with ``weights = "records"``, of all parties' records.
        """
        total = self.learning.learner.settings.iterations
        if start >= total:
            # All is learned already; secondaries still have to load what they saved.
            self._begin(total - 1)
            self.peers.tell(IterationEnd(iterations=total, last=True))
        for iteration in range(start, total):
            began = time.monotonic()
            self.learning.begin_iteration(iteration, self.steps)
            self._begin(iteration)
            if "cross" in self.steps:
                self._cross(iteration)
            if "local" in self.steps:
                self.peers.tell(LearnLocally(iteration=iteration))
                self.learning.learn_local(iteration)
            if "aggregate" in self.steps:
                self._aggregate()
            done, last = iteration + 1, iteration + 1 == total
            self.peers.tell(IterationEnd(iterations=done, last=last))
            figures = self.learning.figures()
            others = [run.figures for run in self.simulated if run.figures is not None]
            line = self._record(done, [figures, *others], seconds=time.monotonic() - began)
            self.save(done, {"member": self.learning.learner.state(), "history": self.history})
            self._watch(figures, last=last)
            self.observe(progress.PretrainingIteration(iterations=total, **line))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to what was saved after an iteration."""
        self.learning.learner.load_state(state["member"])
        self.history = list(state["history"])

    def _begin(self, iteration: int) -> None:
        self.peers.tell(IterationBegin(iteration=iteration, held_out=self.rows.held_out))

    def _cross(self, iteration: int) -> None:
        settings = self.learning.learner.settings
        for epoch in range(settings.cross_epochs):
            order = stream(self.learning.seed, "pretraining", "aligned", iteration, epoch)
            shuffled = order.permutation(self.rows.aligned)
            parts = even_batches(shuffled, batch_size=settings.batch_size)
            for done, rows in enumerate(parts, 1):
                number = self.rounds.next()
                with read_together():
                    own = self.learning.project(rows, round_number=number)
                    sent = self.projection_mechanism(own, round_number=number)
                    targets = self.exchange_projections(rows, sent, round_number=number)
                self.learning.learn_cross(targets)
                self.observe(
                    progress.PretrainingRound(iteration=iteration + 1, done=done, of=len(parts))
                )

    def exchange_projections(
        self, rows: npt.NDArray[np.int64], sent: Float[Tensor, "batch width"], *, round_number: int
    ) -> list[Float[Tensor, "batch width"]]:
        """Exchange projections of aligned rows; every secondary learns from the primary's.

        Args:
            rows: The batch.
            sent: The primary's projections, protected as its settings say.
            round_number: A new round.

        Returns:
            The average of the secondaries' unit vectors; or, in a plain exchange, each of them.

        Reveals:
            To every secondary: the row ids and ``sent``. To the primary: the average alone, which
            of one secondary is that secondary's; in a plain exchange every secondary's.
        """
        (known,) = reads().host(sent)
        batch = CrossBatch(round_number=round_number, rows=rows, sent=known.numpy())
        if self.learning.learner.settings.exchange == "plain":
            answers = self.peers.ask(batch, Projections, shape=tuple(sent.shape))
            return [to_device(answer.vectors, sent.device) for answer in answers]
        active = [self.peers.name(rank) for rank in self.peers.ranks]
        cut = projection_cut(sent.shape[1], parties=len(active))
        words = self.peers.total(batch, cut.zeros(len(rows)), round_number=round_number)
        total = to_device(words, sent.device)
        return [cut.decode(total, rows=len(rows), active=active, round_number=round_number)]

    def _aggregate(self) -> None:
        scale = self.learning.learner.settings.iso_weights
        number = self.rounds.next()
        mean = average_weights(
            self.peers,
            TopsRequest(round_number=number),
            sent_weights(self.learning.learner.shared_weights(), scale),
            weight=self.learning.weight,
            number=number,
            bits=self.learning.bits,
        )
        self.learning.learner.load_shared(mean)

    def _record(
        self, done: int, parties: list[IterationFigures], *, seconds: float
    ) -> dict[str, Any]:
        line: dict[str, Any] = {"iteration": done, "seconds": round(seconds, 3)}
        for name in ("cross_loss", "cross_spread", "local_loss", "local_spread"):
            values = [value for party in parties if (value := getattr(party, name)) is not None]
            if values:
                line[name] = sum(values) / len(values)
        self.history.append(line)
        return line


# The file in which a party keeps its pretrained encoders.

_ENCODERS_NAME: Final = "encoders.pt"


def load_encoders(run_folder: Path, party: str) -> dict[str, dict[str, Tensor]]:
    """Read a party's encoders from the run folder of an earlier pretraining.

    Raises:
        ConfigError: If there are none, or the file is damaged.
    """
    path = run_folder / "parties" / party / _ENCODERS_NAME
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


def load_checkpoint(
    config: FederationConfig, party: str, model: nn.Module, *, data_root: Path
) -> None:
    """Start a party's model from the encoders of an earlier pretraining, if the file names one.

    Args:
        config: The federation file.
        party: The party.
        model: Its own.
        data_root: Where the run folder of that pretraining is found.

    Raises:
        ConfigError: If they are not there, or belong to another model.
    """
    folder = config.pretraining.checkpoint
    if config.family.pretraining and folder is not None:
        config.family.load_pretrained(model, load_encoders(data_root / folder, party))


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
    return max(set.intersection(*(set(epochs) for epochs in saved)), default=0)


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


def _warn(config: FederationConfig, table: PartyTable, observe: progress.Observer) -> None:
    text = config.family.pretraining_warning(config.model, table.feature_names)
    if text is not None:
        observe(progress.Warned(text=f"{table.name}: {text}"))


def pretraining_secondary(
    plan: RunPlan,
    table: PartyTable,
    secondary: Secondary,
    files: PartyFiles,
    *,
    linked: LinkedSecondary,
    data_root: Path,
    observe: progress.Observer,
) -> PretrainingSecondary | None:
    """Return a secondary's part in pretraining, which :func:`finish_pretraining` ends.

    Args:
        plan: The run.
        table: The party's table.
        secondary: The party with its bottom model, which starts from the checkpoint that the
            federation file names.
        files: Its own.
        linked: Its side of the links.
        data_root: Where an earlier pretraining is found.
        observe: Receives warnings.

    Returns:
        Its part; None where the run pretrains nothing, or has done so.

    Raises:
        ConfigError: If the checkpoint is missing, or of another model.
    """
    config, start = plan.config, plan.facts.resume_pretraining
    if plan.facts.resume_epoch:
        return None
    load_checkpoint(config, table.name, secondary.bottom, data_root=data_root)
    if not wants_pretraining(config):
        return None

    def warn(event: progress.ProgressEvent) -> None:
        if isinstance(event, progress.Warned):
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
    data_root: Path,
    observe: progress.Observer,
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
        data_root: Where an earlier pretraining is found.
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
        What :class:`securevfl.stages.pretraining.pretraining_stage.PretrainingRun` reveals.
    """
    config, start = plan.config, plan.facts.resume_pretraining
    if plan.facts.resume_epoch:
        return earlier_figures(run_folder)
    load_checkpoint(config, table.name, primary.top, data_root=data_root)
    if not wants_pretraining(config):
        return None
    observe(progress.Stage(text="pretraining", of=config.pretraining.iterations))
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
    figures = _write_figures(run, config, run_folder, start=start, labelled=len(data.split.train))
    finish_pretraining(config, primary.top, run.learning, files.folder)
    return figures


def _write_figures(
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
