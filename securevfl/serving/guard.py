"""What every HTTP request passes before anything of it is read: token, rate, size; and its log.

The log has method, path, status and time. Paths that the server does not have, queries, headers
and bodies are never in it: they may hold what is nobody's business.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from securevfl.serving.figures import Figures
from securevfl.serving.token import Token

PREDICT: Final = "/predict"
OPEN: Final = frozenset({"/health", "/ready"})
"""Paths that need no token; they say whether the server lives, and nothing else."""
PATHS: Final = OPEN | {PREDICT, "/budget", "/metrics", "/schema", "/openapi.json"}

_BODY_S: Final = 30.0
_INTERNAL: Final = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one server takes in."""

    max_bytes: int
    """Of one body."""
    rate: float | None
    """Predictions a second, over all clients; None for no limit."""


class Guard:
    """ASGI middleware; see the module."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: Token | None,
        limits: Limits,
        figures: Figures,
        log: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._app = app
        self._token = token
        self._limits = limits
        self._figures = figures
        self._log = log
        self._clock = clock
        # As many as a second allows may come at once.
        self._most = max(1.0, limits.rate or 0.0)
        self._allowed = self._most
        self._filled = clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or hand it on with its whole body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, path = self._clock(), scope["path"] if scope["path"] in PATHS else "(other)"
        status = _INTERNAL

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            refusal, body = await self._taken_in(scope, path, receive)
            if refusal is None:
                await self._app(scope, _replayed(body, receive), noted)
            else:
                await refusal(scope, receive, noted)
        finally:
            seconds = self._clock() - began
            self._figures.answered(path, status, seconds)
            if path not in OPEN:  # probes come every few seconds
                self._log(f"{_method(scope)} {path} {status} {1000 * seconds:.1f} ms")

    async def _taken_in(
        self, scope: Scope, path: str, receive: Receive
    ) -> tuple[JSONResponse | None, bytes]:
        headers = dict(scope["headers"])
        token = None if path in OPEN else self._token
        if token is not None and not token.fits(headers.get(b"authorization")):
            return refused(401, "unauthorized", _HOW, {"WWW-Authenticate": "Bearer"}), b""
        if path == PREDICT:
            wait_s = self._wait_s()
            if wait_s > 0:
                later = {"Retry-After": str(math.ceil(wait_s))}
                return refused(429, "too_many_requests", _TOO_FAST, later), b""
        too_large = refused(413, "too_large", f"the body may have {self._limits.max_bytes:,} bytes")
        said = headers.get(b"content-length", b"0")
        if said.isdigit() and int(said) > self._limits.max_bytes:
            return too_large, b""
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    body += message.get("body", b"")
                    if len(body) > self._limits.max_bytes:
                        return too_large, b""
                    more = message.get("more_body", False)
        except TimeoutError:
            return refused(408, "too_slow", f"the body took longer than {_BODY_S:g} s"), b""
        return None, bytes(body)

    def _wait_s(self) -> float:
        """Return how long a prediction must wait for its turn, and count it if it need not."""
        if self._limits.rate is None:
            return 0.0
        now = self._clock()
        earned = (now - self._filled) * self._limits.rate
        self._allowed, self._filled = min(self._most, self._allowed + earned), now
        if self._allowed < 1:
            return (1 - self._allowed) / self._limits.rate
        self._allowed -= 1
        return 0.0


def refused(status: int, error: str, *details: str | dict[str, str], **more: Any) -> JSONResponse:
    """Return an answer that says what is wrong: ``error``, a word, and ``details``, one a line.

    Args:
        status: Of HTTP.
        error: The word.
        details: The lines; a mapping among them holds headers.
        more: Further fields.
    """
    lines = [one for one in details if isinstance(one, str)]
    headers = {
        name: value for one in details if isinstance(one, dict) for name, value in one.items()
    }
    return JSONResponse({"error": error, "details": lines, **more}, status, headers)


_HOW: Final = 'send the header "Authorization: Bearer TOKEN"'
_TOO_FAST: Final = "more predictions a second than this server takes"


def _method(scope: Scope) -> str:
    method = str(scope["method"])
    return method if method in ("GET", "POST", "HEAD") else "(other)"


def _replayed(body: bytes, receive: Receive) -> Receive:
    left = [body]

    async def again() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return again
