"""A secondary built as a run builds it, on its table with or without one record, and its releases.

Noise of releases is left out, so that what is compared are the exact whole numbers that noise is
added to. What a world says behind noise (fitted encoders, updates) is said again in the other one:
given all that was said before, both go on from equal weights, as accounting does when it adds up
the steps of an adaptive composition.

:func:`whole_run` does the same with all parties of a simulated run and of one request for
predictions, and keeps whatever else any party receives.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from helpers.fixed_entropy import fixed_entropy
from helpers.secondaries import answer
from torch import Tensor

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.config.reading import read_federation
from securevfl.core.errors import SecureVflError
from securevfl.core.progress import ProgressEvent, RoundDone, unheard
from securevfl.data.tables import PartyTable, RowSplit
from securevfl.dp import class_sums
from securevfl.dp.class_sums import cell_counts, noised_moments, noised_ranks, noised_rows
from securevfl.dp.events import Unit
from securevfl.dp.ring_noise import RingNoise
from securevfl.dp.sensitivity import gradient_sensitivity
from securevfl.dp.symbols import SymbolNoise
from securevfl.federation import build, encoder_fitting, link_counts, released_labels
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds import updates
from securevfl.federation.rounds.exchanges import Exchange, RoundExchange
from securevfl.federation.rounds.release import SecondaryRelease
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import Purpose, RunPlan, plan_run, run_facts
from securevfl.federation.session.peers import PeersHere
from securevfl.ledger.ledger import Ledger
from securevfl.linkage import sampling
from securevfl.linkage.stage import linking
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.mpc.codec import decode_sum
from securevfl.runtime import prediction_session, trained_run
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import simulate_federation
from securevfl.stages.class_means import class_labels, fitting
from securevfl.stages.class_means.messages import ClassMeansKind
from securevfl.transport.message import failure_kind, public_reason


class Silent:
    """Noise of a deviation that is never heard."""

    def __init__(self, std_units: float) -> None:
        self.std_units = std_units

    def sample(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Return zeros."""
        return torch.zeros(tuple(shape), dtype=torch.int32, device=device)


class CoupledSamples:
    """Entropy of secret samples that is the same, record by record, in worlds with and without one.

    Takes the place of the module ``os`` where samples are drawn.
    """

    def __init__(self, records: int, *, gone: int | None) -> None:
        self._records = records
        self._gone = gone
        self.drawn: list[np.ndarray] = []
        """The numbers behind each sample, of all records that either world has."""

    def urandom(self, size: int) -> bytes:
        """Return the next sample's eight bytes a record, without those of the record not there."""
        random = np.random.default_rng([9, len(self.drawn)])
        numbers = random.integers(0, 2**64, self._records, dtype=np.uint64)
        self.drawn.append(numbers)
        kept = numbers if self._gone is None else np.delete(numbers, self._gone)
        assert size == kept.nbytes
        return kept.tobytes()

    def had(self, record: int, *, rate: float) -> list[bool]:
        """Return which samples so far the record was in."""
        return [bool(numbers[record] < int(rate * 2**64)) for numbers in self.drawn]


@dataclass
class Said:
    """What one world's mechanisms were given, exactly, and what they said of it behind noise."""

    exact: list[Tensor] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    def say(self, exact: Tensor, answer: Callable[[], Any], before: "Said | None") -> Any:
        """Keep a sum; return what the world before said at this place, or a fresh answer."""
        self.exact.append(exact)
        self.answers.append(before.answers[len(self.answers)] if before else answer())
        return self.answers[-1]

    def changes(self, other: "Said") -> list[float]:
        """Return how far each exact sum is from the other world's."""
        return [
            float(torch.linalg.vector_norm(mine - theirs))
            for mine, theirs in zip(self.exact, other.exact, strict=True)
        ]


