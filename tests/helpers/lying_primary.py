"""A real secondary behind a primary that says what it likes, and what that primary then has.

The secondary is built as a run builds it; only the wire is a queue. What leaves is written down,
and its true cost computed by a few lines over dp-accounting that know nothing of the ledger.
"""

import hashlib
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import dp_accounting
import numpy as np
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from torch import Tensor

from securevfl import SecureVflError, read_federation
from securevfl.config.federation import FederationConfig, link_spec
from securevfl.core.errors import ProtocolError
from securevfl.data.tables import PartyTable
from securevfl.dp.ring_noise import NoiseBuffer
from securevfl.federation.build import build_secondary
from securevfl.federation.checkpoint import Checkpoints
from securevfl.federation.messages import (
    AverageRequest,
    EpochMark,
    Gradient,
    Mean,
    RoundKind,
    RoundPlan,
)
from securevfl.federation.over_star import serve
from securevfl.federation.rounds.secondary import EpochSaver, Secondary
from securevfl.federation.run_plan import Purpose, RunFacts, RunPlan, plan_run, run_facts
from securevfl.federation.session.handshake import require_own_run
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.spec import LinkedSecondary
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.testing import read_tables, write_federation
from securevfl.transport.message import Done, Message, MessageKind
from securevfl.transport.star import SecondaryTransport

ROWS, BATCH, EPOCHS, PARTIES = 40, 8, 2, 2
PARTY = "bank-1"
RUN = "0" * 32
"""Stands for any run where only its numbers matter."""
DELTA = 1e-4
RATE = 0.5
"""Of secret samples, where there are any."""
_GRID = 1e-3


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a federation file promises."""

    encoder: str
    unit: str = "secondary-record"
    rate: float = 1.0
    links: int | None = None
    by: str = "epsilon"

    def settings(self) -> dict[str, Any]:
        """Return the ``[privacy]`` table."""
        amount = {"trained": 300.0, "frozen": 8.0, "dp-trained": 8.0}[self.encoder]
        noise = {"trained": 0.5, "frozen": 1.0, "dp-trained": 2.0}[self.encoder]
        table = {
            "encoder": self.encoder,
            "unit": self.unit,
            "delta": DELTA,
            "sampling_rate": self.rate,
            **({"epsilon": amount} if self.by == "epsilon" else {"noise_multiplier": noise}),
        }
        return table if self.links is None else {**table, "links_per_record": self.links}


def promises() -> list[Promise]:
    """Return every encoder with every unit, rate, cap and kind of budget that goes with it."""
    found = [Promise(encoder="trained", unit=unit) for unit in ("secondary-record", "entity")]
    found += [Promise(encoder=one, unit="linked-row") for one in ("trained", "frozen")]
    found.append(Promise(encoder="dp-trained", unit="linked-row"))
    for encoder, unit, rate in [
        ("frozen", "secondary-record", 1.0),
        ("frozen", "secondary-record", RATE),
        ("frozen", "entity", 1.0),
        ("frozen", "entity", RATE),
        ("dp-trained", "secondary-record", 1.0),
        ("dp-trained", "secondary-record", RATE),
        ("dp-trained", "entity", 1.0),
    ]:
        found += [Promise(encoder=encoder, unit=unit, rate=rate, links=links) for links in (1, 16)]
    return [replace(one, by=by) for one in found for by in ("epsilon", "noise_multiplier")]


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """A federation file with its tables, linked; shared by all sequences that play in it."""

    config: FederationConfig
    tables: dict[str, PartyTable]
    facts: RunFacts
    linked: LinkedSecondary
    promise: Promise


@lru_cache(maxsize=64)
def world(promise: Promise) -> World:
    """Write, read and link a federation."""
    folder = Path(mkdtemp(prefix="securevfl-lies-"))
    averaged = 0 if promise.encoder == "trained" else 1
    config = read_federation(
        write_federation(
            folder,
            rows=ROWS,
            secondaries=PARTIES,
            model={"release": "pooled", "average_positions_every": averaged},
            training={"epochs": EPOCHS, "batch_size": BATCH, "patience": EPOCHS},
            privacy=promise.settings(),
            of_secondaries={"scaling": "bounds", "bounds": [-4.0, 4.0]},
        )
    )
    tables = read_tables(config, folder)
    _, facts = run_facts(config, tables["agency"])
    spec = link_spec(config)
    linked = Linker(spec, keys_of(spec.keys, tables["agency"]))(keys_of(spec.keys, tables[PARTY]))
    return World(config=config, tables=dict(tables), facts=facts, linked=linked, promise=promise)


@lru_cache(maxsize=256)
def plan_of(promise: Promise, facts: RunFacts) -> RunPlan:
    """Return what a secondary plans when the primary says these numbers."""
    return plan_run(world(promise).config, facts)


class QuietError(Exception):
    """Nothing more has come."""


class Line(SecondaryTransport):
    """The secondary's end of a wire on which a test puts messages."""

    def __init__(self) -> None:  # no socket is opened
        self.inbox: deque[Message] = deque()

    @property
    def waiting(self) -> int:
        """Messages that are on the wire."""
        return len(self.inbox)

    def receive(self, kind: Any, *, round_number: int | None, **_waits: Any) -> Message:
        """Return the next message; refuse it as the star does if it is not due."""
        if not self.inbox:
            raise QuietError
        message = self.inbox.popleft()
        due = (kind,) if isinstance(kind, MessageKind) else kind
        if message.kind not in due or round_number not in (None, message.round_number):
            raise ProtocolError(f"{message.kind.name} is not due")
        return message


