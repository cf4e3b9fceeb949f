"""Handshake of a session: same file, same parties, fresh keys that the relay cannot swap."""

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from securevfl.config.federation import FederationConfig
from securevfl.config.sections import parse_address
from securevfl.core.errors import AuthenticationError, ConfigError, ProtocolError
from securevfl.federation.messages import PROTOCOL_VERSION, RUN_ID, Hello, RoundKind, Welcome
from securevfl.federation.run_plan import RunFacts
from securevfl.federation.session.membership import callers_in_predictions, require_active
from securevfl.mpc.masks import KeyOffer, SessionKey
from securevfl.transport.channels import CallerChannels, Kinds, SealedChannel
from securevfl.transport.connection import TransportLimits
from securevfl.transport.identity import Identity, verify
from securevfl.transport.message import Message
from securevfl.transport.star import SecondaryTransport

# A greeting has some 100 bytes for each party, and the epochs that its sender has saved.
_GREETING_BYTES: Final = 1 << 20
# Two words of a share, or a number and what says where it belongs.
_BYTES_PER_NUMBER: Final = 16
_KEY_COLUMNS: Final = 16
_FILE_DIGEST: Final = re.compile("[0-9a-f]{64}")
# The number of rows is the primary's word: what it asks room for is bounded all the same.
_MOST_BY_ROWS: Final = 1 << 30


def _signed_text(config: FederationConfig, offer: KeyOffer) -> bytes:
    # The file's digest, so that a signature serves no other federation of the same parties.
    return offer.statement() + config.digest.encode()


def hello(
    config: FederationConfig,
    *,
    identity: Identity,
    key: SessionKey,
    epochs: Sequence[int],
    stage_steps: Sequence[int] = (),
    run: str = "",
) -> Hello:
    """Return a caller's first message.

    Args:
        config: The federation file.
        identity: This party's long-term identity.
        key: Its fresh key of this session.
        epochs: Epochs that it could resume; none for a fresh start.
        stage_steps: Steps of the stage before rounds that it could go on from.
        run: Id of the run that it goes on with; empty for a fresh start.

    Reveals:
        To the primary: the federation file's hash, this session's public key, which run, epochs
        and iterations this party could resume.
    """
    return Hello(
        digest=config.digest,
        public=key.offer.public,
        signature=identity.sign(_signed_text(config, key.offer)),
        epochs=tuple(epochs),
        stage_steps=tuple(stage_steps),
        run=run,
    )


def read_hello(config: FederationConfig, message: Message) -> Hello:
    """Read a caller's first message.

    Raises:
        ConfigError: If it holds another federation file, with both digests.
        ProtocolError: If it speaks another protocol, or the message is malformed.
    """
    digest, protocol = message.figure("digest", str), message.figure("protocol", int)
    if not _FILE_DIGEST.fullmatch(digest):
        raise ProtocolError(f"party {message.sender!r} sent an invalid digest of its file")
    if digest != config.digest:
        what = "federation files or programs" if config.mpc.program else "federation files"
        raise ConfigError(
            f"{what} differ: {config.primary.name!r} has {config.digest}, "
            f"{message.sender!r} has {digest}; give every party the same file"
            + (" and the same program" if config.mpc.program else "")
        )
    if protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            f"party {message.sender!r} speaks protocol {protocol}, this one "
            f"{PROTOCOL_VERSION}; install the same version of securevfl"
        )
    read = Hello.from_message(message)
    if read.run and not RUN_ID.fullmatch(read.run):
        raise ProtocolError(f"party {message.sender!r} sent an invalid id of its run")
    return read


def require_one_run(
    config: FederationConfig, hellos: Mapping[str, Hello], *, run: str, has_state: bool = True
) -> None:
    """Refuse secondaries that go on with another run than the primary, or start another way.

    A party that was lost while a run began may never have heard of it, and joins it now.

    Args:
        config: The federation file.
        hellos: Of every caller that takes part, by name; one that only helps to link keeps nothing
            of a run.
        run: The run that the primary goes on with; empty for a fresh start.
        has_state: Whether the primary keeps more of that run than its id.

    Raises:
        ProtocolError: Naming the party and what to do.
    """
    for party in config.secondaries:
        if party.name not in hellos:
            continue
        theirs = hellos[party.name].run
        if theirs != run and (theirs or has_state):
            raise ProtocolError(_other_run(repr(config.primary.name), run, party.name, theirs))


