"""CrypTen as it is loaded here: what it finds while a party computes, and its reveal of a sum.

CrypTen asks module-level functions for its communicator, its provider of tuples and its generators.
Here they answer with those of the party that this thread computes for (:class:`Found`); elsewhere
with CrypTen's own. Nothing calls ``crypten.init``, and ``torch.distributed`` stays untouched.
:mod:`securevfl.mpc.on_shares` has a communicator for whole programs; the sum of every round needs
less (:class:`CrypTenSumTo`).
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, NoReturn, cast

import torch
from torch import Tensor

from securevfl.core.conventions import PRIMARY_RANK
from securevfl.core.errors import ConfigError, ProtocolError
from securevfl.mpc.masks import PairwiseMasks
from securevfl.mpc.sum_to import Words, WordWire

# CrypTen 0.4.1 asks for a module that torch moved in 2.9, of CrypTen's ONNX importer, which nothing
# here uses.
_OLD_HOME: Final = "torch.onnx._internal.registration"
_NEW_HOME: Final = "torch.onnx._internal.torchscript_exporter.registration"


def import_crypten() -> ModuleType:
    """Import CrypTen and return it.

    Raises:
        ConfigError: If it, or something that it needs, is not installed.
    """
    try:
        if _OLD_HOME not in sys.modules and importlib.util.find_spec(_OLD_HOME) is None:
            sys.modules[_OLD_HOME] = importlib.import_module(_NEW_HOME)
        with warnings.catch_warnings():
            # Its sources hold invalid escapes, which Python reports while it compiles them.
            for category in (SyntaxWarning, DeprecationWarning):
                warnings.simplefilter("ignore", category)
            return importlib.import_module("crypten")
    except ImportError as error:
        raise ConfigError(
            f"CrypTen cannot be imported ({error}); install crypten==0.4.1 with sklearn==0.0, or "
            f"simulate, which needs neither"
        ) from error


crypten = import_crypten()

from crypten import communicator as crypten_communicator  # noqa: E402
from crypten.communicator import Communicator as Communicator  # noqa: E402
from crypten.communicator.distributed_communicator import ReduceOp as ReduceOp  # noqa: E402
from crypten.encoder import FixedPointEncoder  # noqa: E402
from crypten.mpc.primitives.arithmetic import ArithmeticSharedTensor as ArithmeticSharedTensor  # noqa: E402
from crypten.mpc.provider.provider import TupleProvider as TupleProvider  # noqa: E402


def _decode_words(encoder: FixedPointEncoder, words: Tensor | None) -> Tensor | None:
    """Return what words stand for, in place of CrypTen's decoder.

    That one is wrong by 1 for numbers just above a negative whole one: -7.99998 comes out as
    -8.99998.
    """
    if words is None or encoder.scale == 1:
        return words
    return (words.double() / encoder.scale).float()


FixedPointEncoder.decode = _decode_words


class StarCommunicator(Communicator):  # type: ignore[misc]
    """The one collective that a star can do safely: a sum that the primary alone receives.

    CrypTen's own reduce over gloo leaves a part of the plaintext in every party's buffer, and its
    object collectives are pickles; here they do not exist.
    """

    def __init__(
        self, wire: WordWire, *, rank: int, round_number: int, active: Sequence[int]
    ) -> None:
        self._wire = wire
        self._rank = rank
        self._round_number = round_number
        self._active = tuple(active)

    def _refuse_collective(self, *_positional: object, **_named: object) -> NoReturn:
        """Refuse a collective that would show data to others than the primary."""
        _refuse("another collective than a sum to the primary")

    send = recv = scatter = all_reduce = gather = all_gather = broadcast = barrier = (
        _refuse_collective
    )
    send_obj = recv_obj = broadcast_obj = _refuse_collective

    def get_world_size(self) -> int:
        """Return the number of parties in this round, the primary among them."""
        return len(self._active) + 1

    def get_rank(self) -> int:
        """Return this party's rank."""
        return self._rank

    def reduce(
        self,
        tensors: Sequence[Tensor],
        dst: int,
        op: object = None,
        async_op: bool = False,
        batched: bool = False,
    ) -> list[Tensor] | None:
        """Sum every party's tensor at the primary, in its own tensor's place.

        CrypTen's reveal of a batch hands shares over as they are; that of one share copies it
        first. So what comes here is a batch, of one.

        Raises:
            ProtocolError: For another destination, operation, mode or number of tensors.

        Reveals:
            To the primary: each party's tensor, which its mask makes uniformly random but for
            the sum. To anyone else: nothing.
        """
        if dst != PRIMARY_RANK or op is not None or async_op or not batched or len(tensors) != 1:
            _refuse(f"reduce(dst={dst}, op={op}, async_op={async_op}, batched={batched})")
        (share,) = tensors
        self._wire.carry(self._round_number, share, self._active)
        return [share] if self._rank == PRIMARY_RANK else None