@dataclass(frozen=True, kw_only=True)
class Left:
    """A release that reached the primary."""

    session: int
    run: str
    rows: tuple[int, ...]
    purpose: str
    words: bytes = field(repr=False)
    """A hash of the noised words, before masks: the same words again are the same release."""
    taught: bool = False


@dataclass
class Noise:
    """What a session really adds, read off the samplers that draw it."""

    release: float
    """Deviation of one party's share, in the units of a row."""

    update: float
    """Deviation on the sum of row gradients; 0 where there is none."""


@dataclass
class Played:
    """One primary's game with one secondary: runs on one table, and sessions of each run."""

    promise: Promise
    folder: Path
    left: list[Left] = field(default_factory=list)
    noises: dict[int, Noise] = field(default_factory=dict)
    positions: int = 0
    """Times that positional weights left."""
    session: int = 0
    runs: list[str] = field(default_factory=list)
    """Ids of the runs that began, in order."""
    alive: bool = False
    _asked: dict[int, RoundPlan] = field(default_factory=dict)

    def join(self, facts: RunFacts, *, resume: bool) -> None:
        """Begin a session, as the party's process does; ``resume`` is its own operator's word.

        Raises:
            SecureVflError: If the party refuses it.
        """
        self.leave()
        here = world(self.promise)
        party = self.folder / f"run-{len(self.runs) - resume}" / "parties" / PARTY
        checkpoints = Checkpoints(party, settings_digest=here.config.settings_digest)
        own = ""
        if resume:
            checkpoints.resume()
            own = checkpoints.run
        require_own_run(here.config, facts, run=own, epochs=checkpoints.epochs(), stage_steps=[])
        plan = replace(plan_of(self.promise, replace(facts, run=RUN)), facts=facts)
        self.session += 1
        self.ledger = Ledger(
            self.folder / "table.ledger.jsonl",
            party=PARTY,
            plan=plan.releases,
            noise_share_std=plan.noise_share_std,
            durable=False,
            run=facts.run,
        )
        self.alive = True
        if not resume:
            self.ledger.require_room(
                rounds=plan.releases.rounds,
                row_releases=plan.releases.row_releases,
                passes=plan.releases.releases_per_row,
            )
            if len(self.ledger.released_rows):
                raise ProtocolError("an earlier run's id")
            checkpoints.begin(facts.run)
            self.runs.append(facts.run)
        checkpoints.guard(self.ledger)
        self.plan = plan
        self.secondary = build_secondary(
            plan,
            here.config.party(PARTY),
            here.tables[PARTY],
            here.linked,
            self.ledger,
            files=checkpoints.files,
            device=torch.device("cpu"),
        )
        if facts.resume_epoch and not plan.regime.releases_once:
            checkpoints.load(facts.resume_epoch, partial(self.secondary.resume, facts.resume_epoch))
        self.noises[self.session] = _noise_of(self.secondary, plan)
        self.line = Line()
        self.serve = partial(
            serve,
            self.secondary.handlers(EpochSaver(self.secondary, checkpoints)),
            self.line,
            self,
            ranks=tuple(plan.secondaries),
            deadline_s=1.0,
        )
        self.script = honest(plan, released=len(self.ledger.released_rows))

    @property
    def own(self) -> list[Left]:
        """What has left in this run; the same words again count once."""
        found = {one.words: one for one in self.left if one.run == self.plan.facts.run}
        return list(found.values())

    def leave(self) -> None:
        """End the session."""
        if self.alive:
            self.ledger.close()
            if hasattr(self, "secondary"):
                self.secondary.close()
        self.alive = False

    def say(self, *messages: Message) -> SecureVflError | None:
        """Let the secondary hear messages; return what it refused, after which it is gone."""
        self.line.inbox.extend(messages)
        try:
            self.serve()
        except QuietError:
            # A message that waits for another one is as good as none.
            return None
        except SecureVflError as error:
            self.leave()
            return error
        self.leave()
        return None

    def bind(self, message_digest: bytes, ranks: Sequence[int]) -> None:
        """Be a secure sum: nobody else is asked for anything."""

    def prepare(self, count: int, *, round_number: int, active: Sequence[int]) -> None:
        """Be a secure sum: nothing to do ahead."""

    def __call__(self, words: Tensor, *, round_number: int, active: Sequence[int]) -> None:
        """Be a secure sum: write down what left."""
        del active
        pending = self._asked.get(round_number)
        if pending is None:
            self.positions += 1
            return
        self.left.append(
            Left(
                session=self.session,
                run=self.plan.facts.run,
                rows=tuple(pending.rows.tolist()),
                purpose=pending.purpose,
                words=hashlib.sha256(words.numpy().tobytes()).digest(),
            )
        )

    def ask(self, plan: RoundPlan, *then: Message) -> SecureVflError | None:
        """Announce a round, and send what follows it."""
        self._asked = {plan.round_number: plan}
        before = len(self.left)
        refused = self.say(plan.to_message(), *then)
        learned = any(message.kind is RoundKind.GRADIENT for message in then) and refused is None
        if len(self.left) > before and learned and plan.purpose == "train":
            self.left[-1] = replace(self.left[-1], taught=True)
        self._asked = {}
        return refused

    def fingerprint(self) -> list[Tensor]:
        """Return a copy of the model's weights."""
        return [value.detach().clone() for value in self.secondary.bottom.state_dict().values()]


