"""What a user did wrong: one line that says what, where and what to do, and an exit code."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.command_line import Ended, securevfl
from helpers.federations import FROZEN
from helpers.patience import PATIENCE_S

from securevfl import read_federation
from securevfl.testing import save_federation, write_federation

Capture = pytest.CaptureFixture[str]

REGRESSION = {"task": "regression"}
NOISED = {"noise_multiplier": 1.0, "delta": 1e-4, "encoder": "trained"}
SMALL = {"rows": 60, "training": {"epochs": 1, "batch_size": 32}}
QUICK = {**SMALL, "model": {"family": "top1sim"}, "base": {"estimator": "linear"}}
"""Of a run that ends well: its report draws few pictures, and one model is fitted alone."""


def edit(folder: Path, party: str, change) -> None:
    path = folder / f"{party}.csv"
    change(pd.read_csv(path)).to_csv(path, index=False)


def put(column: str, row: int, value: object):
    def change(frame: pd.DataFrame) -> pd.DataFrame:
        values = frame[column].tolist()
        values[row] = value
        return frame.assign(**{column: values})

    return change


def first(rows: int):
    return lambda frame: frame.iloc[:rows]


def source_of(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def simulated(capfd: Capture, path: Path, *more: object) -> Ended:
    return securevfl(capfd, "simulate", path, "--out", path.parent / "run", *more)


def with_bounds(path: Path) -> Path:
    source = source_of(path)
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    return save_federation(path.parent, source)


TABLES = {
    "missing column": (
        "bank-1",
        lambda frame: frame.rename(columns={"lat": "latt"}),
        {},
        ["bank-1.csv", "has no column 'lat'", "did you mean 'latt'"],
    ),
    "constant label": (
        "agency",
        lambda frame: frame.assign(y=1),
        {},
        ["agency.csv", "label 'y'", "is constant"],
    ),
    "constant label in a regression": (
        "agency",
        lambda frame: frame.assign(y=1.5),
        {"federation": REGRESSION},
        ["label 'y'", "is constant (1.5)"],
    ),
    "words as labels of a regression": (
        "agency",
        lambda frame: frame.assign(y="dear"),
        {"federation": REGRESSION},
        ["label 'y'", "must be numeric for regression", "'dear'"],
    ),
    "infinity in a feature": (
        "agency",
        put("x0", 0, np.inf),
        {},
        ["agency.csv", "column 'x0'", "infinite value in row 1"],
    ),
    "NaN in a key": (
        "bank-1",
        put("lon", 3, np.nan),
        {},
        ["bank-1.csv", "key 'lon', row 4", "is missing", "fill it in"],
    ),
    "infinity in a key": (
        "bank-1",
        put("lat", 8, -np.inf),
        {},
        ["bank-1.csv", "key 'lat', row 9", "infinite"],
    ),
    "words in a key": ("bank-1", put("lat", 8, "north"), {}, ["key 'lat'", "row 9 holds 'north'"]),
    "K above a secondary's records": (
        "bank-2",
        first(3),
        {},
        ["'bank-2'", "has 3 records", "model.neighbours = 4", "lower model.neighbours"],
    ),
    "too few rows to split": (
        "agency",
        first(5),
        {"federation": REGRESSION},
        ["agency", "5 rows are too few"],
    ),
}


@pytest.mark.parametrize("case", TABLES)
def test_table_is_refused(case: str, tmp_path: Path, capfd: Capture) -> None:
    """A wrong table is refused with its party, column, row and remedy, before any training."""
    party, change, sections, words = TABLES[case]
    path = write_federation(tmp_path, rows=60, **sections)
    edit(tmp_path, party, change)
    ended = simulated(capfd, path)
    assert ended.code == 2
    assert ended.out == ""
    for word in words:
        assert word in ended.complaint
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_table_that_is_not_there(tmp_path: Path, capfd: Capture) -> None:
    """A table that does not exist is named."""
    path = write_federation(tmp_path, rows=60)
    (tmp_path / "bank-2.csv").unlink()
    ended = simulated(capfd, path)
    assert ended.code == 2
    assert "bank-2.csv" in ended.complaint
    assert "No such file" in ended.complaint


def change_party(number: int, **fields: object):
    def change(source: dict[str, Any]) -> None:
        source["party"][number] |= fields

    return change


def change_section(section: str, **fields: object):
    def change(source: dict[str, Any]) -> None:
        source[section] |= fields

    return change


def replace_section(section: str, value: object):
    def change(source: dict[str, Any]) -> None:
        source[section] = value

    return change


def drop(section: str, field: str):
    def change(source: dict[str, Any]) -> None:
        del source[section][field]

    return change


def privacy(**fields: object):
    return replace_section("privacy", {**NOISED, **fields})


FILES = {
    "keys of different dimension": (
        change_party(1, key=["lon"]),
        ["party.key", "same dimension", "agency has 2", "bank-1 has 1"],
    ),
    "two parties of one name": (change_party(2, name="bank-1"), ["two parties", "'bank-1'"]),
    "two primaries": (
        change_party(1, role="primary", label="y", address="127.0.0.1:0"),
        ["party.role", "exactly one", "agency and bank-1 have"],
    ),
    "no primary": (
        lambda source: source["party"].pop(0),
        ["party.role", "exactly one", "none has"],
    ),
    "no secondary": (
        lambda source: source.__setitem__("party", source["party"][:1]),
        ["at least one secondary"],
    ),
    "sampling rate 0": (privacy(sampling_rate=0.0), ["privacy.sampling_rate", "(0, 1]", "0.0"]),
    "sampling rate above 1": (privacy(sampling_rate=1.5), ["privacy.sampling_rate", "(0, 1]"]),
    "sampling rate NaN": (privacy(sampling_rate=float("nan")), ["privacy.sampling_rate", "nan"]),
    "delta 0": (privacy(delta=0.0), ["privacy.delta", "(0, 1)", "0.0"]),
    "delta 1": (privacy(delta=1.0), ["privacy.delta", "(0, 1)", "1.0"]),
    "delta below 0": (privacy(delta=-1e-5), ["privacy.delta", "(0, 1)"]),
    "epsilon and noise": (privacy(epsilon=1.0), ["privacy.epsilon", "exactly one", "got both"]),
    "neither epsilon nor noise": (
        replace_section("privacy", {"delta": 1e-5}),
        ["privacy.epsilon", "exactly one", "neither"],
    ),
    "unknown field": (
        change_section("privacy", epsilonn=1.0),
        ["privacy.epsilonn", "no such field", "did you mean 'epsilon'", "Allowed: "],
    ),
    "unknown party field": (
        change_party(1, keys=["lon"]),
        ["party[1].keys", "no such field", "did you mean 'key'"],
    ),
    "unknown section": (
        lambda source: source.__setitem__("trainning", {}),
        ["[trainning]", "no such section", "did you mean [training]"],
    ),
    "missing section": (lambda source: source.pop("model"), ["[model]", "missing"]),
    "missing field": (drop("federation", "task"), ["federation.task", "missing"]),
    "unknown family": (change_section("model", family="fett"), ["model.family", "'fet'", "fett"]),
    "a family of one party": (change_section("model", family="solo"), ["model.family", "'solo'"]),
    "protection without agreed ranges": (
        change_section("linkage", protection="paillier"),
        ["linkage.ranges", "'paillier'", "[low, high]"],
    ),
    "codes of numbers without agreed ranges": (
        change_section("linkage", protection="bloom"),
        ["linkage.ranges", '"bloom"', "[low, high]"],
    ),
    "a range for one of two keys": (
        change_section("linkage", protection="shares", ranges=[[0.0, 9.0]]),
        ["linkage.ranges", "2 numeric key columns", "got 1"],
    ),
    "a range that descends": (
        change_section("linkage", protection="shares", ranges=[[0.0, 9.0], [9.0, 0.0]]),
        ["linkage.ranges", "[9.0, 0.0]"],
    ),
    "edits under shares": (
        change_section("linkage", protection="shares", metric="levenshtein"),
        ["linkage.protection", '"shares"', "'levenshtein'", '"none" or "bloom"'],
    ),
    "no Bloom code on a sphere": (
        change_section("linkage", protection="bloom", metric="great-circle"),
        ["linkage.protection", "great-circle", "Bloom", "project"],
    ),
    "mixed keys without fields": (
        change_section("linkage", metric="mixed"),
        ["linkage.fields", "[linkage.fields.COLUMN]"],
    ),
    "a field that is no key": (
        change_section("linkage", metric="mixed", fields={"lonn": {"kind": "text"}}),
        ["linkage.fields", "'lat'", "lon, lat"],
    ),
    "a field of an unknown kind": (
        change_section("linkage", metric="mixed", fields={"lon": {"kind": "fuzzy"}}),
        ["linkage.fields.lon.kind", "'fuzzy'"],
    ),
    "fields for a metric without any": (
        change_section("linkage", fields={"lon": {"kind": "text"}}),
        ["linkage.fields", '"mixed"'],
    ),
    "text keys for positions": (
        change_section("linkage", metric="levenshtein"),
        ["model.family", "'fet'", "positions", "levenshtein"],
    ),
    "cells without a protection that compares pair by pair": (
        change_section("linkage", cell=0.1),
        ["linkage.cell", '"shares"', '"paillier"'],
    ),
    "cells without a width": (
        change_section("linkage", protection="shares", ranges=[[0.0, 9.0], [0.0, 9.0]], cell=0.0),
        ["linkage.cell", "> 0", "0.0"],
    ),
    "rules without texts": (
        change_section("linkage", blocking=["lat"]),
        ["linkage.blocking", "rules go with", '"levenshtein" or "mixed"'],
    ),
    "noise and its bound": (
        change_section("linkage", similarity_noise=0.1, similarity_tau=0.1),
        ["linkage.similarity_tau", "not both"],
    ),
    "a secret's file": (
        change_section("linkage", secret="/etc/secret"),
        ["linkage.secret", "leave it out", "--data-root"],
    ),
    "a folder for links": (
        change_section("linkage", cache="/etc/links"),
        ["linkage.cache", "leave it out", "--data-root"],
    ),
    "a query for everybody": (
        change_party(1, reading={"query": "drop table t -- order by"}),
        ["reading.query", 'data = "NAME.source.toml"'],
    ),
    "a table elsewhere": (change_party(1, data="/etc/passwd"), ["data", "--data-root", "file = "]),
    "a table above": (change_party(1, data="a/../../b.csv"), ["data", "--data-root", "b.csv"]),
    "a table of a share": (change_party(1, data="\\\\host\\a.csv"), ["data", "--data-root"]),
    "a table of a user": (change_party(1, data="~/a.csv"), ["data", "--data-root", "~/a.csv"]),
    "a table with a NUL": (change_party(1, data="a\0.csv"), ["data", "--data-root"]),
    "a coordinator with nothing to do": (
        lambda source: source["party"].append({"name": "helper", "role": "coordinator"}),
        ["party.role", '"coordinator"', '"none"'],
    ),
    "a coordinator with a table": (
        lambda source: source["party"].append(
            {"name": "helper", "role": "coordinator", "data": "a.csv"}
        ),
        ["party[3].role", "no table"],
    ),
    "no protection named": (
        drop("linkage", "protection"),
        ["linkage.protection", "is missing", 'protection = "none"', '"bloom"'],
    ),
    "unknown protection": (
        change_section("linkage", protection="magic"),
        ["linkage.protection", "'none'", "'magic'"],
    ),
    "unknown metric": (
        change_section("linkage", metric="soundex"),
        ["linkage.metric", "'levenshtein'", "'soundex'"],
    ),
    "text for a number": (
        change_section("training", epochs="ten"),
        ["training.epochs", "a whole number", "'ten'"],
    ),
    "a fraction of epochs": (change_section("training", epochs=1.5), ["training.epochs", "1.5"]),
    "true for a number": (change_section("training", epochs=True), ["training.epochs", "True"]),
    "a number for a section": (replace_section("training", 3), ["[training]", "table", "3"]),
    "a list for a section": (replace_section("model", ["fet"]), ["[model]", "table"]),
    "a table for the parties": (replace_section("party", {"name": "a"}), ["[[party]]", "list"]),
    "no epochs": (change_section("training", epochs=0), ["training.epochs", "at least 1", "0"]),
    "a learning rate of NaN": (
        change_section("training", learning_rate=float("nan")),
        ["training.learning_rate", "nan"],
    ),
    "no rows to train on": (
        change_section("training", test_fraction=0.9),
        ["training.test_fraction", "below 1"],
    ),
    "unknown task": (
        change_section("federation", task="ranking"),
        ["federation.task", "'regression', 'binary', 'multiclass'", "'ranking'"],
    ),
    "a name that is a path": (change_party(1, name="../bank"), ["party[1].name", "'../bank'"]),
    "a label at a secondary": (change_party(1, label="y"), ["party[1].label", "primary"]),
    "no port": (change_party(0, address="localhost"), ["party[0].address", "host:port"]),
    "a port that is no number": (change_party(0, address="a:²"), ["party[0].address", "host:port"]),
    "bounds the wrong way": (
        change_party(1, scaling="bounds", bounds=[1.0, -1.0]),
        ["party[1].bounds", "[low, high]"],
    ),
    "heads that do not divide": (change_section("model", heads=3), ["model.heads", "divide"]),
}


@pytest.mark.parametrize("case", FILES)
def test_federation_file_is_refused(case: str, tmp_path: Path, capfd: Capture) -> None:
    """A wrong federation file is refused with the file, the field, the rule and the value."""
    change, words = FILES[case]
    path = write_federation(tmp_path, rows=60)
    source = source_of(path)
    change(source)
    save_federation(tmp_path, source)
    ended = simulated(capfd, path)
    assert ended.code == 2
    assert ended.out == ""
    assert str(path) in ended.complaint
    for word in words:
        assert word in ended.complaint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[federation\nname = 1", ["is not TOML", "line 1"]),
        (b"name = \xff", ["is not text in UTF-8"]),
        (None, ["No such file"]),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "train", "identity create"])
def test_file_that_cannot_be_read(
    command: str, content: bytes | None, words: list[str], tmp_path: Path, capfd: Capture
) -> None:
    """A file that is no TOML, no text or not there is refused alike by all commands."""
    path = tmp_path / "fed.toml"
    if content is not None:
        path.write_bytes(content)
    ended = securevfl(capfd, *command.split(), path, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "fed.toml" in ended.complaint
    for word in words:
        assert word in ended.complaint


PROMISES = {
    "no amplification of a trained encoder": (
        {**NOISED, "sampling_rate": 0.5},
        ["privacy.sampling_rate", "trained"],
    ),
    "a frozen encoder without a cap": (
        {"epsilon": 1.0, "encoder": "frozen"},
        ["privacy.links_per_record", "must be given"],
    ),
    "everybody colludes": ({**NOISED, "colluding": 2}, ["colluding"]),
    "a dp-trained encoder without a cap": (
        {"epsilon": 1.0, "encoder": "dp-trained"},
        ["privacy.links_per_record", "must be given"],
    ),
    "statistics of the table under a dp-trained encoder": (
        {"epsilon": 1.0, "encoder": "dp-trained", "links_per_record": 1},
        ["'bank-1'", 'scaling = "standard"', "dp-trained encoder", 'scaling = "bounds"'],
    ),
    "statistics of the table under a frozen encoder": (
        FROZEN,
        ["'bank-1'", 'scaling = "standard"', 'scaling = "bounds"'],
    ),
}


@pytest.mark.parametrize("command", ["simulate", "train"])
@pytest.mark.parametrize("case", PROMISES)
def test_promise_that_does_not_hold(
    case: str, command: str, tmp_path: Path, capfd: Capture
) -> None:
    """An unsound promise ends with exit code 4 and what would make it sound; nothing is released.

    With ``train`` as with ``simulate``; a plan is judged by the parties' own processes, which
    another file starts.
    """
    if command == "train" and case == "everybody colludes":
        pytest.skip("the plan needs the number of rows, which the primary's process knows")
    table, words = PROMISES[case]
    path = write_federation(tmp_path, privacy=table, rows=60)
    ended = securevfl(capfd, command, path, "--out", tmp_path / "run")
    assert ended.code == 4
    assert ended.out == ""
    for word in words:
        assert word in ended.complaint
    assert not list(tmp_path.glob("run/parties/*/ledger.jsonl"))


def test_words_under_a_frozen_encoder(tmp_path: Path, capfd: Capture) -> None:
    """Which words a table holds depends on its records; a frozen encoder's promise forbids it."""
    path = with_bounds(
        write_federation(tmp_path, privacy=FROZEN, model={"release": "pooled"}, rows=60)
    )
    edit(tmp_path, "bank-1", lambda frame: frame.assign(colour=["red", "blue"] * 30))
    ended = simulated(capfd, path)
    assert ended.code == 4
    assert "'bank-1'" in ended.complaint
    assert "column 'colour': which words there are depends on the records" in ended.complaint


