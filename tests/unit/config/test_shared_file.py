"""No text of the shared federation file reaches a file, a folder, a program or SQL of a machine.

Every setting of the schema that can hold text gets hostile ones, so that a new one is tried too.
"""

import os
import shutil
import sqlite3
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from federation_schema import federation_schema
from helpers.command_line import securevfl
from helpers.federations import write_overlapping

from securevfl import read_federation
from securevfl.core import checks
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.desk.setup.party_check import Collected
from securevfl.stages.tables import databases
from securevfl.testing import save_federation
from securevfl.transport.identity import own_identity, trust

MARK = "w4ll"

_watched: list[str] | None = None
_root = Path()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is None:
        return
    # Of an import the module alone: the search path is the test's.
    texts = arguments[:1] if event == "import" else arguments
    if not any(MARK in str(one) for one in texts):
        return
    reads = event == "open" and arguments[2] & os.O_ACCMODE == os.O_RDONLY
    # A name below a party's own data root may be looked for there.
    if not (reads and Path(os.path.realpath(os.fsdecode(arguments[0]))).is_relative_to(_root)):
        _watched.append(f"{event} {str(texts)[:200]}")


sys.addaudithook(_hook)


@contextmanager
def watched(root: Path) -> Iterator[list[str]]:
    """Collect what this process does with a text that has the mark, but for reading below root."""
    global _watched, _root
    found: list[str] = []
    _watched, _root = found, root.resolve()
    try:
        yield found
    finally:
        _watched = None


Put = Callable[[str], Any]


def places(schema: dict[str, Any]) -> Iterator[Put]:
    """Yield how a text gets into a setting: as it is, in a list, in a table, as a table's key."""
    choices = [*schema.get("anyOf", ()), *([schema] if "type" in schema else [])]
    if "type" not in schema and "anyOf" not in schema:  # one of a few words
        choices.append({"type": "string"})
    for one in choices:
        if one is not schema and "anyOf" in one:
            yield from places(one)
        elif one.get("type") == "string":
            yield lambda text: text
        elif one.get("type") == "array":
            for put in places(one.get("items", {"type": "string"})):
                yield lambda text, put=put: [put(text)]
        elif one.get("type") == "object":
            for name, inner in one.get("properties", {}).items():
                for put in places(inner):
                    yield lambda text, name=name, put=put: {name: put(text)}
            if isinstance(more := one.get("additionalProperties"), dict):
                yield lambda text: {text: {}}
                for put in places(more):
                    yield lambda text, put=put: {"x0": put(text)}


COMPANIONS: dict[str, dict[str, Any]] = {
    "training.split_column": {"split": "group"},
    "base.described": {"estimator": "python"},
    "party.bounds": {"scaling": "bounds"},
    "linkage.fields": {"metric": "mixed"},
    "linkage.blocking": {"metric": "levenshtein"},
}
"""Settings without which another one is refused, whatever it says."""

Setting = tuple[str, Callable[[dict[str, Any], str], None]]


def settings() -> Iterator[Setting]:
    """Yield every setting of the shared file that can hold text, and what puts one there."""
    for section, schema in federation_schema()["properties"].items():
        for table in schema.get("anyOf", [schema.get("items", schema)]):
            start = {"family": table["properties"]["family"]["const"]} if "anyOf" in schema else {}
            for name, inner in table.get("properties", {}).items():
                for put in places(inner):
                    yield f"{section}.{name}", partial(_change, section, name, put, start)
    yield "methods", lambda source, text: source.update(methods={text: {}})
    yield "methods.family", lambda source, text: source.update(methods={"m": {"family": text}})