def _noise_of(secondary: Secondary, plan: RunPlan) -> Noise:
    noise, update = secondary.contribution.noise, secondary.gradient_noise
    assert isinstance(noise, NoiseBuffer)
    share = noise.std_units * plan.cut.ring.granularity / plan.cut.slots
    learned = 0.0 if update is None else update._noise.std_units * update.granularity
    return Noise(release=share, update=learned)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an honest primary says next: a round, or another message."""

    round: RoundPlan | None = None
    messages: tuple[Message, ...] = ()


def honest(plan: RunPlan, *, released: int) -> Iterator[Step]:
    """Yield an honest session's steps, epoch after epoch, and never stop.

    Args:
        plan: The run.
        released: Rows that earlier sessions of a frozen run have released: the last round is asked
            for once more, and then those that are missing.
    """
    numbers = iter(range(1, 10**6))
    facts = plan.facts
    parts = np.split(np.arange(facts.rows), np.cumsum([facts.train_rows, facts.validation_rows]))
    everybody = tuple(plan.secondaries)

    def round_of(rows: np.ndarray, purpose: Purpose) -> Step:
        number = next(numbers)
        wanted = RoundPlan(round_number=number, rows=rows, active=everybody, purpose=purpose)
        then = (gradient_for(plan, wanted),) if purpose == "train" else ()
        return Step(round=wanted, messages=then)

    def batches(rows: np.ndarray) -> list[np.ndarray]:
        return [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]

    epoch = facts.resume_epoch
    start = max(0, (released - 1) // BATCH * BATCH)
    while plan.regime.releases_once:
        for rows in batches(np.arange(start, facts.rows)):
            yield round_of(rows, "release")
        start = 0
    while True:
        epoch += 1
        for rows in batches(parts[0]):
            yield round_of(rows, "train")
        if plan.average_positions_every:
            yield average(next(numbers))
        for rows in batches(parts[1]):
            yield round_of(rows, "validation")
        yield Step(messages=(EpochMark(epoch=epoch, best=True).to_message(),))


def average(number: int) -> Step:
    """Return a request for positional weights, and a mean of them."""
    ask = AverageRequest(round_number=number).to_message()
    return Step(messages=(ask, Mean(round_number=number, values={}).to_message()))


def gradient_for(plan: RunPlan, wanted: RoundPlan, *, value: float = 0.01) -> Message:
    """Return a gradient of a round."""
    shape = (len(wanted.rows), *plan.cut.shape)
    filled = np.full(shape, value, dtype=np.float32)
    return Gradient(round_number=wanted.round_number, gradient=filled).to_message()


def done() -> Message:
    """Return the end of a run."""
    return Done().to_message()


def true_cost(played: Played) -> float:
    """Return what the releases that left cost the unit that they cost most, at DELTA.

    A lower bound: it takes m rows that were released often, and not the worst m.
    """
    promise = played.promise
    events: Counter[Any] = Counter()
    once = list({one.words: one for one in played.left}.values())
    # A frozen run's sessions are parts of one answer: the same links, encoder and sample.
    frozen = promise.encoder == "frozen"
    groups: dict[Any, list[Left]] = {}
    for one in once:
        groups.setdefault(one.run if frozen else one.session, []).append(one)
    for rounds in groups.values():
        events.update(_events(promise, rounds, played.noises[rounds[0].session]))
    return _epsilon(events)


def _events(promise: Promise, rounds: list[Left], noise: Noise) -> Counter[Any]:
    """Return one session's releases as (kind, multiplier), with how often each was made."""
    wide = noise.release * math.sqrt(PARTIES)
    links = 4
    everywhere = PARTIES if promise.unit != "secondary-record" else 1
    if promise.encoder == "trained":
        move = 2.0 * everywhere
        return Counter(("plain", wide / (move * math.sqrt(len(one.rows)))) for one in rounds)
    uses = Counter(row for one in rounds for row in one.rows)
    first = {row: place for place, one in enumerate(rounds) for row in one.rows[::-1]}
    ranked = sorted(uses, key=lambda row: (-uses[row], first[row]))
    chosen = set(ranked[: 1 if promise.unit == "linked-row" else promise.links])
    if promise.encoder == "frozen":
        one_row = (1.0 if promise.unit == "linked-row" else 2.0 / links) * everywhere
        touched = sum(uses[row] for row in chosen)
        kind = "plain" if promise.rate == 1 else promise.unit
        return Counter({(kind, wide / (one_row * math.sqrt(touched))): 1})
    events: Counter[Any] = Counter()
    for one in rounds:
        count = len(chosen & set(one.rows))
        if not count:
            continue
        precision = (2.0 * everywhere * math.sqrt(count) / wide) ** 2
        if one.taught:
            updates = 1 if promise.unit == "secondary-record" else PARTIES
            precision += updates * (2.0 * count / noise.update) ** 2
        events[("plain" if promise.rate == 1 else promise.unit, precision**-0.5)] += 1
    return events