def test_averaged_encodings_are_not_covered(tmp_path: Path, capfd: Capture) -> None:
    """A promise with unnoised averages of trained weights beside it is refused."""
    path = write_federation(tmp_path, privacy=NOISED, model={"average_positions_every": 1}, rows=60)
    ended = simulated(capfd, path)
    assert ended.code == 4
    assert "model.average_positions_every" in ended.complaint


def warnings_of(setting: str, ended: Ended) -> list[str]:
    return [text for text in ended.warnings if setting in text]


def test_delta_at_one_over_the_records_warns(tmp_path: Path, capfd: Capture) -> None:
    """Delta of 1/n warns of every secondary with n records, and the run goes on."""
    table = {**NOISED, "delta": 1 / 60}
    path = write_federation(tmp_path, privacy=table, **QUICK)
    edit(tmp_path, "bank-2", first(59))
    ended = simulated(capfd, path)
    assert ended.code == 0
    about_delta = warnings_of("privacy.delta", ended)
    assert [text.split(":")[0] for text in about_delta] == ["bank-1"]
    assert "1/60" in about_delta[0]


def test_smaller_delta_does_not_warn(tmp_path: Path, capfd: Capture) -> None:
    """The control: below 1/n of every table there is nothing to warn of."""
    path = write_federation(tmp_path, privacy={**NOISED, "delta": 1 / 61}, **QUICK)
    ended = simulated(capfd, path)
    assert ended.code == 0
    assert warnings_of("privacy.delta", ended) == []


