"""The oblivious pseudorandom function of [RFC9497], on ristretto255 with SHA-512.

Values are cut to 16 bytes. ``rbcl`` (libsodium) computes, refuses what is no point, and is imported
nowhere else.
"""

import hashlib
import itertools
import secrets
from collections.abc import Sequence
from typing import Any, Final

from securevfl.core.errors import ProtocolError, of_an_extra
from securevfl.linkage.cores import parts_of

_TO_GROUP: Final = b"HashToGroup-OPRFV1-\0-ristretto255-SHA512" + bytes([40])
"""[RFC9497]'s tag of HashToGroup in mode OPRF, and its length."""

POINT_BYTES: Final = 32
"""Bytes of a point, of a scalar."""

VALUE_BYTES: Final = 16
"""Bytes of the function's value."""


def point_of(message: bytes) -> bytes:
    """Return H1 of an input: HashToGroup, by expand_message_xmd with SHA-512."""
    first = hashlib.sha512(bytes(128) + message + b"\0\x40\0" + _TO_GROUP).digest()
    wide = hashlib.sha512(first + b"\1" + _TO_GROUP).digest()
    return bytes(_rbcl().crypto_core_ristretto255_from_hash(wide))


def output_of(message: bytes, point: bytes) -> bytes:
    """Return the 64 bytes of Finalize, of an input and its point times the key."""
    parts = (len(text).to_bytes(2, "big") + text for text in (message, point))
    return hashlib.sha512(b"".join(parts) + b"Finalize").digest()


def multiply_points(scalars: Sequence[bytes], points: Sequence[bytes]) -> list[bytes]:
    """Return each point times its scalar.

    Raises:
        ProtocolError: If one is no point of the group, or its neutral element, which would be the
            same under every scalar.
    """
    multiply = _rbcl().crypto_scalarmult_ristretto255
    try:
        return [multiply(*pair) for pair in zip(scalars, points, strict=True)]
    except RuntimeError:
        raise ProtocolError("received what is no point of the group") from None


def invert_scalars(scalars: Sequence[bytes]) -> list[bytes]:
    """Return the inverse of each scalar, by one inversion for all (Montgomery's trick)."""
    library = _rbcl()
    times = library.crypto_core_ristretto255_scalar_mul
    products = list(itertools.accumulate(scalars, times))
    last, inverses = library.crypto_core_ristretto255_scalar_invert(products[-1]), list[bytes]()
    for before, scalar in zip(products[-2::-1], scalars[:0:-1], strict=True):
        inverses.append(times(last, before))
        last = times(last, scalar)
    return [*reversed([*inverses, last])]


def _inputs(context: bytes, texts: Sequence[str | None]) -> list[bytes]:
    """Return the input of each key; a missing one is random, and has no other's value."""
    return [
        secrets.token_bytes(64)
        if text is None
        # A lone surrogate is no UTF-8, but may stand in a text that Python read.
        else hashlib.sha512(context + text.encode(errors="surrogatepass")).digest()
        for text in texts
    ]


def evaluate(task: tuple[bytes, bytes, Sequence[str | None]]) -> bytes:
    """Return the function's values at keys, as its key's holder: 16 bytes each."""
    key, context, texts = task
    inputs = _inputs(context, texts)
    points = multiply_points([key] * len(inputs), [point_of(text) for text in inputs])
    return _values(inputs, points)


def blind(task: tuple[bytes, Sequence[str | None]]) -> tuple[bytes, bytes]:
    """Return the points of keys under fresh blinds, and the inverses of these: 32 bytes each."""
    context, texts = task
    blinds = [fresh_scalar() for _ in texts]
    points = multiply_points(blinds, [point_of(text) for text in _inputs(context, texts)])
    return b"".join(points), b"".join(invert_scalars(blinds))


def evaluate_blinded(task: tuple[bytes, bytes]) -> bytes:
    """Return points times the key."""
    key, points = task
    given = parts_of(points, POINT_BYTES)
    return b"".join(multiply_points([key] * len(given), given))


def unblind(task: tuple[bytes, Sequence[str | None], bytes, bytes]) -> bytes:
    """Return the function's values at keys, of evaluated points and the blinds' inverses."""
    context, texts, inverses, points = task
    # Padding too: what a lying primary returns for it is refused like all else.
    unblinded = multiply_points(parts_of(inverses, POINT_BYTES), parts_of(points, POINT_BYTES))
    return _values(_inputs(context, texts), unblinded)


def _values(inputs: Sequence[bytes], points: Sequence[bytes]) -> bytes:
    pairs = zip(inputs, points, strict=True)
    return b"".join(output_of(message, point)[:VALUE_BYTES] for message, point in pairs)


def _rbcl() -> Any:
    """Return libsodium's functions of the group.

    Raises:
        ConfigError: If rbcl is not installed.
    """
    return of_an_extra("rbcl", use='linkage.protection = "psi"')


def fresh_scalar() -> bytes:
    """Return a random scalar of the group, 32 bytes."""
    return bytes(_rbcl().crypto_core_ristretto255_scalar_random())
