"""Guard in front of the HTTP application: token, rate, size and time of a body, and log.

Only a request for predictions that shows the token has its body read, and only a whole body goes
on. The log has method, path, status and time. Paths that the server does not have, queries, headers
and bodies are never in it: they may hold private data.
"""

import asyncio
import hashlib
import hmac
import math
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from securevfl.core import files
from securevfl.core.errors import ConfigError

VARIABLE: Final = "SECUREVFL_TOKEN"
FILE: Final = "serve.token"

_FEWEST: Final = 16
_FRESH_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Token:
    """Digest of a token, which itself is not kept."""

    digest: bytes
    source: str
    """Source of the token, for the operator."""

    def fits(self, authorization: bytes | None) -> bool:
        """Return whether a header has the token, in constant time.

        Args:
            authorization: The value of ``Authorization``; None without one.
        """
        scheme, _, shown = (authorization or b"").partition(b" ")
        same = hmac.compare_digest(_digest(shown.strip()), self.digest)
        return same and scheme.lower() == b"bearer"


def token_of(path: Path | None, *, folder: Path) -> Token:
    """Return the token that clients must send.

    Args:
        path: Its file; None takes the variable ``SECUREVFL_TOKEN`` and, without it, the file
            ``serve.token`` in ``folder``, which is made if it is not there.
        folder: Folder of the run.

    Raises:
        ConfigError: If the file cannot be read, others can read it, or the token is too short.
        StorageError: If a new one cannot be written.
    """
    if path is None and os.environ.get(VARIABLE):
        return _check_token(os.environ[VARIABLE].strip(), source=f"the variable {VARIABLE}")
    place = folder / FILE if path is None else path
    if path is None and not place.exists():
        fresh = secrets.token_urlsafe(_FRESH_BYTES)
        files.write_text(place, f"{fresh}\n")
        return _check_token(fresh, source=f"{place} (made now)")
    try:
        mode, text = place.stat().st_mode, files.read_text(place)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {place}: cannot be read ({error})") from None
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"--token-file {place}: others can read it; run chmod 600 {place}")
    return _check_token(text.strip(), source=str(place))


def _check_token(text: str, *, source: str) -> Token:
    if len(text) < _FEWEST or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(
            f"token of {source}: must be at least {_FEWEST} printable ASCII characters without "
            f"spaces; 'openssl rand -hex 32' makes one"
        )
    return Token(_digest(text.encode()), source)


def _digest(shown: bytes) -> bytes:
    # Digests are equally long, whatever was shown.
    return hashlib.sha256(shown).digest()


class Rate:
    """Limit on predicted rows a second, over all clients.

    As many rows as a second allows, and always one, may come at once. A larger request is refused
    for good: it would keep all other clients waiting for as long as its rows last.
    """

    def __init__(self, per_s: float | None, clock: Callable[[], float]) -> None:
        """Create a full bucket of rows.

        Args:
            per_s: Rows a second; None for no limit.
            clock: Clock in seconds.
        """
        self._per_s = math.inf if per_s is None else per_s
        self._clock = clock
        self._most = max(1.0, self._per_s)
        self._allowed = self._most
        self._filled = clock()

    def most_rows(self, limit: int) -> int:
        """Return the most rows of one request.

        Args:
            limit: Most rows without a rate limit.
        """
        return limit if self._most >= limit else int(self._most)

    def wait_s(self, rows: int) -> float:
        """Return the seconds that rows must wait; count them if it is 0.

        Args:
            rows: Rows of one request, at most :meth:`most_rows`.
        """
        if math.isinf(self._per_s):
            return 0.0
        now = self._clock()
        earned = (now - self._filled) * self._per_s
        self._allowed, self._filled = min(self._most, self._allowed + earned), now
        if self._allowed < rows:
            return (rows - self._allowed) / self._per_s
        self._allowed -= rows
        return 0.0


PREDICT: Final = "/predict"
OPEN: Final = frozenset({"/health", "/ready"})
"""Paths that need no token; they only tell whether the server runs."""
PATHS: Final = OPEN | {PREDICT, "/budget", "/schema", "/openapi.json"}