@pytest.mark.parametrize("command", ["simulate", "train"])
def test_run_folder_that_cannot_be_written(command: str, tmp_path: Path, capfd: Capture) -> None:
    """It is found before training, with the system's reason and the remedy."""
    path = write_federation(tmp_path, rows=60)
    (tmp_path / "file").write_text("in the way")
    ended = securevfl(capfd, command, path, "--out", tmp_path / "file" / "run")
    assert ended.code == 2
    assert str(tmp_path / "file" / "run") in ended.complaint
    assert "cannot be written" in ended.complaint
    assert "--out" in ended.complaint
    assert "epoch" not in ended.err


@pytest.mark.parametrize("command", ["simulate", "train"])
def test_device_that_is_not_there(command: str, tmp_path: Path, capfd: Capture) -> None:
    """An unknown device, or a GPU where there is none, is refused before anything is done."""
    path = write_federation(tmp_path, rows=60)
    names = ["tpu", "meta", "mps", "cuda:99"] + ([] if torch.cuda.is_available() else ["cuda"])
    for name in names:
        ended = securevfl(capfd, command, path, "--out", tmp_path / "run", "--device", name)
        assert ended.code == 2
        assert "device" in ended.complaint
        assert "cpu" in ended.complaint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["simulate", "train"])
def test_resume_of_nothing(command: str, tmp_path: Path, capfd: Capture) -> None:
    """There is no going on with a run that never was, nor with an unnamed one."""
    path = write_federation(tmp_path, rows=60)
    ended = securevfl(capfd, command, path, "--out", tmp_path / "run", "--resume")
    assert ended.code == 2
    assert "holds no run to go on with" in ended.complaint
    assert not (tmp_path / "run").exists()
    ended = securevfl(capfd, command, path, "--resume")
    assert ended.code == 2
    assert "--resume: needs --out" in ended.complaint


