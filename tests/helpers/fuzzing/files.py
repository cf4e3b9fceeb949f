"""Targets of a party's own files: the federation file, sources, ledgers, states, links."""

import json
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import tomli_w
from helpers.countersigners import remembered
from helpers.federations import FROZEN
from helpers.fuzzing.mutation import altered_tree, as_json, deepened, havoc
from helpers.fuzzing.target import Broken, Target

from securevfl import SecureVflError, read_federation
from securevfl.config.reading import parse_federation
from securevfl.data.sources.settings import read_source
from securevfl.data.tables import KeyTable
from securevfl.dp import Privacy
from securevfl.dp.release_plan import ReleasePlan
from securevfl.ledger.chain import Chain, ChainedFile, read_chain
from securevfl.ledger.countersigning import require_signed
from securevfl.ledger.ledger import Ledger
from securevfl.ledger.ledger_file import FILE as RECORDS
from securevfl.ledger.ledger_file import RecordCounts, lines_of_run, summary_of
from securevfl.testing import write_federation

ROOT: Final = Path(__file__).resolve().parents[3]
RUN: Final = "1" * 32
_DELTA: Final = 1e-5
SEALED: Final = 1
"""Bit of a mode: whether the file's own check sums are made right before it is read."""


@cache
def folder() -> Path:
    """Return a folder of this process, in memory where there is such a place."""
    memory = Path("/dev/shm")
    made = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="fuzz-")
    _KEPT.append(made)
    return Path(made.name)


_KEPT: Final[list[tempfile.TemporaryDirectory[str]]] = []


def moded(mode: int, data: bytes) -> bytes:
    """Return an input that begins with how it is read."""
    return bytes([mode]) + data


def unlike(what: str, before: object, after: object) -> None:
    """Refuse what came back as something else.

    Raises:
        Broken: If the two are not equal.
    """
    if before != after:
        raise Broken(f"{what} came back as something else: {before!r:.300} and {after!r:.300}")


def _toml_of(tree: Any) -> bytes:
    try:
        return deepened(tomli_w.dumps(tree)).encode()
    except (TypeError, ValueError, AttributeError):
        return b""


def _altered_toml(data: bytes, random: Random) -> bytes:
    try:
        tree = tomllib.loads(data.decode())
    except (ValueError, RecursionError):
        return havoc(data, random, _TOML_WORDS)
    return _toml_of(altered_tree(tree, random)) or havoc(data, random, _TOML_WORDS)


_TOML_WORDS: Final = (b"[[", b"]]", b"=", b'"""', b"inf", b"nan", b"{}", b"[a.b]\n", b"\n")


def _federation_seeds() -> list[bytes]:
    place = folder() / "federations"
    place.mkdir(exist_ok=True)
    made = [
        write_federation(place, rows=20).read_bytes(),
        write_federation(place, rows=20, privacy=FROZEN, model={"release": "pooled"}).read_bytes(),
    ]
    found = sorted((ROOT / "examples").glob("*.toml"))
    return made + [path.read_bytes() for path in found]


def _read_federation(data: bytes) -> None:
    path = folder() / "fed.toml"
    path.write_bytes(data)
    config = read_federation(path)
    again = parse_federation(tomllib.loads(tomli_w.dumps(dict(config.source))), file="again")
    unlike("a federation file", config.digest, again.digest)


def _source_seeds() -> list[bytes]:
    return [
        b'file = "t.csv"\nseparator = ";"\ndecimal = ","\nheader = ["a", "b"]\nempty = ["", "-"]\n',
        b'url = "postgresql+psycopg://reader@db/bank"\npassword_env = "PW"\ntable = "a.b"\n',
        b'file = "t.duckdb"\nquery = "select a from b order by a"\n',
    ]


def _read_source(data: bytes) -> None:
    path = folder() / "bank.source.toml"
    path.write_bytes(data)
    source = read_source(path, where="table")
    unlike("a source", source, read_source(path, where="table"))


def _plan(**privacy: Any) -> ReleasePlan:
    return ReleasePlan(
        privacy=Privacy(delta=_DELTA, epsilon=100.0, **privacy),
        parties=2,
        min_active=2,
        rounds=10,
        rows_per_round=10,
        row_releases=100,
        releases_per_row=1,
        links=3,
    )


def frozen_plan() -> ReleasePlan:
    """Return ten rounds of ten rows of a frozen encoder."""
    return _plan(encoder="frozen", links_per_record=4)


def _open_ledger(path: Path, plan: ReleasePlan) -> Ledger:
    return Ledger(
        path,
        party="bank",
        plan=plan,
        noise_share_std=1.0,
        durable=False,
        run="b",
        federation="test",
        settings="abc",
    )


