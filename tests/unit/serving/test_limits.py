"""What one client can hold up: bodies, connections, rates and rows beyond what is taken."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from helpers.patience import PATIENCE_S
from helpers.shown_token import HEADERS, SHOWN, TOKEN

from securevfl.data.tables import PartyTable
from securevfl.runtime.prediction_session import NotFiniteError, require_finite_outputs
from securevfl.serving.api import MOST_LINES, BadRowsError, RowColumn, RowFormat, TooManyRowsError
from securevfl.serving.guard import Guard, Rate
from securevfl.serving.server import ConnectionLimits, server_of

FORMAT = RowFormat([RowColumn(name="x", kind="number", required=True, nullable=False, note="")])


def asked(
    path: str,
    method: str,
    messages: list[dict[str, Any]],
    **headers: str,
) -> tuple[int, list[bytes], int]:
    """Send a request through the guard; return its status, what the app got, and what was read."""
    got: list[bytes] = []
    sent: list[dict[str, Any]] = []
    read = 0

    async def app(_scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        message = await receive()
        got.append(message.get("body", b""))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 1
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    guard = Guard(
        app,
        token=TOKEN,
        max_bytes=100,
        log=lambda _line: None,
        clock=lambda: 0.0,
    )
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [
            (name.replace("_", "-").lower().encode(), v.encode())
            for name, v in (HEADERS | headers).items()
        ],
    }
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], got, read


_WHOLE = {"type": "http.request", "body": b"{}", "more_body": False}


def test_a_cut_request_is_not_handed_on() -> None:
    """Fewer bytes than were announced, then the end: nothing is predicted, nothing charged."""
    body = b'{"row": {"x": 1}}'
    cut = [{"type": "http.request", "body": body, "more_body": True}, {"type": "http.disconnect"}]
    status, got, _ = asked("/predict", "POST", cut, content_length="50")
    assert (status, got) == (400, [])
    whole = [{"type": "http.request", "body": body, "more_body": False}]
    status, got, _ = asked("/predict", "POST", whole)
    assert (status, got) == (200, [body])


def _answer(request: bytes) -> bytes:
    """Return what a guarded server answers over a socket of this machine."""

    async def app(_scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = Guard(
        app,
        token=TOKEN,
        max_bytes=100,
        log=lambda _line: None,
        clock=lambda: 0.0,
    )
    server = server_of(guard, ConnectionLimits(most=2, head_s=PATIENCE_S))
    server.config.lifespan = "off"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            place = listener.getsockname()
            with socket.create_connection(place, timeout=PATIENCE_S) as client:
                client.sendall(request)
                answer = b""
                while piece := client.recv(65536):
                    answer += piece
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
    assert not thread.is_alive()
    return answer


@pytest.mark.parametrize("path", ["/predict", "/health"])
def test_a_request_of_two_lengths_is_refused(path: str) -> None:
    """Nor is what a proxy would take for the next request answered."""
    shown = f"Authorization: Bearer {SHOWN}\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{shown}".encode()
    hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden
    answer = _answer(head + both)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    one = b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert _answer(head + one).startswith(b"HTTP/1.1 204 ")


@pytest.mark.parametrize("path", ["/health", "/ready", "/budget", "/nowhere"])
def test_no_other_body_is_read(path: str) -> None:
    """Whatever a client sends there stays unread: it is answered at once."""
    body = [{"type": "http.request", "body": b"x" * 90, "more_body": True}] * 3
    status, got, read = asked(path, "POST", body, content_length="1000000")
    assert (status, got, read) == (200, [b""], 0)


def test_a_body_that_grows_beyond_the_most_is_refused() -> None:
    """Chunks that announce no length are counted as they come."""
    pieces = [{"type": "http.request", "body": b"x" * 60, "more_body": True} for _ in range(9)]
    status, got, read = asked("/predict", "POST", pieces)
    assert (status, got, read) == (413, [], 2)


def test_the_rate_counts_rows() -> None:
    """Four requests of a thousand rows are four thousand predictions; time fills the bucket."""
    now = [0.0]
    rate = Rate(10, lambda: now[0])
    assert rate.most_rows(5000) == 10
    assert rate.wait_s(10) == 0.0
    assert rate.wait_s(4) == pytest.approx(0.4)
    now[0] = 0.4
    assert rate.wait_s(4) == 0.0
    assert rate.wait_s(1) > 0
    assert Rate(None, lambda: 0.0).wait_s(10**9) == 0.0
    assert Rate(0.1, lambda: 0.0).most_rows(5000) == 1


def test_rows_are_counted_before_they_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of half a million empty rows costs its parsing alone."""
    checked = []
    monkeypatch.setattr(RowFormat, "_check_row", lambda *one: checked.append(one))
    body = b'{"rows":[' + b",".join([b"{}"] * 500_000) + b"]}"
    with pytest.raises(TooManyRowsError, match="1000"):
        FORMAT.read(body, most_rows=1000)
    assert checked == []