def test_fresh_run_in_a_used_folder(tmp_path: Path, capfd: Capture) -> None:
    """A run folder is used once: its federation file and figures stay as they are."""
    path = write_federation(tmp_path, **QUICK)
    assert simulated(capfd, path).code == 0
    files = {name: (tmp_path / "run" / name).read_bytes() for name in RUN_FILES}
    write_federation(tmp_path, **{**QUICK, "training": {"epochs": 2, "batch_size": 32}})
    ended = simulated(capfd, path)
    assert ended.code == 2
    assert "holds a run already" in ended.complaint
    assert "--resume" in ended.complaint
    again = simulated(capfd, path, "--resume")
    assert again.code == 2
    assert "other settings" in again.complaint
    assert files == {name: (tmp_path / "run" / name).read_bytes() for name in RUN_FILES}


RUN_FILES = ("metrics.json", "history.csv", "federation.toml", "parties/bank-1/ledger.jsonl")


def test_folder_of_a_run_that_released_nothing(tmp_path: Path, capfd: Capture) -> None:
    """After a mistake that was found in time, the same command works in the same folder."""
    path = write_federation(tmp_path, base={"estimator": "linear"}, **SMALL)
    frame = pd.read_csv(tmp_path / "bank-2.csv")
    edit(tmp_path, "bank-2", first(3))
    assert simulated(capfd, path).code == 2
    assert (tmp_path / "run" / "parties" / "bank-1" / "ledger.jsonl").exists()
    frame.to_csv(tmp_path / "bank-2.csv", index=False)
    assert simulated(capfd, path).code == 0