@dataclass
class World:
    """One secondary and what it has said so far."""

    secondary: Secondary
    plan: RunPlan
    split: RowSplit
    said: Said
    before: "Said | None"
    samples: "CoupledSamples"

    def release(self, rows: Sequence[int], *, number: int, purpose: Purpose = "release") -> Tensor:
        """Return a round's release in whole units of the ring, without noise, a vector a row."""
        cut = self.plan.cut
        with self.overheard():
            words = answer(self.secondary, self._round(rows, number, purpose))
        units = decode_sum(
            words, cut.ring, elements=len(rows) * math.prod(cut.shape), parties_active=1
        )
        return units.view(len(rows), -1).double()

    def learn(self, rows: Sequence[int], gradient: Tensor, *, number: int) -> None:
        """Let the secondary learn from the round that it has just answered."""
        with self.overheard():
            self.secondary.learn(self._round(rows, number, "train"), gradient)

    def release_all(self) -> Tensor:
        """Return the one pass of a frozen encoder over all rows, in batches as in a run."""
        rows, size = self.plan.facts.rows, self.plan.config.training.batch_size
        order = np.random.default_rng(4).permutation(rows)
        out = torch.zeros(rows, math.prod(self.plan.cut.shape), dtype=torch.float64)
        for number, start in enumerate(range(0, rows, size), start=1):
            batch = order[start : start + size].tolist()
            out[batch] = self.release(batch, number=number)
        return out

    @property
    def row_bound(self) -> float:
        """How far the plan lets one record move one row, in units of the ring."""
        cut, cap = self.plan.cut, self.plan.config.privacy.links_per_record
        assert cap is not None, "there is a bound"
        return self.plan.releases.sensitivity() / cap**0.5 * cut.slots / cut.ring.granularity

    def _round(self, rows: Sequence[int], number: int, purpose: Purpose) -> RoundPlan:
        return RoundPlan(
            round_number=number,
            rows=np.array(rows, dtype=np.int64),
            active=tuple(self.plan.secondaries),
            purpose=purpose,
        )

    @contextmanager
    def overheard(self) -> Iterator[None]:
        """Listen to every mechanism that what is done inside goes through."""

        def say(_what: str, exact: Tensor, answer: Callable[[], Any]) -> Any:
            return self.said.say(exact, answer, self.before)

        with mechanisms_overheard(say), mock.patch.object(sampling, "os", self.samples):
            yield


Say = Callable[[str, Tensor, Callable[[], Any]], Any]
"""Takes a mechanism, its exact sum over what one record may change of it, and how to answer."""


@contextmanager
def mechanisms_overheard(say: Say) -> Iterator[None]:
    """Give every fitted statistic and update to ``say``, and take its answer."""
    fitted, noised = noised_moments, updates.GradientNoise.add_noise
    ranked, counted = noised_ranks, noised_rows

    def statistics(records: np.ndarray, **settings: float) -> Any:
        exact = exact_moments(records, **settings)
        return say("moments", exact, lambda: fitted(records, **settings))

    def ranks(values: np.ndarray, edges: np.ndarray, **settings: float) -> Any:
        exact = torch.from_numpy(cell_counts(values, edges)) / values.shape[1] ** 0.5
        return say("ranks", exact, lambda: ranked(values, edges, **settings))

    def linked_rows(count: int, **settings: Any) -> Any:
        exact = torch.tensor([float(count)])
        return say("linked rows", exact, lambda: counted(count, **settings))

    def update(noise: updates.GradientNoise, total: Tensor) -> Any:
        exact = total * noise.granularity / noise.clip_norm
        return say("update", exact, lambda: noised(noise, total))

    with (
        mock.patch.object(encoder_fitting, "noised_moments", statistics),
        mock.patch.object(fitting, "noised_ranks", ranks),
        mock.patch.object(link_counts, "noised_rows", linked_rows),
        mock.patch.object(updates.GradientNoise, "add_noise", update),
    ):
        yield


def exact_moments(records: np.ndarray, *, radius: float, noise_multiplier: float) -> Tensor:
    """Return the statistics that noise would be added to, over the change that it is made for."""
    deviations: list[float] = []

    def silent(size: int, *, std: float) -> np.ndarray:
        deviations.append(std)
        return np.zeros((size, size))

    with mock.patch.object(class_sums, "symmetric_noise", silent):
        found = noised_moments(records, radius=radius, noise_multiplier=noise_multiplier)
    bound = deviations[0] / noise_multiplier
    unit = 2.0 ** round(math.log2(bound / (1.25 * radius**2)) / 2)
    first = np.concatenate([[math.trunc(radius / 2 * unit)], found.mean * unit])
    total = np.outer(first, first)
    total[1:, 1:] += found.covariance * unit**2
    return torch.from_numpy(total * found.count / bound)