_SIGNED: Final = {
    "kind": "countersigned",
    "time": "2026-11-22T00:00:00+00:00",
    "federation": "test",
    "digest": "d" * 64,
    "run": RUN,
    "meeting": "m",
    "point": "start",
    "statements": [
        {
            "party": "agency",
            "head": "0" * 64,
            "lines": 3,
            "since": 0,
            "proof": "0" * 64,
            "identity": "ed25519:" + "A" * 43 + "=",
            "signature": "0" * 128,
        }
    ],
}
_OTHERS: Final[tuple[Mapping[str, Any], ...]] = (
    _SIGNED,
    {"kind": "forgotten", "time": "", "federation": "test", "party": "agency"},
    {
        "kind": "labels",
        "mechanism": "shares",
        "epsilon": 2.0,
        "delta": 1e-6,
        "parties": 2,
        "digest": "",
    },
    {"kind": "fit"},
    {"kind": "release", "digest": "r" * 64},
    {
        "kind": "limit",
        "version": 5,
        "unit": "secondary-record",
        "epsilon": 20.0,
        "delta": _DELTA,
        "time": "",
    },
)


@cache
def _ledger_seeds() -> list[bytes]:
    made: list[bytes] = []
    for privacy in ({}, {"encoder": "frozen", "links_per_record": 4}):
        path = folder() / f"seed-{len(made)}.jsonl"
        ledger = _open_ledger(path, _plan(**privacy))
        for number in (1, 2):
            rows = np.arange(10 * number, 10 * number + 10)
            ledger.charge(round_number=number, rows=rows, purpose="train")
        for line in _OTHERS:
            ledger.file.append(line)
        ledger.close()
        made.append(path.read_bytes())
        path.unlink()
    return [moded(mode, data) for data in made for mode in (0, SEALED)]


def _chained(data: bytes) -> bytes:
    """Return lines of JSON with hashes that follow from one another, as a forger writes them."""
    chain, made = Chain(), []
    for line in data.split(b"\n"):
        try:
            entry = json.loads(line)
            entry["previous"] = chain.head.hex()
            text = json.dumps(entry)
        except (ValueError, TypeError, RecursionError):
            made.append(line)
            continue
        chain.add(text)
        made.append(text.encode())
    return b"\n".join(made)


def _read_ledger(data: bytes) -> None:
    mode, content = data[:1], data[1:]
    path = folder() / "ledger.jsonl"
    path.write_bytes(_chained(content) if mode and mode[0] & SEALED else content)
    entries = _all_of(path)
    plan = frozen_plan()
    _open_ledger(path, plan).close()
    unlike("a ledger", entries, _all_of(path)[: len(entries)])


def _all_of(path: Path) -> list[dict[str, Any]]:
    summary_of(path)
    _, entries = read_chain(path)
    remembered(entries, "test")
    for entry in entries:
        if entry["kind"] == "countersigned":
            with suppress(SecureVflError):
                require_signed(entry)
    lines_of_run(path, "b")
    return entries


_KEYS: Final = KeyTable(name="bank", columns={"id": np.arange(6, dtype=np.float64)})


def _counts_of(place: Path) -> RecordCounts:
    return RecordCounts(place, ChainedFile(None), _KEYS, last=None)


@cache
def _counts_seeds() -> list[bytes]:
    place = folder()
    counts = _counts_of(place)
    for links in ([[0, 1], [2, -1]], [[-1, -1]], [[0, 5]]):
        counts.admit(np.array(links), most=2)
    counts.close()
    data = (place / RECORDS).read_bytes()
    (place / RECORDS).unlink()
    return [moded(mode, data) for mode in (0, SEALED)]


def _read_counts(data: bytes) -> None:
    mode, content = data[:1], data[1:]
    path = folder() / RECORDS
    path.write_bytes(_chained(content) if mode and mode[0] & SEALED else content)
    try:
        _counts_of(path.parent).close()
    finally:
        path.unlink()


def _altered_lines(data: bytes, random: Random) -> bytes:
    """Alter a line's content, put one twice, leave one out, or exchange two."""
    mode, lines = data[:1], data[1:].split(b"\n")
    place = random.randrange(len(lines))
    match random.randrange(8):
        case 0:
            lines.insert(place, random.choice(lines))
        case 1:
            lines.insert(random.randrange(len(lines)), lines.pop(place))
        case 2:
            del lines[place]
        case _:
            try:
                lines[place] = as_json(altered_tree(json.loads(lines[place]), random))
            except ValueError:
                lines[place] = havoc(lines[place], random)
    mode = random.choice((mode, bytes([SEALED])))
    return mode + b"\n".join(lines)


FILES: Final = (
    Target(
        name="federation",
        seeds=_federation_seeds,
        read=_read_federation,
        words=_TOML_WORDS,
        mutate=_altered_toml,
    ),
    Target(
        name="source",
        seeds=_source_seeds,
        read=_read_source,
        words=(*_TOML_WORDS, b"a=" + b"[" * 2000, b"a." * 2000),
        mutate=_altered_toml,
    ),
    Target(
        name="ledger",
        seeds=_ledger_seeds,
        read=_read_ledger,
        words=(b"NaN", b"Infinity", b"1e999", b"[" * 2000, b"\n", b"{}"),
        mutate=_altered_lines,
    ),
    Target(
        name="counts",
        seeds=_counts_seeds,
        read=_read_counts,
        words=(b"NaN", b"1e999", b"[" * 2000, b"\n", b"{}", b"-1", b"true"),
        mutate=_altered_lines,
    ),
)