def require_own_run(
    config: FederationConfig,
    facts: RunFacts,
    *,
    run: str,
    epochs: Collection[int],
    stage_steps: Collection[int],
) -> None:
    """Refuse a primary that wants a secondary to go on from what it does not have.

    A secondary that believed it would mix two runs, or release a run's rows afresh.

    Args:
        config: The federation file.
        facts: What the primary says.
        run: The run that this party goes on with; empty for a fresh start.
        epochs: Epochs that it could resume.
        stage_steps: Steps of the stage before rounds that it could go on from.

    Raises:
        ProtocolError: Naming the primary and what to do.
    """
    primary = config.primary.name
    resumes = bool(facts.resume_epoch or facts.resume_stage)
    if (run and facts.run != run) or (not run and resumes):
        theirs = facts.run if resumes else ""
        raise ProtocolError(_other_run("this party", run, primary, theirs))
    if not run or facts.predicts:
        return
    saves = config.regime.saves_epochs
    wants = {"epoch": (facts.resume_epoch, epochs)} if saves else {}
    wants["stage step"] = (facts.resume_stage, stage_steps)
    for what, (number, own) in wants.items():
        if number and number not in own:
            raise ProtocolError(
                f"{primary!r} wants to go on from {what} {number}, which this party does not have; "
                f"start afresh with another --out"
            )
    # No party can be further than one epoch before all have saved it.
    if saves and not facts.resume_epoch and max(epochs, default=0) > 1:
        raise ProtocolError(
            f"{primary!r} wants run {run} to begin again, of which this party has epoch "
            f"{max(epochs)}; start another run with another --out"
        )


def _require_same_purpose(config: FederationConfig, facts: RunFacts, *, predicts: bool) -> None:
    """Refuse a primary that trains where this party answers for a kept model, or vice versa.

    Raises:
        ProtocolError: Saying how each was started.
    """
    if facts.predicts != predicts:
        does, own = (
            ("asks for predictions", "was started to train; start it with --serve")
            if facts.predicts
            else ("wants to train", "was started with --serve, to predict; start it without")
        )
        raise ProtocolError(f"{config.primary.name!r} {does}, and this party {own}")


def _other_run(party: str, own: str, other: str, theirs: str) -> str:
    does = [f"goes on with run {run}" if run else "starts afresh" for run in (own, theirs)]
    return (
        f"{party} {does[0]}, and {other!r} {does[1]}; start all parties with --resume in the "
        f"folders of one run, or all without it"
    )


def welcome(hellos: Mapping[str, Hello], facts: RunFacts) -> Welcome:
    """Return the primary's answer: every caller's signed session key, and the run's numbers.

    Reveals:
        To every caller: the others' public session keys, and how many rows the primary has for
        training, validation and test.
    """
    keys = {name: (theirs.public, theirs.signature) for name, theirs in hellos.items()}
    return Welcome(facts=facts, keys=keys)


def callers_of_program(config: FederationConfig) -> tuple[str, ...]:
    """Return who dials the primary where parties run a program: all but a coordinator."""
    return tuple(party.name for party in config.callers if party.role != "coordinator")


def open_welcome(
    config: FederationConfig, message: Message, *, key: SessionKey, pinned: Mapping[str, str]
) -> tuple[RunFacts, dict[int, bytes]]:
    """Check the welcome; return the run's facts and this party's key with every other caller.

    The keys follow from the facts too, and from the file: callers that were told different facts
    have different keys, so that their masks do not cancel and they cannot open one another's
    sealed messages.

    Raises:
        AuthenticationError: If a session key is not signed by the identity that is pinned.
        ProtocolError: If a number is missing or impossible, or parties are left out as they must
            not be.
    """

    def callers(facts: RunFacts) -> list[str]:
        if config.mpc.program:
            return list(callers_of_program(config))
        require_active(config, facts.active, rank=key.offer.rank, predicts=facts.predicts)
        if facts.predicts:
            return list(callers_in_predictions(config, facts.active))
        return [party.name for party in config.callers]

    opened = Welcome.from_message(message, callers=callers)
    offers = {}
    for name, (public, signature) in opened.keys.items():
        offer = KeyOffer(
            session=key.offer.session, rank=config.ranks[name], name=name, public=public
        )
        try:
            verify(pinned[name], signature, _signed_text(config, offer))
        except AuthenticationError:
            raise AuthenticationError(
                f"the session key that the primary passed on for {name!r} is not signed by "
                f"the identity that the federation file pins"
            ) from None
        offers[offer.rank] = offer
    agreed = config.digest.encode() + opened.facts.statement()
    return opened.facts, key.agree(offers, agreed=agreed)


def context_of(config: FederationConfig, facts: RunFacts, session: bytes) -> bytes:
    """Return a hash of what runs: the session, the file with its program, and the facts."""
    return hashlib.sha256(session + config.digest.encode() + facts.statement()).digest()


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """A caller's place in a session."""

    transport: SecondaryTransport
    """Its connection to the primary."""

    facts: RunFacts
    """Facts that the primary states about its rows."""

    pair_keys: Mapping[int, bytes]
    """A key with every other caller, by rank; the primary has none of them."""

    sealed: Mapping[str, SealedChannel]
    """This party's ends of the lines to every other caller, by name; the primary relays them.

    They number what they carry under one key each, so that all stages and all requests of a session
    share them: two lines of one key would seal two messages under one number.
    """

    rank: int
    """This party's own rank."""

    def context(self, config: FederationConfig) -> bytes:
        """Return a hash of what runs; see :func:`context_of`."""
        return context_of(config, self.facts, self.transport.session)

    def channels(
        self, config: FederationConfig, names: Collection[str], kinds: Kinds
    ) -> CallerChannels:
        """Return this party's channels to the primary and, sealed, to some other callers.

        Args:
            config: The federation file.
            names: Names of the parties, the primary among them.
            kinds: Kinds of messages that may come.
        """
        wait = config.waits.work
        return CallerChannels(
            self.transport,
            {name: rank for name, rank in config.ranks.items() if name in names},
            self.sealed,
            kinds=kinds,
            deadline_s=wait.for_primary_s,
            between_s=wait.secondary_s,
        )


