"""Countersigning: parties sign the heads of their ledgers, and store one another's signatures.

A ledger is its owner's file: if it is cut, emptied or rewritten, it still looks complete on its
own. So parties exchange their ledgers' heads at a session's start, at the end of every epoch, when
a frozen encoder has released all rows, now and then while a model is served, and at the end. Each
party stores what the others signed, and at the next meeting every party must prove that its ledger
continues from there.

The primary relays all messages but need not be trusted: every text is signed by a long-term
identity, together with the federation file, the run, the meeting and the point. Fresh random
numbers of all parties identify a meeting, so that messages of an earlier one are not valid.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from securevfl.core.errors import AuthenticationError, ConfigError, PrivacyError, ProtocolError
from securevfl.ledger.chain import HASH_BYTES, ChainedFile, head_after, now
from securevfl.transport.identity import Identity, verify
from securevfl.transport.message import DeclaredMessage, Message, MessageKind, TypedMessage
from securevfl.transport.star import PrimaryTransport, SecondaryTransport

T = TypeVar("T")


NONCE_BYTES: Final = 16
MOST_LINES: Final = 1 << 18
"""Lines that one proof may have: 8 MiB of hashes."""

_SIGNATURE_BYTES: Final = 64
_NOTHING: Final = (bytes(HASH_BYTES), -1)

Request = Literal["released", "served", "end"]
"""Points at which the primary must request heads; a session's start and an epoch's end need no
request."""


class LedgerKind(MessageKind):
    """Messages about ledgers."""

    MEMORIES = 17
    HEADS = 18
    COUNTERSIGN = 19


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The heads of others' ledgers that one party remembers, signed with a fresh random number."""

    nonce: bytes
    heads: Mapping[str, tuple[bytes, int]]
    """A head and its number of lines, by party."""
    signature: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedHead:
    """The head of a party's ledger, signed, and the proof that it continues an older one."""

    head: bytes
    lines: int
    signature: bytes
    since: int
    """Number of lines before the proof's first line."""
    proof: npt.NDArray[np.uint8]
    """SHA-256 of each line from there on, shape [lines - since, 32]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memories(TypedMessage):
    """The heads of the others' ledgers that the sender remembers from earlier runs, signed.

    Holds a fresh random number too. It shows which parties the sender has met before, and how many
    lines their ledgers had.
    """

    KIND: ClassVar = LedgerKind.MEMORIES
    WAY: ClassVar = "secondary to primary; the primary passes all of them, and its own, on"
    COVERS: ClassVar = {"ledgers": "parties memories lengths"}

    parties: Sequence[str]
    """All parties with a ledger, in the order of the heads."""
    memories: Mapping[str, Memory]

    def to_message(self) -> Message:
        """Return the message as it is sent."""
        tensors: dict[str, npt.NDArray[np.generic]] = {}
        for name, memory in self.memories.items():
            heads = [memory.heads.get(other, _NOTHING) for other in self.parties]
            tensors[f"nonce:{name}"] = np.frombuffer(memory.nonce, dtype=np.uint8)
            tensors[f"signature:{name}"] = np.frombuffer(memory.signature, dtype=np.uint8)
            tensors[f"heads:{name}"] = np.frombuffer(
                b"".join(head for head, _ in heads), dtype=np.uint8
            ).reshape(len(heads), HASH_BYTES)
            tensors[f"lines:{name}"] = np.array([lines for _, lines in heads], dtype=np.int64)
        return Message(kind=self.KIND, tensors=tensors)

    @classmethod
    def from_message(
        cls, message: Message, *, senders: Collection[str], parties: Sequence[str]
    ) -> "Memories":
        """Read the memories of ``senders``, each about any of ``parties``.

        Raises:
            ProtocolError: If one of them is missing or malformed.
        """
        parts = ("nonce", "signature", "heads", "lines")
        message.require_only(*(f"{part}:{name}" for part in parts for name in senders))
        memories, count = {}, len(parties)
        for name in senders:
            heads = message.tensor(f"heads:{name}", dtype=np.uint8, shape=(count, HASH_BYTES))
            lines = message.tensor(f"lines:{name}", dtype=np.int64, shape=(count,)).tolist()
            memories[name] = Memory(
                nonce=message.raw(f"nonce:{name}", NONCE_BYTES),
                heads={
                    other: (head.tobytes(), number)
                    for other, head, number in zip(parties, heads, lines, strict=True)
                    if number >= 0
                },
                signature=message.raw(f"signature:{name}", _SIGNATURE_BYTES),
            )
        return cls(parties=parties, memories=memories)


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads(TypedMessage):
    """The head of the sender's ledger and its number of lines, signed.

    Salted hashes of the lines that are new to the others prove that the ledger continues. They show
    the number of charges, in other federations too, but not their content.
    """

    KIND: ClassVar = LedgerKind.HEADS
    WAY: ClassVar = "secondary to primary; the primary passes all of them, and its own, on"
    COVERS: ClassVar = {"ledgers": "heads lengths"}

    heads: Mapping[str, SignedHead]

    def to_message(self) -> Message:
        """Return the message as it is sent."""
        tensors: dict[str, npt.NDArray[np.generic]] = {}
        for name, signed in self.heads.items():
            tensors[f"head:{name}"] = np.frombuffer(signed.head, dtype=np.uint8)
            tensors[f"lines:{name}"] = np.array([signed.since, signed.lines], dtype=np.int64)
            tensors[f"signature:{name}"] = np.frombuffer(signed.signature, dtype=np.uint8)
            tensors[f"proof:{name}"] = signed.proof
        return Message(kind=self.KIND, tensors=tensors)

    @classmethod
    def from_message(cls, message: Message, *, senders: Collection[str]) -> "Heads":
        """Read the heads of ``senders``.

        Raises:
            ProtocolError: If one of them is missing or malformed.
        """
        parts = ("head", "lines", "signature", "proof")
        message.require_only(*(f"{part}:{name}" for part in parts for name in senders))
        heads = {}
        for name in senders:
            since, lines = message.tensor(f"lines:{name}", dtype=np.int64, shape=(2,)).tolist()
            if not 0 <= since <= lines <= since + MOST_LINES:
                raise ProtocolError(
                    f"party {name!r}: a proof from line {since} to line {lines} of its ledger is "
                    f"none that can be; at most {MOST_LINES} lines are taken"
                )
            heads[name] = SignedHead(
                head=message.raw(f"head:{name}", HASH_BYTES),
                lines=lines,
                signature=message.raw(f"signature:{name}", _SIGNATURE_BYTES),
                since=since,
                proof=message.tensor(
                    f"proof:{name}", dtype=np.uint8, shape=(lines - since, HASH_BYTES)
                ),
            )
        return cls(heads=heads)


@dataclass(frozen=True, kw_only=True, slots=True)
class CountersignRequest(DeclaredMessage):
    """Request for heads: all rows are released, a model was served for long, or the run ends."""

    KIND: ClassVar = LedgerKind.COUNTERSIGN
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"no record": "point lengths"}

    point: Request


COUNTERSIGNED: Final = "countersigned"
FORGOTTEN: Final = "forgotten"
"""A ledger's kinds of lines about others; they charge nothing."""