class CrypTenSumTo:
    """The sum between processes: masks make the words secret shares, CrypTen reveals their sum."""

    def __init__(self, wire: WordWire, masks: PairwiseMasks | None) -> None:
        """Make it.

        Args:
            wire: Carries the words.
            masks: A secondary's own; None at the primary, which does not mask.

        Raises:
            ProtocolError: If a secondary has no masks, or the primary some.
        """
        if wire.masked != (masks is not None):
            raise ProtocolError("a secondary sends words under masks alone, the primary masks none")
        self._wire = wire
        self._masks = masks

    def __call__(self, words: Words, *, round_number: int, active: Sequence[int]) -> Words | None:
        """Contribute ``words``; see :class:`securevfl.mpc.sum_to.SumTo`.

        Nothing is copied: a secondary's share is sent from where it lies, and the primary's words
        become the sum.

        Raises:
            ProtocolError: If the round's mask was used before, or a peer is at fault.

        Reveals:
            To the primary: the total over it and ``active``. With one active secondary that is
            its words as they are: only the noise in them protects. To anyone else: nothing.
        """
        rank = PRIMARY_RANK
        if self._masks is not None:
            rank = self._masks.rank
            self._masks.apply(words, round_number=round_number, active=active)
        communicator = StarCommunicator(
            self._wire, rank=rank, round_number=round_number, active=active
        )
        with make_current(Found(communicator)):
            # Precision 0: words are ring elements already, and CrypTen's codec stays out.
            shared = ArithmeticSharedTensor.from_shares(words, precision=0)
            sums = ArithmeticSharedTensor.reveal_batch([shared], dst=PRIMARY_RANK)
        if sums is None:
            return None
        (total,) = sums
        if (total.dtype, total.shape) != (torch.int64, words.shape):
            raise ProtocolError(f"the sum came back as {total.dtype} of shape {list(total.shape)}")
        return cast(Tensor, total)

    def bind(self, message_digest: bytes, ranks: Sequence[int]) -> None:
        """Bind a message of the primary; see :class:`securevfl.mpc.sum_to.SumTo`.

        Reveals:
            Nothing.
        """
        if self._masks is not None:
            self._masks.bind(message_digest, ranks)

    def prepare(self, count: int, *, round_number: int, active: Sequence[int]) -> None:
        """Start making this round's mask in the background.

        Raises:
            ProtocolError: If the round's mask was used before.

        Reveals:
            Nothing.
        """
        if self._masks is not None:
            self._masks.prepare(round_number, count, active)


@dataclass(frozen=True, eq=False)
class Found:
    """What CrypTen finds while one party computes."""

    communicator: Any
    """Carries tensors to the other parties."""
    provider: Any = None
    """Deals the randomness of multiplications and conversions; None: there are none."""
    generators: Mapping[str, Mapping[torch.device, torch.Generator]] = field(default_factory=dict)
    """For CrypTen's sharings of zero, by name and device."""


_current: ContextVar[Found] = ContextVar("securevfl_crypten")
_original_get = crypten_communicator.get
_original_provider = crypten.mpc.get_default_provider


class _Generators(dict[str, Any]):
    """CrypTen's generators, which are those of the party that this thread computes for."""

    def __getitem__(self, name: str) -> Any:
        here = _current.get(None)
        return super().__getitem__(name) if here is None else here.generators[name]


def _get_communicator() -> Any:
    here = _current.get(None)
    return _original_get() if here is None else here.communicator


def _get_provider() -> Any:
    here = _current.get(None)
    return _original_provider() if here is None else here.provider


# CrypTen looks these up by name at every use, so that each thread finds what is its own.
crypten_communicator.get = _get_communicator
crypten.mpc.get_default_provider = _get_provider
setattr(crypten, "generators", _Generators(crypten.generators))  # noqa: B010 - of another module


@contextmanager
def make_current(what: Found) -> Iterator[None]:
    """Let CrypTen find these in this thread, until the block ends."""
    token = _current.set(what)
    try:
        yield
    finally:
        _current.reset(token)


def _refuse(what: str) -> NoReturn:
    raise ProtocolError(f"CrypTen asked for {what}, which this transport does not offer")
