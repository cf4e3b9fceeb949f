"""Multiplication triples and similar tuples for CrypTen, from a dealer that colludes with no party.

CrypTen multiplies shared numbers with the help of random numbers that no party knows, shared
beforehand: triples ``c = a b``, squares ``s = r r``, the same on bits, and a random bit in two
kinds of shares. The dealer gives each member a seed. A member's shares are AES-256 key streams from
its seed, except that the dealer sends the first member's share of the dependent number: the
*correction*, which makes the shares add up. No generator of torch is used.

A stream's key is HMAC-SHA256 of the seed and of the whole request: the computation, its members,
and the request's number, kind, operation and sizes. Members whose requests differ get numbers that
do not match, and compute noise. Numbers rise: the dealer refuses a second correction under one
number, and a member uses no number twice.
"""

import hmac
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add, xor
from typing import Any, Final, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from securevfl.core.errors import ConfigError, ProtocolError
from securevfl.core.settings import read_settings
from securevfl.mpc.crypten_bridge import TupleProvider, crypten
from securevfl.mpc.dealt_sums import MOST_WORDS, SEED_BYTES, uniform

Kind = Literal["triple", "square", "and", "wraps", "bit"]
"""``triple`` and ``and``: a product of two. ``wraps``: how often shares of one number pass the
ring's end. ``bit``: one random bit, of which both kinds of shares exist."""

_LABEL: Final = b"securevfl/mpc/tuples/v1"
_OPERATIONS: Final = ("mul", "matmul", "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d")
_OPTIONS: Final = ("stride", "padding", "dilation", "groups", "output_padding")


@dataclass(frozen=True, kw_only=True, slots=True)
class TupleRequest:
    """A request for one tuple of dependent random numbers."""

    number: int
    """Rises from request to request."""
    kind: Kind
    sizes: tuple[tuple[int, ...], ...]
    """Shapes of the independent numbers."""
    operation: str = ""
    """Torch function that computes a triple's product."""
    options: str = "{}"
    """The function's keyword arguments, as JSON."""

    def __post_init__(self) -> None:
        pairs = self.kind in ("triple", "and")
        try:
            named = json.loads(self.options)
        except (ValueError, RecursionError):
            named = None
        fits = (
            len(self.sizes) == 1 + pairs
            and (self.operation in _OPERATIONS) == (self.kind == "triple")
            and isinstance(named, dict)
            and set(named) <= set(_OPTIONS)
            and all(length >= 0 for size in self.sizes for length in size)
            and sum(math.prod(size) for size in self.sizes) <= MOST_WORDS
        )
        if not fits or self.number < 0:
            raise ProtocolError(f"a dealer's randomness was asked for in an impossible way: {self}")

    @classmethod
    def from_json(cls, content: Any) -> "TupleRequest":
        """Return a request from its JSON value.

        Raises:
            ProtocolError: If it is not a valid request.
        """
        try:
            return read_settings(cls, content, where="request")
        except (ConfigError, TypeError, ValueError):
            raise ProtocolError(f"no request of a dealer's randomness: {content!r:.80}") from None

    @property
    def on_bits(self) -> bool:
        """Whether shares of the independent numbers are binary (XOR), not additive."""
        return self.kind in ("and", "bit")

    @property
    def depends_on_bits(self) -> bool:
        """Whether shares of the dependent number are binary (XOR), not additive."""
        return self.kind == "and"

    def product(self, first: Tensor, other: Tensor) -> Tensor:
        """Return the product of a triple's two numbers."""
        product: Tensor = getattr(torch, self.operation)(first, other, **json.loads(self.options))
        return product

    @property
    def dependent_size(self) -> tuple[int, ...]:
        """Shape of the number that depends on the others."""
        if self.kind == "and":
            return tuple(torch.broadcast_shapes(*self.sizes))
        if self.kind != "triple":
            return self.sizes[0]
        # The device "meta" computes shapes only.
        first, other = (torch.empty(size, device="meta") for size in self.sizes)
        try:
            size = tuple(self.product(first, other).shape)
        except (RuntimeError, TypeError) as error:
            raise ProtocolError(f"no triple is like {self}: {error}") from None
        if math.prod(size) > MOST_WORDS:
            raise ProtocolError(f"a dealer's randomness was asked for of {size}, which is too much")
        return size


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SeedOfMember:
    """One member's seed, from which its shares are computed."""

    seed: bytes
    context: bytes
    """Context of the computation: session, run and program, the same at all members."""

    def independent(self, request: TupleRequest, world: Sequence[int]) -> list[Tensor]:
        """Return this member's shares of the independent numbers."""
        key = self._key(request, world)
        shares = [_words(key, part, size) for part, size in enumerate(request.sizes)]
        return [share & 1 for share in shares] if request.kind == "bit" else shares

    def dependent(self, request: TupleRequest, world: Sequence[int]) -> Tensor:
        """Return this member's share of the dependent number, unless it is the first member."""
        return _words(self._key(request, world), len(request.sizes), request.dependent_size)

    def _key(self, request: TupleRequest, world: Sequence[int]) -> bytes:
        agreed = json.dumps([self.context.hex(), list(world), asdict(request)], sort_keys=True)
        return hmac.digest(self.seed, _LABEL + agreed.encode(), "sha256")


