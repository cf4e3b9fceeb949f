"""Guard before the application: token, size and time of a body; and the log of requests.

Only a request for predictions that shows the token has its body read, and only a whole body goes
on. The log has method, path, status and time. Paths that the server does not have, queries, headers
and bodies are never in it: they may hold what is nobody's business.
"""

import asyncio
from collections.abc import Callable
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
_MOST_BODIES: Final = 64
"""Bodies of the largest size for which there is memory at once."""

_INTERNAL: Final = 500


class Guard:
    """ASGI middleware; see the module."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: Token | None,
        max_bytes: int,
        figures: Figures,
        log: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """Make it.

        Args:
            app: The application.
            token: What clients must show; None lets everybody in.
            max_bytes: Of one body.
            figures: Counts the answers.
            log: Takes one line a request.
            clock: Seconds.
        """
        self._app = app
        self._token = token
        self._max_bytes = max_bytes
        self._room = _MOST_BODIES * max_bytes
        self._figures = figures
        self._log = log
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or hand it on; its body is whole, and empty but for predictions."""
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
            await self._answer(scope, path, receive, noted)
        finally:
            seconds = self._clock() - began
            self._figures.answered(path, status, seconds)
            if path not in OPEN:  # probes come every few seconds
                self._log(f"{_method(scope)} {path} {status} {1000 * seconds:.1f} ms")

    async def _answer(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        token = None if path in OPEN else self._token
        if token is not None and not token.fits(headers.get(b"authorization")):
            refusal = refused(401, "unauthorized", _HOW, {"WWW-Authenticate": "Bearer"})
            await refusal(scope, receive, send)
            return
        if path != PREDICT or scope["method"] != "POST":
            await self._app(scope, _replayed([b""], receive), send)
            return
        said = headers.get(b"content-length", b"")
        size = int(said) if said.isdigit() else self._max_bytes
        if size > self._max_bytes:
            await self._too_large()(scope, receive, send)
            return
        if size > self._room:
            refusal = refused(429, "too_many_requests", _FULL, {"Retry-After": "1"})
            await refusal(scope, receive, send)
            return
        self._room -= size
        try:
            taken = await self._body(receive)
            if isinstance(taken, JSONResponse):
                await taken(scope, receive, send)
            else:
                await self._app(scope, _replayed(taken, receive), send)
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
                        return refused(400, "cut_off", CUT_OFF)
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > self._max_bytes:
                        return self._too_large()
                    more = message.get("more_body", False)
        except TimeoutError:
            return refused(408, "too_slow", f"the body took longer than {_BODY_S:g} s")
        return pieces

    def _too_large(self) -> JSONResponse:
        return refused(413, "too_large", f"the body may have {self._max_bytes:,} bytes")


CUT_OFF: Final = "the client left before its request was whole or its turn had come"


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
_FULL: Final = "too many bodies are being read"


def _method(scope: Scope) -> str:
    method = str(scope["method"])
    return method if method in ("GET", "POST", "HEAD") else "(other)"


def _replayed(pieces: list[bytes], receive: Receive) -> Receive:
    """Return a ``receive`` that gives a body away, and keeps nothing of it."""
    pieces.reverse()

    async def again() -> Message:
        if pieces:
            piece = pieces.pop()
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
        return await receive()

    return again