def test_a_ledger_chosen_by_the_federation_file(tmp_path: Path, capfd: Capture) -> None:
    """A ledger belongs to its table: no file that others write says where it lies."""
    table = {"epsilon": 5.0, "delta": 1e-4, "encoder": "trained", "ledger": "books/ledger.jsonl"}
    path = write_federation(tmp_path, privacy=table, **SMALL)
    ended = simulated(capfd, path)
    assert ended.code == 2
    assert "privacy.ledger: no such field" in ended.complaint


def test_address_that_is_not_this_machines(tmp_path: Path, capfd: Capture) -> None:
    """A port of another machine cannot be chosen here; the line says what to write instead."""
    path = write_federation(tmp_path, rows=60)
    source = source_of(path)
    source["party"][0]["address"] = "192.0.2.1:0"  # reserved for documentation (RFC 5737)
    save_federation(tmp_path, source)
    ended = securevfl(capfd, "train", path, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "192.0.2.1" in ended.complaint
    assert "127.0.0.1:0" in ended.complaint


def test_party_needs_what_provision_makes(tmp_path: Path, capfd: Capture) -> None:
    """Unknown names, missing identities and unpinned parties are refused, one line each."""
    path = write_federation(tmp_path, rows=60)
    out = ("--out", tmp_path / "run")
    ended = securevfl(capfd, "party", path, "--name", "bank-9", "--identity", tmp_path, *out)
    assert ended.code == 2
    assert "'bank-9'" in ended.complaint
    assert "agency, bank-1, bank-2" in ended.complaint
    ended = securevfl(capfd, "party", path, "--name", "bank-1", "--identity", tmp_path, *out)
    assert ended.code == 2
    assert str(tmp_path) in ended.complaint
    made = securevfl(capfd, "identity", "create", path, "--out", tmp_path / "ids")
    assert made.code == 0
    own = tmp_path / "ids" / "bank-1"
    ended = securevfl(capfd, "party", path, "--name", "bank-1", "--identity", own, *out)
    assert ended.code == 2
    assert "pins no identity" in ended.complaint
    assert "securevfl identity create" in ended.complaint


def test_provision_that_cannot_work(tmp_path: Path, capfd: Capture) -> None:
    """A folder in the way, existing keys and no days to live: one line each."""
    path = write_federation(tmp_path, rows=60)
    (tmp_path / "file").write_text("in the way")
    bad = [
        (("--out", tmp_path / "file" / "ids"), "cannot be written"),
        (("--out", tmp_path / "ids", "--days", "0"), "days"),
    ]
    for arguments, word in bad:
        ended = securevfl(capfd, "identity", "create", path, *arguments)
        assert ended.code == 2
        assert word in ended.complaint
    assert securevfl(capfd, "identity", "create", path, "--out", tmp_path / "ids").code == 0
    ended = securevfl(capfd, "identity", "create", path, "--out", tmp_path / "ids")
    assert ended.code == 2
    assert "exist" in ended.complaint


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "{}"])
def test_report_of_no_run(content: str | None, tmp_path: Path, capfd: Capture) -> None:
    """A folder without a finished run's figures has no report."""
    if content is not None:
        (tmp_path / "metrics.json").write_text(content)
    ended = securevfl(capfd, "report", tmp_path)
    assert ended.code == 2
    assert str(tmp_path) in ended.complaint