def world(
    path: Path,
    *,
    gone: int | None = None,
    before: World | None = None,
    noise: Callable[[float], RingNoise] = Silent,
) -> World:
    """Build the first secondary of a federation file as a run does, but for the noise of releases.

    Args:
        path: The federation file, with its tables beside it.
        gone: A record to leave out of that secondary's table.
        before: The other world, whose answers behind noise are said again.
        noise: Takes the place of the sampler of releases' noise, behind its buffer.
    """
    config = read_federation(path)
    tables = read_tables(config, path.parent)
    party, primary = config.secondaries[0], tables[config.primary.name]
    table = tables[party.name]
    samples = CoupledSamples(table.num_rows, gone=gone)
    if gone is not None:
        table = table.take(np.delete(np.arange(table.num_rows), gone))
    split, facts = run_facts(config, primary)
    plan = plan_run(config, facts)
    spec = link_spec(config)
    with (
        mock.patch.object(sampling, "os", samples),
        mock.patch.object(build, "ExactDiscreteGaussian", noise),
    ):
        secondary = build.build_secondary(
            plan,
            party,
            table,
            Linker(spec, keys_of(spec.keys, primary))(keys_of(spec.keys, table)),
            Ledger(
                None, party=party.name, plan=plan.releases, noise_share_std=plan.noise_share_std
            ),
            device=torch.device("cpu"),
        )
    said = before.said if before else None
    return World(secondary, plan, split, Said(), before=said, samples=samples)


@dataclass(frozen=True, kw_only=True, eq=False)
class Summed:
    """What one mechanism of one secondary was given, before noise."""

    what: str
    party: str
    session: int
    """The run's, and then those of requests for predictions, in turns."""
    round_number: int
    exact: Tensor
    """Of rows in units of the ring; of others over what one record may change of it."""
    answer: Any
    """What went on behind noise."""
    fresh: Any
    """What this run's own noise makes of the exact sum; the answer, unless another run's is said
    again."""
    of_label: float
    """Of class sums: what one record may change, over what one label may."""

    @property
    def place(self) -> tuple[str, str, int, int]:
        """Where in the run it is."""
        return self.what, self.party, self.session, self.round_number