@contextmanager
def join_session(
    config: FederationConfig,
    identity: Identity,
    pinned: Mapping[str, str],
    *,
    epochs: list[int],
    stage_steps: list[int],
    run: str = "",
    predicts: bool = False,
    patience_s: float | None = None,
    returning: bool = False,
    on_busy: Callable[[str], None] = lambda _text: None,
) -> Iterator[Joined]:
    """Join the session that the primary holds, and leave it in the end.

    Args:
        config: The federation file.
        identity: This party's long-term identity.
        pinned: Every party's pinned public key.
        epochs: Epochs that this party could resume.
        stage_steps: Steps of the stage before rounds that it could go on from.
        run: Id of the run that it goes on with; empty for a fresh start, and for a party that
            keeps nothing of a run.
        predicts: Whether this party answers for a kept model, and does not train.
        patience_s: Seconds that all parties may take to join; default: the federation file's.
        returning: Whether this party was in a session of the run before, and the primary may not
            know yet that it has lost it.
        on_busy: Receives once what the primary does, if it is something else than a run.

    Raises:
        ProtocolError: If the primary cannot be reached, is not who the file says, or goes on from
            what this party does not have.

    Reveals:
        To the primary: that this party takes part, the file's hash, its public key of the session,
        the run and the epochs. To the other callers: that public key.
    """
    wait = config.waits.joining(patience_s)
    transport = SecondaryTransport(
        parse_address(config.address),
        identity,
        pinned,
        config.ranks,
        limits=transport_limits(config, work_s=config.waits.work.for_primary_s),
    )
    with transport:
        transport.connect(wait.primary_s, returning=returning, on_busy=on_busy)
        rank = config.ranks[identity.name]
        key = SessionKey(session=transport.session, rank=rank, name=identity.name)
        transport.send(
            hello(
                config, identity=identity, key=key, epochs=epochs, stage_steps=stage_steps, run=run
            ).to_message()
        )
        message = transport.receive(
            RoundKind.WELCOME, round_number=0, deadline_s=wait.for_primary_s
        )
        facts, pair_keys = open_welcome(config, message, key=key, pinned=pinned)
        _require_same_purpose(config, facts, predicts=predicts)
        transport.widen(session_limits(config, facts, transport.limits))
        if not config.party(identity.name).is_helper:
            require_own_run(config, facts, run=run, epochs=epochs, stage_steps=stage_steps)
        names = {number: name for name, number in config.ranks.items()}
        sealed = {
            names[peer]: SealedChannel(
                pair_key,
                session=transport.session,
                own_rank=rank,
                peer=names[peer],
                peer_rank=peer,
            )
            for peer, pair_key in pair_keys.items()
        }
        yield Joined(
            transport=transport, facts=facts, pair_keys=pair_keys, sealed=sealed, rank=rank
        )


def transport_limits(config: FederationConfig, *, work_s: float) -> TransportLimits:
    """Return a transport's deadlines, and its sizes until WELCOME: greetings are small.

    Args:
        config: The federation file.
        work_s: This end's longest wait for the other one, of ``config.waits.work``.
    """
    return TransportLimits(
        silence_timeout_s=config.waits.silence_s,
        lowest_rate=config.runtime.lowest_rate,
        busy_timeout_s=work_s,
        max_message_bytes=_GREETING_BYTES,
        max_waiting_bytes=_GREETING_BYTES,
    )


def session_limits(
    config: FederationConfig, facts: RunFacts, greeting: TransportLimits
) -> TransportLimits:
    """Return a transport's limits from WELCOME on, from those until then.

    The largest message is what the file allows, or a share of a whole batch, or K links and up to
    16 key columns for each of the primary's rows but at most 1 GiB, whichever is more.
    """
    share = config.training.batch_size * math.prod(config.family.cut_shape(config.model))
    lists = facts.rows * (config.model.neighbours + _KEY_COLUMNS)
    largest = max(
        config.runtime.largest_message_mib << 20,
        _GREETING_BYTES + _BYTES_PER_NUMBER * share,
        min(_MOST_BY_ROWS, _GREETING_BYTES + _BYTES_PER_NUMBER * lists),
    )
    return replace(
        greeting,
        max_message_bytes=largest,
        max_waiting_bytes=TransportLimits().max_waiting_bytes,
    )
