"""CrypTen's import, its state for the party of the current thread, and its sum to the primary.

CrypTen gets its communicator, its provider of tuples and its generators from module-level
functions. These are replaced to return those of the party that the current thread computes for
(:class:`Found`), or else CrypTen's own. ``crypten.init`` is not called, and ``torch.distributed``
is not used. :mod:`securevfl.mpc.on_shares` has a communicator for whole programs; the sum of every
round needs less (:class:`CrypTenSumTo`).
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
from securevfl.mpc.codec import Words, WordWire
from securevfl.mpc.masks import PairwiseMasks

_UNUSED: Final = (
    *("onnx", "tensorboard", "tensorboard.compat", "tensorboard.compat.proto"),
    *(
        f"tensorboard.compat.proto.{name}_pb2"
        for name in ("attr_value", "graph", "node_def", "versions")
    ),
    "torch.utils.tensorboard",
)
"""What CrypTen imports for its converters and plots, neither of which is called here."""
# CrypTen 0.4.1 imports a module that torch 2.9 has moved, for an ONNX importer that is not used
# here.
_OLD_HOME: Final = "torch.onnx._internal.registration"
_NEW_HOME: Final = "torch.onnx._internal.torchscript_exporter.registration"


class _Unused(ModuleType):
    """Stand-in for a module that CrypTen imports names from and this package does not call."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