def _epsilon(events: Counter[Any]) -> float:
    if not events:
        return 0.0
    precision = sum(count / z**2 for (kind, z), count in events.items() if kind == "plain")
    sampled = {(kind, z): count for (kind, z), count in events.items() if kind != "plain"}
    if not sampled:
        return float(dp_accounting.get_epsilon_gaussian(precision**-0.5, DELTA))
    total: Any = _plain(precision**-0.5) if precision else None
    for (kind, z), count in sampled.items():
        composed = _sampled(kind, z).self_compose(count)
        total = composed if total is None else total.compose(composed)
    return float(total.get_epsilon_for_delta(DELTA))


@cache
def _plain(z: float) -> Any:
    return pld.from_gaussian_mechanism(z, value_discretization_interval=_GRID)


@cache
def _sampled(kind: str, z: float) -> Any:
    if kind == "secondary-record":
        return pld.from_gaussian_mechanism(
            z, value_discretization_interval=_GRID, sampling_prob=RATE
        )
    # Each secondary samples the entity's record on its own.
    drawn = range(PARTIES + 1)
    return pld.from_mixture_gaussian_mechanism(
        z,
        sensitivities=[count / PARTIES for count in drawn],
        sampling_probs=[
            math.comb(PARTIES, count) * RATE**count * (1 - RATE) ** (PARTIES - count)
            for count in drawn
        ],
        value_discretization_interval=_GRID,
    )