START: Final = "start"
END: Final = "end"


def epoch_point(epoch: int) -> str:
    """Return the name of an epoch's end in statements."""
    return f"epoch {epoch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Occasion:
    """The run that texts are signed for."""

    federation: str
    """The federation's name, under which other parties' ledgers are remembered."""
    digest: str
    """SHA-256 of the federation file, hexadecimal."""
    run: str
    """The run's id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remembered:
    """Another party's ledger as it was when that party last signed."""

    head: bytes
    lines: int
    time: str
    """Time of the signature, by the clock of the remembering party."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadStatement:
    """A party's statement about its ledger, signed together with the :class:`Occasion`."""

    meeting: str
    """Names the session; see :meth:`Countersigner.open`."""
    point: str
    """``start``, ``epoch N``, ``released``, ``served`` or ``end``."""
    party: str
    """Owner of the ledger."""
    head: str
    """The ledger's head, hexadecimal."""
    lines: int
    """Number of the ledger's lines."""
    since: int
    """Number of lines before the first line of the statement's proof."""
    proof: str
    """SHA-256 of that proof, so that the primary, which passes it on, cannot alter it unnoticed."""

    def text(self, occasion: Occasion) -> bytes:
        """Return the text to sign."""
        return _text("ledger head", {**asdict(occasion), **asdict(self)})

    def line(self) -> dict[str, Any]:
        """Return the fields for a ledger's line, without those that all its statements share."""
        kept = asdict(self)
        del kept["meeting"], kept["point"]
        return kept