def _words(key: bytes, part: int, size: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(uniform(key, part, size).view(np.int64))


class TupleDealer:
    """The dealer's part: draws seeds for members and corrections for the first member."""

    def __init__(self, ranks: Sequence[int], context: bytes) -> None:
        """Create a dealer.

        Args:
            ranks: Ranks of all parties that may compute.
            context: Context of the computation.
        """
        self._ranks, self._context = frozenset(ranks), context
        self._world: tuple[int, ...] = ()
        self._seeds: dict[int, bytes] = {}
        self._begun = self._last = -1

    def begin(self, world: Sequence[int], number: int) -> dict[int, bytes]:
        """Return a fresh seed for each member of the next computation, by rank.

        Args:
            world: The members' ranks, ascending.
            number: Number of the computation, higher than any before.

        Raises:
            ProtocolError: If the number was used before, or a rank may not compute.

        Reveals:
            To each rank: its own seed only.
        """
        if not world or sorted(self._ranks & set(world)) != list(world):
            raise ProtocolError(f"randomness was asked for parties {list(world)!r:.80}")
        if number <= self._begun:
            raise ProtocolError(
                f"randomness of {number} was dealt before (the last is {self._begun}); used twice "
                f"it would hide nothing"
            )
        self._begun, self._world = number, tuple(world)
        self._seeds = {rank: os.urandom(SEED_BYTES) for rank in world}
        return self._seeds

    def corrections(self, requests: Sequence[TupleRequest]) -> Int64[np.ndarray, " words"]:
        """Return the first member's shares of the dependent numbers, concatenated.

        Args:
            requests: The members' requests, ascending by number.

        Raises:
            ProtocolError: If a number was dealt before, or no computation has begun.

        Reveals:
            To the first member: uniform numbers. The dealer learns sizes only.
        """
        if not self._world or not requests:
            raise ProtocolError("randomness was asked for before it was begun")
        corrections = []
        for request in requests:
            if request.number <= self._last:
                raise ProtocolError(
                    f"randomness {request.number} was dealt before (the last is {self._last}); "
                    f"used twice it would hide nothing"
                )
            self._last = request.number
            corrections.append(self._correction(self._world, request))
        return torch.cat([correction.reshape(-1) for correction in corrections]).numpy()

    def _correction(self, world: Sequence[int], request: TupleRequest) -> Tensor:
        size = request.dependent_size
        members = [SeedOfMember(seed=self._seeds[rank], context=self._context) for rank in world]
        shares = [member.independent(request, world) for member in members]
        others = [member.dependent(request, world) for member in members[1:]]
        value = _dependent_value(request, shares)
        if request.depends_on_bits:
            return reduce(xor, others, value)
        assert value.shape == size, "what the members make room for"
        return value - sum(others, torch.zeros_like(value))


def _dependent_value(request: TupleRequest, shares: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the dependent number in plaintext, from all shares of the independent numbers."""
    if request.kind == "wraps":
        wraps: Tensor = crypten.common.util.count_wraps([share for (share,) in shares])
        return wraps
    totals = [reduce(xor if request.on_bits else add, parts) for parts in zip(*shares, strict=True)]
    if request.kind == "triple":
        return request.product(*totals)
    if request.kind == "and":
        return totals[0] & totals[1]
    return totals[0] * totals[0] if request.kind == "square" else totals[0]


@runtime_checkable
class DealerLine(Protocol):
    """A member's connection to the dealer; only the first member uses more than :meth:`seed`."""

    def begin(self, world: Sequence[int], number: int) -> None:
        """Make the dealer send a fresh seed to each member of the next computation.

        Reveals:
            To the dealer: the members.
        """
        ...

    def seed(self) -> bytes:
        """Return this member's seed, which the dealer sends at the beginning.

        Raises:
            ProtocolError: If it is for another computation.
        """
        ...

    def ask(self, requests: Sequence[TupleRequest]) -> None:
        """Request corrections, for :meth:`take` to return later.

        Reveals:
            To the dealer: sizes.
        """
        ...

    def take(self, number: int, count: int) -> Int64[np.ndarray, " count"]:
        """Return the corrections of the requests that begin with ``number``.

        Raises:
            ProtocolError: If other corrections arrive, or of another size.
        """
        ...


class DealtTuples(TupleProvider):  # type: ignore[misc]
    """CrypTen's provider of tuples from the dealer's seed and corrections."""

    NAME = "dealt"

    def __init__(
        self,
        member: SeedOfMember,
        *,
        world: Sequence[int],
        line: DealerLine | None,
        first_number: int = 0,
    ) -> None:
        """Create a member's provider.

        Args:
            member: This party's seed.
            world: Ranks of all members, ascending.
            line: Connection to the dealer at the first member; None elsewhere.
            first_number: Number of the first request.
        """
        super().__init__()
        self._member, self._world, self._line = member, tuple(world), line
        self._next = first_number

    def generate_additive_triple(
        self,
        size0: torch.Size,
        size1: torch.Size,
        op: str,
        device: Any = None,  # noqa: ARG002 - CrypTen's
        **options: Any,
    ) -> tuple[Any, ...]:
        """Return shares of a, b and their product."""
        text = json.dumps(options, sort_keys=True)
        return self._dealt("triple", (size0, size1), operation=op, options=text)

    def square(self, size: torch.Size, device: Any = None) -> tuple[Any, ...]:  # noqa: ARG002
        """Return shares of r and its square."""
        return self._dealt("square", (size,))

    def generate_binary_triple(
        self,
        size0: torch.Size,
        size1: torch.Size,
        device: Any = None,  # noqa: ARG002
    ) -> tuple[Any, ...]:
        """Return shares of the bits a, b and a & b."""
        return self._dealt("and", (size0, size1))

    def wrap_rng(self, size: torch.Size, device: Any = None) -> tuple[Any, ...]:  # noqa: ARG002
        """Return shares of r, and of the number of times that their sum wraps around the ring."""
        return self._dealt("wraps", (size,))

    def B2A_rng(self, size: torch.Size, device: Any = None) -> tuple[Any, ...]:  # noqa: ARG002, N802
        """Return additive and binary shares of a random bit."""
        bits, sums = self._dealt("bit", (size,))
        return sums, bits

    def _dealt(
        self, kind: Kind, sizes: Sequence[torch.Size], *, operation: str = "", options: str = "{}"
    ) -> tuple[Any, ...]:
        request = TupleRequest(
            number=self._next,
            kind=kind,
            sizes=tuple(tuple(size) for size in sizes),
            operation=operation,
            options=options,
        )
        self._next += 1
        independent = self._member.independent(request, self._world)
        if self._line is None:
            dependent = self._member.dependent(request, self._world)
        else:
            self._line.ask([request])
            size = request.dependent_size
            words = self._line.take(request.number, math.prod(size))
            dependent = torch.from_numpy(words).view(size)
        shared = [_shared_tensor(share, on_bits=request.on_bits) for share in independent]
        return (*shared, _shared_tensor(dependent, on_bits=request.depends_on_bits))


def _shared_tensor(share: Tensor, *, on_bits: bool) -> Any:
    kinds = crypten.mpc.primitives
    kind = kinds.BinarySharedTensor if on_bits else kinds.ArithmeticSharedTensor
    return kind.from_shares(share, precision=0)