def test_the_first_problems_end_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 900 rows that are all wrong as many are looked at as are listed, and hardly more."""
    looked_at = []
    check = RowFormat._check_row

    def counted(format_: RowFormat, number: int, cells: Any) -> Any:
        looked_at.append(number)
        return check(format_, number, cells)

    monkeypatch.setattr(RowFormat, "_check_row", counted)
    body = json.dumps({"rows": [{"x": "no number"}] * 900}).encode()
    with pytest.raises(BadRowsError) as caught:
        FORMAT.read(body, most_rows=1000)
    assert len(looked_at) <= MOST_LINES + 1
    assert len(caught.value.lines) == MOST_LINES + 1
    # Names that the model does not know are looked at where a feature is not there.
    row = {f"u{number}": 0 for number in range(50_000)}
    with pytest.raises(BadRowsError) as caught:
        FORMAT.read(json.dumps({"row": row}).encode(), most_rows=1000)
    assert len(caught.value.lines) == MOST_LINES + 1


def test_a_row_without_a_finite_output_is_refused_before_anybody_is_asked() -> None:
    """3e38 is a number of float32, and what the model makes of it is none."""
    table = PartyTable(
        name="own",
        key_names=("k",),
        keys=np.zeros((3, 1)),
        feature_names=("x",),
        features=np.array([[1.0], [3e38], [2.0]], dtype=np.float32),
    )

    def outputs(rows: PartyTable) -> torch.Tensor:
        return torch.from_numpy(rows.features) * 10

    with pytest.raises(NotFiniteError, match="row 2: the model has no finite prediction"):
        require_finite_outputs(table, table.features, outputs)
    require_finite_outputs(table.take(np.array([0, 2])), table.features[[0, 2]], outputs)


def test_connections_that_say_nothing_are_closed_and_too_many_make_room() -> None:
    """The longest silent one gives way at once; the others when their time is over."""

    async def app(_scope: Any, _receive: Any, send: Callable[[Any], Any]) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    server = server_of(app, ConnectionLimits(most=2, head_s=1.0))
    server.config.lifespan = "off"
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(8)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    place = listener.getsockname()
    try:
        with ExitStack() as opened:
            silent = [
                opened.enter_context(socket.create_connection(place, timeout=PATIENCE_S))
                for _ in range(3)
            ]
            assert silent[0].recv(1) == b""
            with socket.create_connection(place, timeout=PATIENCE_S) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
                assert client.recv(12) == b"HTTP/1.1 204"
            for one in silent[1:]:
                assert one.recv(1) == b""
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "rows", [b",".join([b"[]"] * 300_000), b'{"x": ' + b"[" * 9_000], ids=["many", "deep"]
)
def test_objects_and_lists_are_counted_before_json_makes_them(
    rows: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("securevfl.serving.api.from_json", lambda *_, **__: pytest.fail("made"))
    with pytest.raises(TooManyRowsError):
        FORMAT.read(b'{"rows":[' + rows + b"]}", most_rows=1000)


def test_brackets_within_texts_are_no_rows() -> None:
    text = RowFormat([RowColumn(name="t", kind="text", required=True, nullable=False, note="")])
    row = {"t": '[{"\\' * 100}
    frame = text.read(json.dumps({"rows": [row] * 9}).encode(), most_rows=9)
    assert frame["t"].tolist() == [row["t"]] * 9