def require_signed(entry: Mapping[str, Any]) -> list[HeadStatement]:
    """Check the signatures in a ledger's line about others; return the signed statements.

    Raises:
        AuthenticationError: If a statement is not signed by the identity given with it.
        ConfigError: If that identity is invalid.
        PrivacyError: If the line is malformed.
    """
    try:
        occasion = Occasion(**{name: str(entry[name]) for name in ("federation", "digest", "run")})
        statements = []
        for signed in entry["statements"]:
            kept = {name: signed[name] for name in ("party", "head", "lines", "since", "proof")}
            statement = HeadStatement(meeting=entry["meeting"], point=entry["point"], **kept)
            verify(signed["identity"], bytes.fromhex(signed["signature"]), statement.text(occasion))
            statements.append(statement)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise PrivacyError(f"a line about other parties is malformed ({error})") from None
    return statements


class OtherLedgers:
    """The newest state of other parties' ledgers in a ledger's lines, by federation."""

    def __init__(self) -> None:
        self.by_federation: dict[str, dict[str, Remembered]] = {}

    def take(self, entry: Mapping[str, Any], where: str = "a ledger") -> None:
        """Add a line; lines of other kinds are ignored.

        Raises:
            PrivacyError: If a line of this kind is malformed.
        """
        try:
            if entry["kind"] == COUNTERSIGNED:
                remembered = self.by_federation.setdefault(entry["federation"], {})
                for signed in entry["statements"]:
                    remembered[signed["party"]] = Remembered(
                        head=bytes.fromhex(signed["head"]),
                        lines=signed["lines"],
                        time=entry["time"],
                    )
            elif entry["kind"] == FORGOTTEN:
                self.by_federation.get(entry["federation"], {}).pop(entry["party"], None)
        except (KeyError, TypeError, ValueError) as error:
            why = f"a line about other parties is malformed ({error})"
            raise PrivacyError(f"{where}: {why}") from None

    def of(self, federation: str) -> dict[str, Remembered]:
        """Return the remembered ledger of each other party of a federation."""
        return dict(self.by_federation.get(federation, {}))


def forget_party(path: Path, *, party: str) -> list[str]:
    """Make a table's ledger forget another party's ledger.

    The other party's next ledger is then accepted in any state. The ledger keeps a line about it.

    Args:
        path: The table's ledger.
        party: The party whose ledger has changed for a good reason.

    Returns:
        The federations in which it was remembered.

    Raises:
        ConfigError: If there is no such ledger, it is in use, or it does not remember the party.
        PrivacyError: If the ledger was changed.
    """
    if not path.exists():
        raise ConfigError(f"ledger {path}: does not exist, so it remembers no party")
    remembered = OtherLedgers()
    ledger = ChainedFile(path, take=remembered.take)
    try:
        known = remembered.by_federation
        federations = sorted(name for name, parties in known.items() if party in parties)
        if not federations:
            others = sorted({other for parties in known.values() for other in parties})
            raise ConfigError(
                f"ledger {path}: remembers nothing of {party!r}; it knows of "
                f"{', '.join(map(repr, others)) or 'no party'}"
            )
        for name in federations:
            ledger.append({"kind": FORGOTTEN, "time": now(), "federation": name, "party": party})
    finally:
        ledger.close()
    return federations