@dataclass
class WholeRun:
    """What mechanisms of a whole run were given, and all else that any party received."""

    plans: list[RunPlan] = field(default_factory=list)
    """Of every session."""
    sums: list[Summed] = field(default_factory=list)
    received: list[tuple[Any, ...]] = field(default_factory=list)
    """Rounds, averages, gradients, messages, class sums, request and predictions, as bytes; in the
    end how it ended, for the others."""
    noised_sums: list[np.ndarray] = field(default_factory=list)
    """Class sums with all their noise, one after another."""
    label_epsilons: list[float] = field(default_factory=list)
    """What each draw of labels was told to spend on a row."""

    def ratios(self, other: "WholeRun") -> dict[str, float]:
        """Return by mechanism how far its sums moved, over what its promise counts on.

        A frozen encoder's rows are one answer over all rounds of a session, and of all requests
        where records are counted; all others' are one a round. What the secondaries' rows moved by
        adds up, as it does in the primary's sum.
        """
        moved: defaultdict[tuple[Any, ...], Any] = defaultdict(lambda: 0.0)
        found: defaultdict[str, float] = defaultdict(float)
        drawn: defaultdict[int, int] = defaultdict(int)
        for mine, theirs in zip(self.sums, other.sums, strict=True):
            assert mine.place == theirs.place
            change = (mine.exact - theirs.exact).double()
            if mine.what == "labels":
                assert torch.equal(mine.exact, theirs.exact), "a record moves no label"
            elif mine.what == "rows":
                moved[mine.session, mine.round_number] += change
            elif mine.what == "symbols":
                drawn[self._answer(mine.session)] += int((change != 0).sum())
            else:
                norm = float(torch.linalg.vector_norm(change))
                found[mine.what] = max(found[mine.what], norm / self._most(mine))
        answers: defaultdict[tuple[int, int], float] = defaultdict(float)
        steps: defaultdict[int, float] = defaultdict(float)
        for (session, number), change in moved.items():
            plan = self.plans[session]
            one = 0 if plan.config.privacy.encoder == "frozen" else number
            changed = change * plan.cut.ring.granularity
            if plan.releases.laplace:
                steps[self._answer(session)] += float(changed.abs().sum()) / plan.cut.grid_step
                continue
            answers[self._answer(session), one] += float(changed.square().sum())
        # Where nothing is promised, nothing bounds them.
        for (session, _), squares in answers.items():
            plan = self.plans[session]
            if plan.config.privacy.mechanism == "none":
                continue
            if plan.releases.symbols:
                assert not squares, "what is sent follows from symbols"
                continue
            most = plan.releases.sensitivity() * plan.cut.slots
            found["rows"] = max(found["rows"], squares**0.5 / most)
        for session, rows in drawn.items():
            found["symbols"] = max(found["symbols"], rows / self._whole(session).count)
        for session, moved_by in steps.items():
            whole = self._whole(session)
            found["steps"] = max(found["steps"], moved_by / (whole.shift * whole.count))
        return dict(found)

    def _whole(self, session: int) -> Any:
        """Return the event of all rows of a session."""
        releases, tau = self.plans[session].releases, self.plans[session].noise_share_std
        return releases.release(tau, rounds=releases.rounds, row_releases=releases.row_releases)

    def _answer(self, session: int) -> int:
        """Return the session that a session's answer counts in: one where records are counted."""
        counts = self.plans[session].releases.releases_per_record is not None
        return len(self.plans) - 1 if counts else session

    def rows_moved(self, other: "WholeRun") -> dict[str, int]:
        """Return by secondary how many rows moved in any round of a session at most, in all."""
        rows: defaultdict[tuple[str, int], int] = defaultdict(int)
        for mine, theirs in zip(self.sums, other.sums, strict=True):
            if mine.what == "rows":
                moved = (mine.exact != theirs.exact).flatten(1).any(dim=1)
                rows[mine.party, mine.session] += int(moved.sum())
        return {
            party: max(count for (one, _), count in rows.items() if one == party)
            for party, _ in rows
        }

    def labels_moved(self, other: "WholeRun") -> tuple[int, float]:
        """Return how many rows' labels were drawn from others, and how far class sums moved.

        These in units of what one label's exchange changes at most.
        """
        drawn, furthest = 0, 0.0
        for mine, theirs in zip(self.sums, other.sums, strict=True):
            if mine.what == "labels":
                drawn = max(drawn, int((mine.exact != theirs.exact).sum()))
            elif mine.what == "class sums":
                norm = float(torch.linalg.vector_norm(mine.exact - theirs.exact))
                furthest = max(furthest, norm * mine.of_label)
        return drawn, furthest

    def heard_by_secondaries(self) -> list[tuple[Any, ...]]:
        """Return what secondaries received; averages and figures are the primary's."""
        own = ("average", "history", "predictions")
        return [one for one in self.received if one[0] not in own]

    def parties_moved(self, other: "WholeRun") -> set[str]:
        """Return whose sums are not the same numbers."""
        pairs = zip(self.sums, other.sums, strict=True)
        return {mine.party for mine, theirs in pairs if not torch.equal(mine.exact, theirs.exact)}

    def _most(self, one: Summed) -> float:
        if one.what not in ("update", "linked rows"):
            return 1.0
        plan = self.plans[one.session]
        releases, cap = plan.releases, plan.config.privacy.links_per_record
        if one.what == "linked rows":
            return cap or plan.facts.rows
        rows = min(cap or 0, releases.rows_per_round)
        return gradient_sensitivity(clip_norm=1.0, unit=Unit.SECONDARY_RECORD, rows=rows)