@contextmanager
def _without_unused() -> Iterator[None]:
    """Stand in for the packages of :data:`_UNUSED` that are not installed, during an import."""
    absent = {name for name in ("onnx", "tensorboard") if importlib.util.find_spec(name) is None}
    names = [name for name in _UNUSED if absent & set(name.split("."))]
    sys.modules.update({name: _Unused(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def import_crypten() -> ModuleType:
    """Import CrypTen and return it.

    Raises:
        ConfigError: If CrypTen or one of its dependencies is not installed.
    """
    try:
        if _OLD_HOME not in sys.modules and importlib.util.find_spec(_OLD_HOME) is None:
            sys.modules[_OLD_HOME] = importlib.import_module(_NEW_HOME)
        with _without_unused(), warnings.catch_warnings():
            # CrypTen's sources hold invalid escapes, which Python reports when it compiles them.
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
    """Decode words; replaces CrypTen's decoder.

    CrypTen's is wrong by 1 for numbers just above a negative integer: -7.99998 becomes -8.99998.
    """
    if words is None or encoder.scale == 1:
        return words
    return (words.double() / encoder.scale).float()


FixedPointEncoder.decode = _decode_words


class StarCommunicator(Communicator):  # type: ignore[misc]
    """CrypTen communicator with one collective: a sum that the primary alone receives.

    CrypTen's own reduce over gloo leaves a part of the plaintext in every party's buffer, and its
    object collectives use pickle; both are missing here.
    """

    def __init__(
        self, wire: WordWire, *, rank: int, round_number: int, active: Sequence[int]
    ) -> None:
        self._wire = wire
        self._rank = rank
        self._round_number = round_number
        self._active = tuple(active)

    def _refuse_collective(self, *_positional: object, **_named: object) -> NoReturn:
        """Refuse a collective that would reveal data to parties other than the primary."""
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
        """Sum all parties' tensors at the primary, in place of its own tensor.

        CrypTen's reveal of a batch passes shares without copying them, so this is called with a
        batch of one.

        Raises:
            ProtocolError: For another destination, operation, mode or number of tensors.

        Reveals:
            To the primary: each party's tensor, which is uniformly random by its mask, except for
            the sum. To any other party: nothing.
        """
        if dst != PRIMARY_RANK or op is not None or async_op or not batched or len(tensors) != 1:
            _refuse(f"reduce(dst={dst}, op={op}, async_op={async_op}, batched={batched})")
        (share,) = tensors
        self._wire.carry(self._round_number, share, self._active)
        return [share] if self._rank == PRIMARY_RANK else None


class CrypTenSumTo:
    """The sum between processes: masks turn words into shares, and CrypTen reveals the sum."""

    def __init__(self, wire: WordWire, masks: PairwiseMasks | None) -> None:
        """Create one party's end of the sum.

        Args:
            wire: Transport of the words.
            masks: A secondary's masks; None at the primary, which does not mask.

        Raises:
            ProtocolError: If a secondary has no masks, or the primary some.
        """
        if wire.masked != (masks is not None):
            raise ProtocolError("a secondary sends words under masks alone, the primary masks none")
        self._wire = wire
        self._masks = masks

    def __call__(self, words: Words, *, round_number: int, active: Sequence[int]) -> Words | None:
        """Contribute ``words``; see :class:`securevfl.mpc.codec.SumTo`.

        Nothing is copied: a secondary's share is sent from its memory, and the primary's words
        become the sum.

        Raises:
            ProtocolError: If the round's mask was used before, or a peer fails.

        Reveals:
            To the primary: the total over it and ``active``. With one active secondary these are
            its words, protected only by their noise. To any other party: nothing.
        """
        rank = PRIMARY_RANK
        if self._masks is not None:
            rank = self._masks.rank
            self._masks.apply(words, round_number=round_number, active=active)
        communicator = StarCommunicator(
            self._wire, rank=rank, round_number=round_number, active=active
        )
        with make_current(Found(communicator)):
            # Precision 0: words are ring elements already, without CrypTen's encoding.
            shared = ArithmeticSharedTensor.from_shares(words, precision=0)
            sums = ArithmeticSharedTensor.reveal_batch([shared], dst=PRIMARY_RANK)
        if sums is None:
            return None
        (total,) = sums
        if (total.dtype, total.shape) != (torch.int64, words.shape):
            raise ProtocolError(f"the sum came back as {total.dtype} of shape {list(total.shape)}")
        return cast(Tensor, total)

    def bind(self, message_digest: bytes, ranks: Sequence[int]) -> None:
        """Bind a message of the primary; see :class:`securevfl.mpc.codec.SumTo`.

        Reveals:
            Nothing.
        """
        if self._masks is not None:
            self._masks.bind(message_digest, ranks)

    def prepare(self, count: int, *, round_number: int, active: Sequence[int]) -> None:
        """Start computing this round's mask in the background.

        Raises:
            ProtocolError: If the round's mask was used before.

        Reveals:
            Nothing.
        """
        if self._masks is not None:
            self._masks.prepare(round_number, count, active)


@dataclass(frozen=True, eq=False)
class Found:
    """CrypTen's state while one party computes."""

    communicator: Any
    """Carries tensors to the other parties."""
    provider: Any = None
    """Deals the randomness of multiplications and conversions; None: there are none."""
    generators: Mapping[str, Mapping[torch.device, torch.Generator]] = field(default_factory=dict)
    """Generators of CrypTen's sharings of zero, by name and device."""


_current: ContextVar[Found] = ContextVar("securevfl_crypten")
_original_get = crypten_communicator.get
_original_provider = crypten.mpc.get_default_provider


class _Generators(dict[str, Any]):
    """CrypTen's generators: those of the party that this thread computes for, if any."""

    def __getitem__(self, name: str) -> Any:
        here = _current.get(None)
        return super().__getitem__(name) if here is None else here.generators[name]


def _get_communicator() -> Any:
    here = _current.get(None)
    return _original_get() if here is None else here.communicator


def _get_provider() -> Any:
    here = _current.get(None)
    return _original_provider() if here is None else here.provider


# CrypTen looks these up by name at every use, so each thread gets its own.
crypten_communicator.get = _get_communicator
crypten.mpc.get_default_provider = _get_provider
setattr(crypten, "generators", _Generators(crypten.generators))  # noqa: B010 - of another module


@contextmanager
def make_current(what: Found) -> Iterator[None]:
    """Set CrypTen's state for this thread in the block."""
    token = _current.set(what)
    try:
        yield
    finally:
        _current.reset(token)


def _refuse(what: str) -> NoReturn:
    raise ProtocolError(f"CrypTen asked for {what}, which this transport does not offer")
