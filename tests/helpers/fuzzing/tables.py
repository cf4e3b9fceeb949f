"""Targets of tables: text files, compressed or not, and columns with types; and bodies of HTTP."""

import asyncio
import bz2
import gzip
import io
import json
import lzma
import time
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cache
from random import Random
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
from helpers.fuzzing.files import folder, moded
from helpers.fuzzing.mutation import altered_tree, as_json, havoc
from helpers.fuzzing.target import Broken, Target, require_one_line
from helpers.new_rows import fitted_schema
from helpers.shown_token import HEADERS, TOKEN

from securevfl.core.errors import SecureVflError
from securevfl.data.scaling import ColumnSettings
from securevfl.data.schema import KeyColumn, TableSchema
from securevfl.data.sources.read import read_frame
from securevfl.federation.run_plan import PredictionBudget
from securevfl.runtime.predictions import Predictions
from securevfl.serving.api import RowFormat, Served, make_app
from securevfl.serving.asking import Asker
from securevfl.serving.guard import Guard, Rate

_TEXT: Final = (
    b"id,name,since,income\n1,Ann,2020-01-01,1.5\n2,,2021-02-03,\n3,B\xc3\xa9a,2019-12-31,2e3\n"
)


def _zipped(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("t.csv", data)
    return buffer.getvalue()


def _zst(data: bytes) -> bytes:
    packed: bytes = pa.Codec("zstd").compress(data, asbytes=True)
    return packed


_PACKED: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    ".csv": bytes,
    ".tsv": bytes,
    ".txt": bytes,
    ".csv.gz": gzip.compress,
    ".csv.bz2": bz2.compress,
    ".csv.xz": lzma.compress,
    ".csv.zst": _zst,
    ".zip": _zipped,
}
"""How a text file may be packed, by its suffix."""

_PACK: Final = 16
"""Bit of a mode: the input is what is packed, and not the archive."""


def _text_seeds() -> list[bytes]:
    german = _TEXT.decode().replace(",", ";").replace(".", ",").encode("utf-16")
    made = [moded(0, _TEXT), moded(1, _TEXT.replace(b",", b"\t")), moded(2, german)]
    signed = b"sep=;\nid;rate;fee\n1;12,5 %;$ 1.200\n2;7%;(3)\n"
    made += [moded(0, signed), moded(0, b"A title\n" + _TEXT)]
    made += [moded(number | _PACK, _TEXT) for number in range(3, len(_PACKED))]
    return made + [moded(number, pack(_TEXT)) for number, pack in enumerate(_PACKED.values())]


def _read_text(data: bytes) -> None:
    mode, content = (data[0], data[1:]) if data else (0, b"")
    suffix, pack = list(_PACKED.items())[mode % len(_PACKED)]
    path = folder() / f"t{suffix}"
    path.write_bytes(pack(content) if mode & _PACK else content)
    _require_kept(read_frame(path, where="table"))


def _require_kept(frame: pd.DataFrame) -> None:
    """Check that a table that was read comes back from a file of typed columns."""
    if not frame.columns.is_unique:
        raise Broken(f"two columns of one name: {list(frame.columns)}")
    path = folder() / "kept.parquet"
    frame.to_parquet(path, index=False)
    again = read_frame(path, where="table")
    pd.testing.assert_frame_equal(frame, again, check_dtype=False)


_COLUMNAR: Final = (".parquet", ".arrow", ".feather")


@cache
def _columnar_seeds() -> list[bytes]:
    frame = pd.DataFrame(
        {
            "id": np.arange(5),
            "name": ["a", None, "b", "c", "é"],
            "income": [1.5, np.nan, 2.0, 3.0, -1.0],
            "since": pd.to_datetime(["2020-01-01"] * 5),
            "kind": pd.Categorical(["x", "y", "x", "x", "y"]),
        }
    )
    table = pa.Table.from_pandas(frame, preserve_index=False)
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    file = io.BytesIO()
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    made = [frame.to_parquet(index=False), frame[["id"]].to_parquet(compression=None)]
    return [
        *(moded(0, data) for data in made),
        moded(1, file.getvalue()),
        moded(1, stream.getvalue()),
        moded(2, file.getvalue()),
    ]


def _read_columnar(data: bytes) -> None:
    mode, content = (data[0], data[1:]) if data else (0, b"")
    path = folder() / f"t{_COLUMNAR[mode % len(_COLUMNAR)]}"
    path.write_bytes(content)
    frame = read_frame(path, where="table")
    if not frame.columns.is_unique:
        raise Broken(f"two columns of one name: {list(frame.columns)}")


_ROWS: Final = {
    "rows": [
        {"born": "1980-01-01", "name": "Ann", "income": 3, "kind": "a", "employed": False},
        {"born": "1990-01-01", "name": None, "since": "2020-01-01", "income": 1.5},
    ]
}