class Listener:
    """Hears what mechanisms are given and what parties receive; each method wraps one place."""

    def __init__(self, before: "WholeRun | None") -> None:
        self.heard = WholeRun()
        self.repeats = before is not None
        self.answered = iter(before.sums if before else ())
        self.speaker, self.number = "", 0
        self.of_label = 1.0

    def say(self, what: str, exact: Tensor, answer: Callable[[], Any]) -> Any:
        # Drawn in both runs, so that all noise that comes after it is the same as well.
        fresh = answer()
        said = next(self.answered).answer if self.repeats else fresh
        session = len(self.heard.plans) - 1
        self.heard.sums.append(
            Summed(
                what=what,
                party=self.speaker,
                session=session,
                round_number=self.number,
                exact=exact.clone(),
                answer=said,
                fresh=deepcopy(fresh),
                of_label=self.of_label,
            )
        )
        return deepcopy(said)

    def hear(self, *parts: Any) -> None:
        self.heard.received.append(parts)

    def built(self, build: Any) -> Any:
        def one(plan: RunPlan, *parts: Any, **more: Any) -> Any:
            if not self.heard.plans or self.heard.plans[-1].facts != plan.facts:
                self.heard.plans.append(plan)
            return build(plan, *parts, **more)

        return one

    def spoken(self, method: Any) -> Any:
        def one(secondary: Any, *parts: Any, **more: Any) -> Any:
            self.speaker = secondary.name
            self.number = parts[0].round_number if parts else 0
            return method(secondary, *parts, **more)

        return one

    def units(self, method: Any) -> Any:
        def one(release: SecondaryRelease, clipped: Tensor) -> Any:
            exact = release.aggregation.units(clipped, bounded=release.noise is not None)
            return self.say("rows", exact, lambda: method(release, clipped))

        return one

    def symbols(self, method: Any) -> Any:
        def one(noise: SymbolNoise, cells: np.ndarray, keys: np.ndarray, *, secret: bytes) -> Any:
            # Rows of one key are one release.
            exact = torch.from_numpy(cells[np.unique(keys, return_index=True)[1]])
            return self.say("symbols", exact, lambda: method(noise, cells, keys, secret=secret))

        return one

    def by_bins(self, method: Any) -> Any:
        def one(format_: class_sums.SumFormat, vectors: Any, bins: np.ndarray) -> Any:
            sums = method(format_, vectors, bins)
            exact = torch.from_numpy(sums).double() / format_.change_of_record
            moved = self.heard.plans[-1].config.labels_moved
            self.of_label = format_.change_of_record / format_.change_of_label(moved)
            return self.say("class sums", exact, lambda: sums)

        return one

    def drawn(self, draw: Any) -> Any:
        def one(labels: np.ndarray, *parts: Any, **more: Any) -> Any:
            exact = torch.from_numpy(labels.copy())
            spent = more["epsilon"] if "epsilon" in more else parts[-1]
            self.heard.label_epsilons.append(spent)
            return self.say("labels", exact, lambda: draw(labels, *parts, **more))

        return one

    def finished(self, method: Any) -> Any:
        def one(of: Any, sums: np.ndarray) -> None:
            self.speaker, self.number = of.name, 0
            self.hear("class sums", of.name, sums.tobytes())
            self.heard.noised_sums.append(sums.copy())
            method(of, sums)

        return one

    def released(self, method: Any) -> Any:
        def one(exchange: Any, plan: Any) -> Tensor:
            self.hear("round", plan.round_number, plan.purpose, plan.active, plan.rows.tobytes())
            mean: Tensor = method(exchange, plan)
            self.hear("average", mean.detach().numpy().tobytes())
            return mean

        return one

    def returned(self, method: Any) -> Any:
        def one(exchange: Any, plan: Any, gradient: Tensor) -> None:
            self.hear("gradient", gradient.numpy().tobytes())
            method(exchange, plan, gradient)

        return one

    def told(self, method: Any) -> Any:
        def one(peers: Any, message: Any, *more: Any, **known: Any) -> Any:
            made = message.to_message()
            if made.kind is ClassMeansKind.CLASS_MEANS_SHIFTED:
                # Between processes it is moved on by uniform numbers.
                return method(peers, message, *more, **known)
            tensors = {name: value.tobytes() for name, value in made.tensors.items()}
            self.hear("message", made.kind, dict(made.meta), tensors)
            return method(peers, message, *more, **known)

        return one

    def linked(self, link: Any) -> Any:
        def one(*parts: Any) -> Any:
            made = link(*parts)
            given = (made.similarities, made.alignment and made.alignment.linked)
            self.hear("linked", [None if some is None else some.tobytes() for some in given])
            return made

        return one

    def requested(self, request: Any) -> Any:
        def one(**parts: Any) -> Any:
            keys = parts["keys"].columns
            self.hear("keys", {name: np.asarray(value).tolist() for name, value in keys.items()})
            return request(**parts)

        return one


