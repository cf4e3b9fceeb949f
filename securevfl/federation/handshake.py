"""How a session begins: same file, same people, fresh keys that the relay cannot swap."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Final

import numpy as np

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import AuthenticationError, ConfigError, ProtocolError
from securevfl.federation.messages import RoundKind
from securevfl.federation.run_plan import RunFacts
from securevfl.mpc.pair_keys import PUBLIC_BYTES, KeyOffer, SessionKey
from securevfl.transport.identity import Identity, verify
from securevfl.transport.message import Message

PROTOCOL_VERSION: Final = 1

_SIGNATURE_BYTES: Final = 64


def _signed_text(config: FederationConfig, offer: KeyOffer) -> bytes:
    # The file's digest, so that a signature serves no other federation of the same parties.
    return offer.statement() + config.digest.encode()


def hello(
    config: FederationConfig,
    *,
    identity: Identity,
    key: SessionKey,
    epochs: list[int],
    pretrained: Sequence[int] = (),
) -> Message:
    """Return a secondary's first message.

    Args:
        config: The federation file.
        identity: This party's long-term identity.
        key: Its fresh key of this session.
        epochs: Epochs that it could resume; none for a fresh start.
        pretrained: Iterations of pretraining that it could resume.

    Reveals:
        To the primary: the federation file's hash, this session's public key, which epochs and
        iterations this party could resume.
    """
    signature = identity.sign(_signed_text(config, key.offer))
    return Message(
        kind=RoundKind.HELLO,
        meta={
            "digest": config.digest,
            "protocol": PROTOCOL_VERSION,
            "epochs": epochs,
            "pretrained": list(pretrained),
        },
        tensors={
            "public": np.frombuffer(key.offer.public, dtype=np.uint8),
            "signature": np.frombuffer(signature, dtype=np.uint8),
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumable:
    """The epochs and pretraining iterations that a secondary has saved and can resume from."""

    epochs: frozenset[int]
    """Epochs of training."""

    pretrained: frozenset[int]
    """Iterations of pretraining."""


def check_hello(config: FederationConfig, message: Message) -> Resumable:
    """Refuse a party that holds another file or speaks another protocol.

    Returns:
        What it could go on from.

    Raises:
        ConfigError: With both hashes.
        ProtocolError: If the versions differ or the message is malformed.
    """
    theirs = message.figure("digest", str)
    if theirs != config.digest:
        raise ConfigError(
            f"federation files differ: {config.primary.name!r} has {config.digest}, "
            f"{message.sender!r} has {theirs}; give every party the same file"
        )
    version = message.figure("protocol", int)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"party {message.sender!r} speaks protocol {version}, this one {PROTOCOL_VERSION}; "
            f"install the same version of securevfl"
        )
    saved = {name: message.figure(name, list) for name in ("epochs", "pretrained")}
    for name, values in saved.items():
        if not all(isinstance(value, int) for value in values):
            raise ProtocolError(f"party {message.sender!r} sent {name} that are no numbers")
    return Resumable(epochs=frozenset(saved["epochs"]), pretrained=frozenset(saved["pretrained"]))


def welcome(hellos: Mapping[str, Message], facts: RunFacts) -> Message:
    """Return the primary's answer: every secondary's signed session key, and the run's numbers.

    Reveals:
        To every secondary: the others' public session keys, and how many rows the primary has for
        training, validation and test.
    """
    tensors = {}
    for name, message in hellos.items():
        tensors[f"public:{name}"] = _fixed(message, "public", PUBLIC_BYTES)
        tensors[f"signature:{name}"] = _fixed(message, "signature", _SIGNATURE_BYTES)
    return Message(kind=RoundKind.WELCOME, meta=asdict(facts), tensors=tensors)


def open_welcome(
    config: FederationConfig, message: Message, *, key: SessionKey, pinned: Mapping[str, str]
) -> tuple[RunFacts, dict[int, bytes]]:
    """Check the welcome; return the run's facts and this party's key with every other secondary.

    Raises:
        AuthenticationError: If a session key is not signed by the identity that is pinned.
        ProtocolError: If a number is missing or impossible.
    """
    facts = RunFacts(**{field.name: message.figure(field.name, int) for field in fields(RunFacts)})
    parts = (facts.train_rows, facts.validation_rows, facts.test_rows)
    others = (facts.unlabelled_rows, facts.resume_epoch, facts.resume_pretraining)
    if min(parts) < 1 or min(others) < 0 or sum(parts) + facts.unlabelled_rows != facts.rows:
        raise ProtocolError("the primary's row counts do not add up")
    offers = {}
    for party in config.callers:
        rank = config.ranks[party.name]
        offer = KeyOffer(
            session=key.offer.session,
            rank=rank,
            name=party.name,
            public=_fixed(message, f"public:{party.name}", PUBLIC_BYTES).tobytes(),
        )
        signature = _fixed(message, f"signature:{party.name}", _SIGNATURE_BYTES).tobytes()
        try:
            verify(pinned[party.name], signature, _signed_text(config, offer))
        except AuthenticationError:
            raise AuthenticationError(
                f"the session key that the primary passed on for {party.name!r} is not signed by "
                f"the identity that the federation file pins"
            ) from None
        offers[rank] = offer
    return facts, key.agree(offers)


def _fixed(message: Message, name: str, length: int) -> np.ndarray:
    return message.tensor(name, dtype=np.uint8, shape=(length,))