class _Answering(Asker):
    """Encodes rows as a model does, and answers all alike, without a thread."""

    def __init__(self, schema: TableSchema) -> None:
        self._schema = schema
        self.ready = True

    @property
    def budgets(self) -> list[PredictionBudget]:
        return []

    def ask(self, frame: pd.DataFrame) -> "Future[Predictions]":
        answer: Future[Predictions] = Future()
        try:
            _, values = self._schema.encode(frame, where="rows")
            if not np.isfinite(values).all():
                raise Broken("a row became numbers that are not finite")
            answer.set_result(
                Predictions(
                    rows=range(len(frame)),
                    values=np.zeros(len(frame)),
                    probabilities=None,
                    classes=None,
                )
            )
        except SecureVflError as error:
            answer.set_exception(error)
        return answer


@cache
def _app() -> tuple[Guard, asyncio.AbstractEventLoop]:
    frame = pd.DataFrame(
        {
            "income": [1.5, 2.5, np.nan, 4.5],
            "kind": ["a", "b", "a", "c"],
            "since": ["2020-01-01", "2021-06-05", "2019-03-04", "2020-02-02"],
            "employed": [True, False, True, True],
        }
    )
    fitted = fitted_schema(frame, ColumnSettings())
    born = KeyColumn(name="born", kind="date")
    schema = TableSchema(columns=fitted.columns, missing=fitted.missing, keys=(born,))
    served = Served(
        federation="test",
        run="1" * 32,
        task="regression",
        classes=None,
        rows=RowFormat.of(schema, {"name": "text"}),
    )
    app = make_app(served, _Answering(schema), Rate(None, time.monotonic), max_rows=100)
    guard = Guard(
        app,
        token=TOKEN,
        max_bytes=1 << 18,
        log=require_one_line,
        clock=time.monotonic,
    )
    return guard, asyncio.new_event_loop()


_PATHS: Final = ("/predict", "/predict", "/predict", "/budget", "/schema", "/x", "/ready", "/")
_STATUS: Final = frozenset({200, 400, 404, 405, 413, 422})
_LONG_ANSWER: Final = 1 << 16


def _http_seeds() -> list[bytes]:
    one = {"row": _ROWS["rows"][0]}
    return [moded(mode, json.dumps(body).encode()) for mode in (0, 3) for body in (_ROWS, one)]


def _read_http(data: bytes) -> None:
    """Post a body; its first byte says where, by which method, and in how many pieces."""
    mode, body = (data[0], data[1:]) if data else (0, b"")
    method = ("POST", "GET", "HEAD", "BREW")[mode >> 3 & 3]
    pieces = [body] if mode & 32 else [body[:7], body[7:]]
    said = b"12" if mode & 64 else str(len(body)).encode()
    status, answer = _asked(_PATHS[mode & 7], method, pieces, length=said)
    if status not in _STATUS:
        raise Broken(f"answered {status}: {answer[:300]!r}")
    if status != 200 and method != "HEAD":
        told = json.loads(answer)
        if set(told) != {"error", "details"} or len(answer) > _LONG_ANSWER:
            raise Broken(f"answered {status}: {answer[:300]!r}")
        for line in told["details"]:
            require_one_line(line)


def _asked(path: str, method: str, pieces: list[bytes], *, length: bytes) -> tuple[int, bytes]:
    guard, loop = _app()
    left = [
        {"type": "http.request", "body": piece, "more_body": number + 1 < len(pieces)}
        for number, piece in enumerate(pieces)
    ]
    said: list[Any] = []

    async def receive() -> Any:
        return left.pop(0) if left else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        said.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"authorization", HEADERS["Authorization"].encode()),
            (b"content-type", b"application/json"),
            (b"content-length", length),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    loop.run_until_complete(guard(scope, receive, send))
    return said[0]["status"], b"".join(one.get("body", b"") for one in said[1:])


def _altered_http(data: bytes, random: Random) -> bytes:
    try:
        body = as_json(altered_tree(json.loads(data[1:]), random))
    except ValueError:
        return havoc(data, random)
    return (data[:1] or b"\0") + body


TABLES: Final = (
    Target(
        name="text-tables",
        seeds=_text_seeds,
        read=_read_text,
        words=(b'"', b"\r\n", b"\n\n", b";", b"\xff\xfe", b"\xef\xbb\xbf", b"nan", b"1e999", b"\0"),
    ),
    Target(
        name="columnar-tables",
        seeds=_columnar_seeds,
        read=_read_columnar,
        words=(b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f"),
        room=256 << 20,
    ),
    Target(
        name="http",
        seeds=_http_seeds,
        read=_read_http,
        words=(b"[" * 5000, b"NaN", b"1e999", b'"\\ud800"', b'"rows":', b'"\\u0000"'),
        mutate=_altered_http,
    ),
)