_BODY_S: Final = 30.0
_MOST_BODIES: Final = 64
"""Most bodies of the largest size in memory at once."""

_INTERNAL: Final = 500


class Guard:
    """ASGI middleware; see the module."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: Token,
        max_bytes: int,
        log: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """Create the guard.

        Args:
            app: The application.
            token: Token that clients must send.
            max_bytes: Most bytes of one body.
            log: Callback for a line for each request.
            clock: Clock in seconds.
        """
        self._app = app
        self._token = token
        self._max_bytes = max_bytes
        self._room = _MOST_BODIES * max_bytes
        self._log = log
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on; only a request for predictions has a body then."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, path = self._clock(), scope["path"] if scope["path"] in PATHS else "(other)"
        status = _INTERNAL

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, path, receive, send_noted)
        finally:
            if path not in OPEN:  # probes come every few seconds
                took_ms = 1000 * (self._clock() - began)
                self._log(f"{_method(scope)} {path} {status} {took_ms:.1f} ms")

    async def _answer(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if {b"content-length", b"transfer-encoding"} <= set(headers):
            # A proxy that goes by the other one would see another request behind this one.
            refusal = error_response(400, "bad_request", _TWO_LENGTHS, {"Connection": "close"})
            await refusal(scope, receive, send)
            return
        if path not in OPEN and not self._token.fits(headers.get(b"authorization")):
            refusal = error_response(401, "unauthorized", _HOW, {"WWW-Authenticate": "Bearer"})
            await refusal(scope, receive, send)
            return
        if path != PREDICT or scope["method"] != "POST":
            await self._app(scope, _replay_body([b""], receive), send)
            return
        length = headers.get(b"content-length", b"")
        size = int(length) if length.isdigit() else self._max_bytes
        if size > self._max_bytes:
            await self._too_large()(scope, receive, send)
            return
        if size > self._room:
            refusal = error_response(429, "too_many_requests", _FULL, {"Retry-After": "1"})
            await refusal(scope, receive, send)
            return
        self._room -= size
        try:
            taken = await self._body(receive)
            if isinstance(taken, JSONResponse):
                await taken(scope, receive, send)
            else:
                await self._app(scope, _replay_body(taken, receive), send)
        finally:
            self._room += size

    async def _body(self, receive: Receive) -> list[bytes] | JSONResponse:
        """Return the pieces of a whole body, or why it is refused."""
        pieces, size, more = [], 0, True
        try:
            async with asyncio.timeout(_BODY_S):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return error_response(400, "cut_off", CUT_OFF)
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > self._max_bytes:
                        return self._too_large()
                    more = message.get("more_body", False)
        except TimeoutError:
            return error_response(408, "too_slow", f"the body took longer than {_BODY_S:g} s")
        return pieces

    def _too_large(self) -> JSONResponse:
        return error_response(413, "too_large", f"the body may have {self._max_bytes:,} bytes")


CUT_OFF: Final = "the client left before its request was whole or its turn had come"


def error_response(
    status: int, error: str, *details: str | dict[str, str], **more: Any
) -> JSONResponse:
    """Return an error response with a word in ``error`` and lines in ``details``.

    Args:
        status: HTTP status.
        error: The word.
        details: The lines; a mapping among them holds headers.
        more: Further fields.
    """
    lines = [detail for detail in details if isinstance(detail, str)]
    headers = {
        name: value
        for detail in details
        if isinstance(detail, dict)
        for name, value in detail.items()
    }
    return JSONResponse({"error": error, "details": lines, **more}, status, headers)


_TWO_LENGTHS: Final = "send either Content-Length or Transfer-Encoding, not both"
_HOW: Final = 'send the header "Authorization: Bearer TOKEN"'
_FULL: Final = "too many bodies are being read"


def _method(scope: Scope) -> str:
    method = str(scope["method"])
    return method if method in ("GET", "POST", "HEAD") else "(other)"


def _replay_body(pieces: list[bytes], receive: Receive) -> Receive:
    """Return a ``receive`` that gives a body away, and keeps nothing of it."""
    pieces.reverse()

    async def again() -> Message:
        if pieces:
            piece = pieces.pop()
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
        return await receive()

    return again