@dataclass(eq=False)
class Countersigner:
    """One party's part of countersigning: states its ledger's head, checks the others'."""

    ledger: ChainedFile
    """The party's own, open."""
    identity: Identity
    """This party's long-term identity."""
    pinned: Mapping[str, str]
    """The public identity of every party that has a ledger, this one among them."""
    occasion: Occasion
    """The run that texts are signed for."""
    _: KW_ONLY
    session: bytes
    """The transport's id of the session."""
    known: InitVar[Mapping[str, Remembered]]
    """The ledger's memory of each other party of the federation."""
    _meeting: str = field(default="", init=False)
    _since: int = field(default=0, init=False)
    _own: Memory | None = field(default=None, init=False)

    def __post_init__(self, known: Mapping[str, Remembered]) -> None:
        self._remembered = {name: known[name] for name in self.others if name in known}

    @property
    def name(self) -> str:
        """This party."""
        return self.identity.name

    @property
    def parties(self) -> tuple[str, ...]:
        """All parties that have a ledger, sorted."""
        return tuple(sorted(self.pinned))

    @property
    def others(self) -> tuple[str, ...]:
        """The others that have one."""
        return tuple(name for name in self.parties if name != self.name)

    def memory(self) -> Memory:
        """Return the heads that this party remembers, signed, with a fresh random number."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        heads = {
            name: (remembered.head, remembered.lines)
            for name, remembered in self._remembered.items()
        }
        text = self._memory_text(self.name, nonce, heads)
        self._own = Memory(nonce=nonce, heads=heads, signature=self.identity.sign(text))
        return self._own

    def open(self, memories: Mapping[str, Memory]) -> None:
        """Start a meeting with the memories of all parties, which identify it.

        Args:
            memories: Every party's memory, this party's as it was sent.

        Raises:
            AuthenticationError: If one is not signed by the pinned identity.
            ProtocolError: If the primary relayed another memory of this party, or the ledger has
                grown by more lines than a proof may have.
        """
        if memories[self.name] != self._own:
            raise ProtocolError("the primary passed on other ledger heads than this party sent")
        texts = []
        for name in self.parties:
            memory = memories[name]
            text = self._memory_text(name, memory.nonce, memory.heads)
            self._check(name, memory.signature, text, what="list of ledger heads")
            texts.append(text)
        self._meeting = hashlib.sha256(b"".join(texts)).hexdigest()
        lines = self.ledger.chain.lines
        asked = [
            memory.heads[self.name][1] for memory in memories.values() if self.name in memory.heads
        ]
        self._since = min([*asked, lines])
        if lines - self._since > MOST_LINES:
            raise ProtocolError(
                f"party {self.name!r}: its ledger has {lines - self._since} lines that the others "
                f"have not seen, and a proof takes {MOST_LINES}; they must forget the old one "
                f"(securevfl ledger forget)"
            )

    def state(self, point: str) -> SignedHead:
        """Return this party's ledger head, signed, with the hashes of lines new to others."""
        chain = self.ledger.chain
        lines = chain.lines
        since = min(self._since, lines)
        fresh = chain.hashes_after(since)
        unsigned = SignedHead(
            head=chain.head,
            lines=lines,
            signature=b"",
            since=since,
            proof=np.frombuffer(b"".join(fresh), dtype=np.uint8).reshape(len(fresh), HASH_BYTES),
        )
        text = self._statement(point, self.name, unsigned).text(self.occasion)
        return replace(unsigned, signature=self.identity.sign(text))

    def keep(self, point: str, stated: Mapping[str, SignedHead]) -> None:
        """Check the heads that others have signed, and write them into this party's ledger.

        Args:
            point: The point in the run, as this party knows it.
            stated: Signed head of every party.

        Raises:
            AuthenticationError: If one is not signed by the pinned identity for this point of this
                meeting.
            ProtocolError: Naming a party whose ledger does not continue the one that it signed
                before.
        """
        statements = {name: self._statement(point, name, stated[name]) for name in self.others}
        for name, statement in statements.items():
            text = statement.text(self.occasion)
            self._check(name, stated[name].signature, text, what=f"ledger head at {point}")
        for name in self.others:
            self._require_continued(name, stated[name])
        at = now()
        # From now on, the others know the ledger up to this statement.
        self._since = self.ledger.chain.lines
        self.ledger.append(
            {
                "kind": COUNTERSIGNED,
                "time": at,
                **asdict(self.occasion),
                "meeting": self._meeting,
                "point": point,
                "statements": [
                    {
                        **statement.line(),
                        "identity": self.pinned[name],
                        "signature": stated[name].signature.hex(),
                    }
                    for name, statement in statements.items()
                ],
            }
        )
        self._remembered = {
            name: Remembered(head=stated[name].head, lines=stated[name].lines, time=at)
            for name in self.others
        }

    def _require_continued(self, name: str, signed: SignedHead) -> None:
        """Refuse a ledger that does not continue the remembered one."""
        known = self._remembered.get(name)
        if known is None:
            return
        if signed.since <= known.lines <= signed.lines:
            rest = [line.tobytes() for line in signed.proof[known.lines - signed.since :]]
            if head_after(known.head, rest) == signed.head:
                return
        error = ProtocolError(
            f"party {name!r}: its ledger does not continue the one that it signed on "
            f"{known.time} (rolled back, emptied or rewritten); it must restore the newest copy "
            f"and book what that lacks (securevfl ledger restored). If there is a good reason, "
            f"{self.name!r} forgets the old one: securevfl ledger forget TABLE --party {name}"
        )
        error.party = name
        raise error

    def _statement(self, point: str, party: str, stated: SignedHead) -> HeadStatement:
        return HeadStatement(
            meeting=self._meeting,
            point=point,
            party=party,
            head=stated.head.hex(),
            lines=stated.lines,
            since=stated.since,
            proof=hashlib.sha256(stated.proof.tobytes()).hexdigest(),
        )

    def _memory_text(
        self, party: str, nonce: bytes, heads: Mapping[str, tuple[bytes, int]]
    ) -> bytes:
        return _text(
            "ledger memory",
            {
                **asdict(self.occasion),
                "session": self.session.hex(),
                "party": party,
                "nonce": nonce.hex(),
                "heads": {name: [head.hex(), lines] for name, (head, lines) in heads.items()},
            },
        )

    def _check(self, name: str, signature: bytes, text: bytes, *, what: str) -> None:
        try:
            verify(self.pinned[name], signature, text)
        except AuthenticationError:
            raise AuthenticationError(
                f"the {what} that came for {name!r} is not signed for this run by the identity "
                f"that the federation file pins"
            ) from None


