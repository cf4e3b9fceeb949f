"""What ``--out`` may name: of every command that has it, found by walking the command line."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer
from helpers.command_line import Ended, securevfl

from securevfl import simulate
from securevfl.cli.main import app
from securevfl.testing import write_federation

Capture = pytest.CaptureFixture[str]

FILES = {
    "predict": (["run", "--rows", "new.csv"], ["new.csv", "bank-1.csv", "run/federation.toml"]),
    "init": (
        ["--primary", "agency.csv", "--secondary", "bank-1.csv", "--label", "y", "--overwrite"],
        ["agency.csv", "bank-1.csv"],
    ),
    "columns": (["bank-1.csv"], ["bank-1.csv"]),
    "model embeddings": (["run"], ["bank-1.csv", "agency.csv", "run/metrics.json"]),
}
"""Commands that write a file: their arguments, and the files that they read."""

RUNS = {
    "demo": [],
    "simulate": ["fed.toml"],
    "train": ["fed.toml"],
    "party": ["fed.toml", "--name", "agency", "--identity", "ids"],
    "mpc": ["fed.toml", "fed.toml"],
    "link": ["fed.toml"],
    "lab compare": ["fed.toml", "--methods", "alone"],
}
"""Commands that write a run or a study."""

FOLDERS = {
    "identity create": ["fed.toml"],
    "identity provision": ["fed.toml", "--name", "agency"],
}
"""Commands that write several files beside others."""


def commands(of: Any, *words: str) -> Iterator[str]:
    """Yield every command that has the option ``--out``."""
    for name, command in getattr(of, "commands", {}).items():
        yield from commands(command, *words, name)
    if any("--out" in parameter.opts for parameter in of.params):
        yield " ".join(words)


def test_every_output_is_tried_here() -> None:
    assert set(commands(typer.main.get_command(app))) == {*FILES, *RUNS, *FOLDERS}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with tables, a federation file, new rows and a run."""
    folder = tmp_path_factory.mktemp("outputs")
    path = write_federation(
        folder,
        rows=60,
        training={"epochs": 1, "batch_size": 32},
        model={"family": "top1sim"},
        base={"estimator": "linear"},
    )
    simulate(path, out=folder / "run")
    table = pd.read_csv(folder / "agency.csv")
    table.assign(prediction=1, note="x", row="r").to_csv(folder / "new.csv", index=False)
    return folder


@pytest.fixture
def there(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def run_command(capfd: Capture, command: str, arguments: list[str], out: object) -> Ended:
    return securevfl(capfd, *command.split(), *arguments, "--out", out)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("command", "read"), [(name, read) for name, (_, files) in FILES.items() for read in files]
)
def test_no_output_replaces_what_its_command_reads(
    there: Path, tmp_path: Path, capfd: Capture, command: str, read: str
) -> None:
    """Neither by its name, nor by a link to it."""
    before = contents(there)
    link = tmp_path / "link.csv"
    link.symlink_to(there / read)
    for out in (read, there / read, link):
        ended = run_command(capfd, command, FILES[command][0], out)
        assert ended.code == 2
        assert "which this command reads" in ended.complaint
    assert contents(there) == before


@pytest.mark.parametrize(
    ("command", "name"), [("predict", "p.csv"), ("init", "f.toml"), ("columns", "c.json")]
)
def test_an_output_goes_where_its_link_leads_and_keeps_the_mode(
    there: Path, tmp_path: Path, capfd: Capture, command: str, name: str
) -> None:
    (tmp_path / "share").mkdir()
    real, link = tmp_path / "share" / name, tmp_path / name
    real.write_text("of yesterday")
    real.chmod(0o664)
    link.symlink_to(real)
    assert run_command(capfd, command, FILES[command][0], link).code == 0
    assert link.is_symlink()
    assert "of yesterday" not in real.read_text()
    assert stat.S_IMODE(real.stat().st_mode) == 0o664


@pytest.mark.parametrize("name", ["p.csv.gz", "p.parquet"])
def test_the_ending_of_predictions_is_believed(
    there: Path, tmp_path: Path, capfd: Capture, name: str
) -> None:
    arguments = FILES["predict"][0]
    for out in (tmp_path / "p.csv", tmp_path / name):
        assert run_command(capfd, "predict", arguments, out).code == 0
    read = pd.read_parquet if name.endswith("parquet") else pd.read_csv
    expected = pd.read_csv(tmp_path / "p.csv")
    pd.testing.assert_frame_equal(read(tmp_path / name), expected, check_dtype=False)


@pytest.mark.parametrize(
    ("command", "name"), [("predict", "p.xlsx"), ("init", "fed.toml.gz"), ("columns", "c.csv")]
)
def test_an_ending_that_would_not_be_true_is_refused(
    there: Path, tmp_path: Path, capfd: Capture, command: str, name: str
) -> None:
    ended = run_command(capfd, command, FILES[command][0], tmp_path / name)
    assert (ended.code, list(tmp_path.iterdir())) == (2, [])
    assert "must end with" in ended.complaint


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_predictions_go_into_a_pipe(there: Path, tmp_path: Path, capfd: Capture) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run_command(capfd, "predict", FILES["predict"][0], pipe).code == 0
        assert b"prediction" in os.read(reader, 1 << 16)
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("command", RUNS)
@pytest.mark.parametrize("left", ["of others", "finished"])
def test_a_folder_is_one_runs(
    there: Path, tmp_path: Path, capfd: Capture, command: str, left: str
) -> None:
    """Another run is refused before anything is written, whatever its parties are called."""
    folder = tmp_path / "used"
    party = "stranger" if left == "of others" else "agency"
    (folder / "parties" / party).mkdir(parents=True)
    (folder / "parties" / party / "run.pt").touch()
    if left == "finished":
        (folder / "metrics.json").write_text("{}")
    before = contents(folder)
    ended = run_command(capfd, command, RUNS[command], folder)
    assert ended.code == 2
    assert "choose another --out" in ended.complaint
    assert contents(folder) == before


@pytest.mark.parametrize("command", ["simulate", "train", "link"])
def test_a_run_does_not_write_over_its_federation_file(
    there: Path, tmp_path: Path, capfd: Capture, command: str
) -> None:
    """One that is called as the copy in the run folder."""
    path = tmp_path / "federation.toml"
    path.write_bytes((there / "fed.toml").read_bytes())
    before = path.read_bytes()
    assert run_command(capfd, command, [str(path), "--data-root", str(there)], tmp_path).code == 2
    assert path.read_bytes() == before


@pytest.mark.parametrize("command", {**RUNS, **FOLDERS})
def test_a_folder_does_not_replace_a_file(
    there: Path, tmp_path: Path, capfd: Capture, command: str
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    ended = run_command(capfd, command, {**RUNS, **FOLDERS}[command], file)
    assert (ended.code, file.read_text()) == (2, "mine")


@pytest.mark.parametrize("name", ["prediction", "probability_1", "note", "without"])
def test_ids_are_not_called_as_a_column_of_predictions(
    there: Path, tmp_path: Path, capfd: Capture, name: str
) -> None:
    table = pd.read_csv("new.csv").assign(**{name: "R"})
    table.to_csv(tmp_path / "new.csv", index=False)
    rows = ["run", "--rows", str(tmp_path / "new.csv"), "--id", name]
    ended = run_command(capfd, "predict", rows, tmp_path / "p.csv")
    assert (ended.code, (tmp_path / "p.csv").exists()) == (2, False)
    assert f"--id {name}" in ended.complaint