def _change(
    section: str, name: str, put: Put, start: dict[str, Any], source: dict[str, Any], text: str
) -> None:
    table = source["party"][1] if section == "party" else source.setdefault(section, {})
    if start:
        table.clear()
    table |= {**start, **COMPANIONS.get(f"{section}.{name}", {}), name: put(text)}


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A federation with an SQLite table; beside its folder, what no partner may reach."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    path = write_overlapping(
        root, secondaries=1, training={"epochs": 1}, pretraining={"iterations": 1}
    )
    with sqlite3.connect(root / "bank.sqlite") as database:
        database.execute("create table t (n integer primary key, id real, x0 real, x1 real)")
        pd.read_csv(root / "bank-1.csv").to_sql("t", database, index=False, if_exists="append")
    database.close()
    source = tomllib.loads(path.read_text())
    source["runtime"] |= {"join_timeout_s": 0.1, "round_timeout_s": 0.1}
    source["party"][0]["identity"] = own_identity("agency", outside, valid_days=9).public_text
    own = own_identity("bank-1", root / "identity", valid_days=9)
    source["party"][1] |= {
        "identity": own.public_text,
        "data": "bank.sqlite",
        "reading": {"table": "t"},
    }
    save_federation(root, source)
    shutil.copytree(root, outside / f"{MARK}-run")
    shutil.copy(root / "bank.sqlite", outside / f"{MARK}.sqlite")
    shutil.copy(root / "bank-1.csv", outside / f"{MARK}.csv")
    (outside / f"{MARK}_module.py").write_text("run = open\n")
    connect = databases._sqlite

    def traced(file: Path) -> sqlite3.Connection:
        connection = connect(file)
        connection.set_trace_callback(lambda sql: _hook("sql", (sql,)))
        return connection

    monkeypatch.setattr(databases, "_sqlite", traced)
    trust(root / "identity", "agency", outside / "identity.pem")
    monkeypatch.syspath_prepend(str(outside))
    monkeypatch.setenv("HOME", str(outside))
    monkeypatch.setenv("MARKED", str(outside / f"{MARK}.csv"))
    return path


def elsewhere(path: Path) -> list[str]:
    """Return a table and a run folder beside the federation's folder."""
    return [f"{path.parent.parent}/outside/{MARK}.sqlite", f"../outside/{MARK}-run"]


def hostile(path: Path) -> list[str]:
    outside = path.parent.parent / "outside"
    return [
        *elsewhere(path),
        f"~/{MARK}.csv",
        f"file://{outside}/{MARK}.csv",
        f"sqlite:///{outside}/{MARK}.sqlite?mode=rwc&uri=true",
        f"mysql+pymysql://{MARK}@host/bank",
        f"\\\\host\\{MARK}.csv",
        f"{MARK}\0.csv",
        f"drop table {MARK} -- order by",
        f"select '{MARK}'; vacuum into '{outside}/{MARK}.db' -- order by",
        f"$(touch {outside}/{MARK}-touched)",
        f"{MARK}_module:run",
        f"python: {MARK}_module.run",
    ]


def reached(path: Path, capfd: pytest.CaptureFixture[str], tried: Counter[str], name: str) -> str:
    """Return what checking, linking, simulating and a party's start do with the marked text.

    All commands begin by reading the file. What refuses a text there is tried in every setting, the
    rest once for each setting where it is refused, and where it is not.
    """
    root, out = path.parent, path.parent / "out"
    with watched(root) as found:
        try:
            read_federation(path)
            kind = f"{name} accepted"
        except (ConfigError, PrivacyError):
            kind = f"{name} refused"
        tried[kind] += 1
        Collected(path)  # as check does, which goes on after a refusal
        if tried[kind] > 1:
            return "; ".join(found)
        if kind.endswith("accepted") or name.startswith("party"):
            securevfl(capfd, "check", path)
        if kind.endswith("accepted"):
            securevfl(capfd, "link", path, "--out", out / "link")
            securevfl(capfd, "simulate", path, "--out", out / "simulated")
            named = ("--name", "bank-1", "--identity", root / "identity")
            securevfl(capfd, "party", path, *named, "--out", out / "party")
    shutil.rmtree(out, ignore_errors=True)
    return "; ".join(found)


def found_in(
    path: Path, changes: Iterable[Setting], capfd: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """Return what each setting reaches."""
    source, found, tried = path.read_text(), {}, Counter[str]()
    for name, change in changes:
        for text in hostile(path):
            changed = tomllib.loads(source)
            change(changed, text)
            save_federation(path.parent, changed)
            if there := reached(path, capfd, tried, name):
                found[f"{name} = {text}"] = there
    return found


def test_no_setting_reaches_this_machine(
    federation: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert found_in(federation, settings(), capfd) == {}


def test_the_watch_sees_what_gets_through(
    federation: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that is let through: a table elsewhere."""
    monkeypatch.setattr(checks, "below_root", lambda **_: None)
    monkeypatch.setattr(sys.modules[__name__], "hostile", lambda path: elsewhere(path)[:1])
    through = {"party.data"}
    found = found_in(federation, (one for one in settings() if one[0] in through), capfd)
    assert {name.partition(" = ")[0] for name in found} == through