def _text(purpose: str, fields: Mapping[str, Any]) -> bytes:
    # The purpose separates kinds of signed texts, as the identity's tag separates them from TLS.
    body = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return f"securevfl {purpose} v1\0{body}".encode()


Log = Callable[..., None]
_NO_ROUND: Final = 0

SERVED_ROWS: Final = 1000
"""Predicted rows of a served model after which heads are signed again."""
SERVED_S: Final = 3600.0
"""Seconds after which they are, if anything was predicted."""


@dataclass(eq=False)
class Countersigning:
    """Countersigning over the star: the primary relays texts, and each party checks them.

    The primary relays texts before it checks them.
    """

    signer: Countersigner
    """This party's signing and checking."""
    transport: PrimaryTransport | SecondaryTransport
    """This party's end of the star."""
    _: KW_ONLY
    deadline_s: float
    """Seconds for the others to answer."""
    log: Log
    """This party's log."""
    releases_once: InitVar[bool] = False
    """True if all rows are released at once, so that the primary may request heads after it."""

    clock: Callable[[], float] = time.monotonic
    """Returns the time in seconds."""

    def __post_init__(self, releases_once: bool) -> None:
        self._due = {END, "released"} if releases_once else {END}
        self._met, self._rows = self.clock(), 0

    def count_rows(self, rows: int) -> None:
        """Add to the predicted rows that :meth:`long_served` uses."""
        self._rows += rows

    def long_served(self, *, most_s: float = SERVED_S) -> bool:
        """Return whether enough was predicted since the last signatures for new ones.

        Args:
            most_s: Seconds after which new ones are due, if anything was predicted.
        """
        late = self._rows > 0 and self.clock() - self._met >= most_s
        return late or self._rows >= SERVED_ROWS

    def start(self) -> None:
        """Open the meeting, and check that every ledger continues the one that others remember.

        Raises:
            AuthenticationError: If a text is not signed by the pinned identity.
            ProtocolError: Naming a party whose ledger was rolled back or rewritten.

        Reveals:
            To all parties: the :class:`Memories` and :class:`Heads` of all parties.
        """
        parties = self.signer.parties
        memories = self._exchange(
            self.signer.memory(),
            lambda stated: Memories(parties=parties, memories=stated),
            lambda message, senders: (
                Memories.from_message(message, senders=senders, parties=parties).memories
            ),
        )
        self.signer.open(memories)
        self.meet(START)

    def request(self, point: Request) -> None:
        """Request heads at a point that no other message marks; for the primary only.

        Raises:
            AuthenticationError: As :meth:`start`.
            ProtocolError: As :meth:`start`.

        Reveals:
            To all parties: the :class:`Heads` of all parties.
        """
        assert isinstance(self.transport, PrimaryTransport), "the primary asks"
        asked = CountersignRequest(point=point)
        self.transport.broadcast(self.signer.others, asked.to_message())
        self.meet(point)

    def answer(self, request: CountersignRequest) -> bool:
        """Answer the primary's request for heads; return whether it ends the run.

        Raises:
            AuthenticationError: As :meth:`start`.
            ProtocolError: As :meth:`start`, or if the request is not due.

        Reveals:
            To all parties: the :class:`Heads` of all parties.
        """
        point = request.point
        # The primary's clock may be a little ahead of this party's.
        if not (self.long_served(most_s=SERVED_S / 2) if point == "served" else point in self._due):
            raise ProtocolError(
                f"the primary asks for ledger heads ({point}) where none are due; nothing is signed"
            )
        self._due.discard(point)
        self.meet(point)
        return point == END

    def meet(self, point: str) -> None:
        """Exchange heads at a point that every party knows.

        Raises:
            AuthenticationError: As :meth:`start`.
            ProtocolError: As :meth:`start`.

        Reveals:
            To all parties: the :class:`Heads` of all parties.
        """
        begin, signer = time.monotonic(), self.signer
        heads = self._exchange(
            signer.state(point),
            lambda stated: Heads(heads=stated),
            lambda message, senders: Heads.from_message(message, senders=senders).heads,
        )
        signer.keep(point, heads)
        self._met, self._rows = self.clock(), 0
        self.log("countersigned", point=point, wall_s=round(time.monotonic() - begin, 6))

    def _exchange(
        self,
        own: T,
        message_of: Callable[[Mapping[str, T]], TypedMessage],
        read: Callable[[Message, Collection[str]], Mapping[str, T]],
    ) -> Mapping[str, T]:
        """Exchange statements with all parties; return them by name.

        Args:
            own: This party's statement.
            message_of: Returns the message with the given statements.
            read: Returns the named parties' statements in a message.
        """
        signer, transport, deadline_s = self.signer, self.transport, self.deadline_s
        stated = {signer.name: own}
        message = message_of(stated).to_message()
        if isinstance(transport, SecondaryTransport):
            transport.send(message)
            passed_on = transport.receive(
                message.kind, round_number=_NO_ROUND, deadline_s=deadline_s
            )
            return read(passed_on, signer.parties)
        messages = transport.receive_each(
            signer.others, message.kind, round_number=_NO_ROUND, deadline_s=deadline_s
        )
        for theirs in list(messages):  # all have arrived before one is read
            stated.update(read(theirs, [theirs.sender]))
        transport.broadcast(signer.others, message_of(stated).to_message())
        return stated