def whole_run(
    config: FederationConfig,
    tables: Mapping[str, PartyTable],
    folder: Path,
    *,
    before: WholeRun | None = None,
    requests: Sequence[Sequence[int]] = ((0, 1, 2),),
    noise: str = "",
    cut_off: int | None = None,
) -> WholeRun:
    """Simulate a run and requests for predictions of the primary's own rows.

    Both runs draw noise, samples and labels from the same keys. An error of a party ends the run,
    and what the others learn of it is the last thing that they receive.

    Args:
        config: The federation file.
        tables: Every party's, as read.
        folder: Of the run.
        before: The other run, whose answers behind noise are said again.
        requests: Rows of each, by number.
        noise: Series of the keys that noise is drawn from.
        cut_off: Rounds after which the run is cut off, and resumed; None lets it end.
    """
    listener = Listener(before)
    with ExitStack() as patches:
        patches.enter_context(fixed_entropy(noise))
        patches.enter_context(mechanisms_overheard(listener.say))
        for owner, name, make in (
            (build, "build_secondary", listener.built),
            (prediction_session, "build_secondary", listener.built),
            (Secondary, "hear_round", listener.spoken),
            (Secondary, "learn", listener.spoken),
            (fitting.ClassMeansFitting, "vectors", listener.spoken),
            (fitting.ClassMeansFitting, "finish", listener.finished),
            (SecondaryRelease, "units", listener.units),
            (SymbolNoise, "draw", listener.symbols),
            (class_sums.SumFormat, "by_bins", listener.by_bins),
            (class_labels, "randomised_labels", listener.drawn),
            (released_labels, "randomised_labels", listener.drawn),
            (RoundExchange, "average", listener.released),
            (Exchange, "return_gradient", listener.returned),
            (linking, "linked_primary", listener.linked),
            (PeersHere, "tell", listener.told),
            (PeersHere, "ask", listener.told),
            (prediction_session, "Request", listener.requested),
        ):
            patches.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))
        # A request is made whoever would answer it.
        patches.enter_context(
            mock.patch.object(prediction_session, "answers_alone", return_value=False)
        )
        try:
            if cut_off is not None:
                _cut_off(config, tables, folder, rounds=cut_off)
                listener.hear("cut off")
            options = RunOptions(run_folder=folder, resume=cut_off is not None)
            _play(listener, config, tables, options, requests)
        except SecureVflError as error:
            listener.hear("end", failure_kind(error), public_reason(error), error.exit_code)
    return listener.heard


class CutOffError(Exception):
    """A run ends here, as if it was killed."""


def _cut_off(
    config: FederationConfig, tables: Mapping[str, PartyTable], folder: Path, *, rounds: int
) -> None:
    done = 0

    def observe(event: ProgressEvent) -> None:
        nonlocal done
        done += isinstance(event, RoundDone)
        if done == rounds:
            raise CutOffError

    with suppress(CutOffError):
        options = RunOptions(run_folder=folder, observe=observe)
        simulate_federation(config, tables, options, with_alone=False)
        raise AssertionError("the run has fewer rounds")


def _play(
    listener: Listener,
    config: FederationConfig,
    tables: Mapping[str, PartyTable],
    options: RunOptions,
    requests: Sequence[Sequence[int]],
) -> None:
    result = simulate_federation(config, tables, options, with_alone=False)
    timed = {"seconds"}
    listener.hear(
        "history", [{k: v for k, v in one.items() if k not in timed} for one in result.history]
    )
    assert options.run_folder is not None, "given above"
    run = trained_run.TrainedRun(config=config, place=options.run_folder, tables=tables)
    for rows in requests:
        new = tables[config.primary.name].take(np.array(rows))
        with run.session(unheard) as session:
            answer = session.ask(prediction_session.NamedRows.all_of(new))
        listener.hear("predictions", answer.values.tolist())
    listener.hear("end")