def test_python_interface_refuses_alike(tmp_path: Path) -> None:
    """Whoever reads the file in Python gets the same text as an exception."""
    path = write_federation(tmp_path, rows=60, training={"epochs": 0})
    with pytest.raises(ValueError, match=r"training\.epochs must be at least 1, got 0"):
        read_federation(path)


NO_TABLES = {
    "an address for all to read": (
        {"data": "postgresql://u:hunter2@h/b"},
        "party[1].data: an address has no place in a file that all parties read",
    ),
    "a misspelt setting": (
        {"reading": {"seperator": ";"}},
        "party[1].reading.seperator: no such field; did you mean 'separator'?",
    ),
    "no such mark": ({"reading": {"decimal": ";"}}, "party[1].reading.decimal: must be one of"),
    "the wrong separator": ({"reading": {"separator": ";"}}, 'reading = { separator = "," }'),
    "a lost source": ({"data": "lost.source.toml"}, "No such file"),
}


@pytest.mark.parametrize(("changes", "message"), NO_TABLES.values(), ids=NO_TABLES)
def test_a_source_that_cannot_be_read_gets_one_line(
    tmp_path: Path, capfd: Capture, changes: dict[str, Any], message: str
) -> None:
    path = write_federation(tmp_path, **QUICK)
    source = tomllib.loads(path.read_text())
    source["party"][1] |= changes
    save_federation(tmp_path, source)
    ended = securevfl(capfd, "simulate", path, "--out", tmp_path / "run")
    assert ended.code == 2
    assert message in ended.complaint
    assert "hunter2" not in ended.err


def test_what_was_recognised_is_said_in_a_run(tmp_path: Path, capfd: Capture) -> None:
    """A secondary's file with semicolons and decimal commas trains, and its reading is printed."""
    path = write_federation(tmp_path, **QUICK)
    table = next(tmp_path.glob(tomllib.loads(path.read_text())["party"][1]["data"]))
    pd.read_csv(table).to_csv(table, index=False, sep=";", decimal=",")
    ended = securevfl(capfd, "simulate", path, "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    said = 'reading = { separator = ";", decimal = "," } says so for good'
    assert [line for line in ended.warnings if said in line]


def test_an_older_pandas_is_refused(tmp_path: Path) -> None:
    """Which pip would not install, and which reads other features in silence."""
    path = write_federation(tmp_path)
    code = (
        "import sys, pandas; pandas.__version__ = '2.2.3'; "
        f"sys.argv = ['securevfl', 'check', {str(path)!r}]; "
        "from securevfl.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("securevfl: pandas 2.2.3 is installed")
    assert done.stderr.count("\n") == 1
    assert "pandas>=3" in done.stderr
