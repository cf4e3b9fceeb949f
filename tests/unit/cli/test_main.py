"""The command as a whole: help, version, JSON, and how little it loads."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers.command_line import securevfl
from helpers.patience import PATIENCE_S

from securevfl.cli.main import app, main
from securevfl.core.errors import ConfigError
from securevfl.testing import write_federation
from securevfl.version import __version__

Capture = pytest.CaptureFixture[str]
COMMANDS = ("demo", "train", "simulate", "lab compare", "party", "identity create", "report")
PANELS = {
    "Start": ("demo", "init", "columns", "check"),
    "Run": ("simulate", "train", "party", "predict", "serve", "model"),
    "Check and audit": ("report", "link", "ledger", "budget"),
    "Keys and identities": ("identity",),
    "Experiments": ("lab",),
}
SMALL = {
    "rows": 60,
    "training": {"epochs": 1, "batch_size": 32},
    "base": {"estimator": "linear"},
}


def loaded_by(code: str) -> set[str]:
    """Return the names of all modules that a fresh interpreter has after running ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys, json\nprint(json.dumps(list(sys.modules)))"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def every_command() -> list[list[str]]:
    """Return the words of every command and group."""
    found: list[list[str]] = []

    def collect(group: Any, words: list[str]) -> None:
        for name, command in getattr(group, "commands", {}).items():
            found.append([*words, name])
            collect(command, found[-1])

    collect(typer.main.get_command(app), [])
    return found


def test_version(capfd: Capture) -> None:
    """One line, exit code 0."""
    ended = securevfl(capfd, "--version")
    assert (ended.code, ended.out, ended.err) == (0, f"securevfl {__version__}\n", "")


def test_a_name_that_the_terminal_can_not_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command prints to an ASCII terminal has escapes for other letters."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["securevfl", "--version"])
    with pytest.raises(SystemExit):
        main()
    terminal.write("\u6536")
    terminal.flush()

    assert terminal.buffer.getvalue().endswith(b"\\u6536")  # type: ignore[attr-defined]


def test_help_names_every_command(capfd: Capture) -> None:
    """The first page lists what there is."""
    ended = securevfl(capfd, "--help")
    assert ended.code == 0
    group = typer.main.get_command(app)
    assert len(group.commands) <= 17
    for command in group.commands:
        assert f" {command} " in ended.out


def test_help_lists_commands_in_panels(capfd: Capture) -> None:
    """In groups; none is left over."""
    out = securevfl(capfd, "--help").out
    places = [out.index(f" {group} ─") for group in PANELS]
    assert places == sorted(places)
    assert " Commands ─" not in out
    rows = [line[2:].split(" ")[0] for line in out[places[0] :].splitlines() if line[:1] == "│"]
    order = [name for names in PANELS.values() for name in names]
    assert [name for name in rows if name in order] == order


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("--epochs", "training.epochs"),
        ("--epsilon", "privacy.epsilon"),
        ("--links-per-record", "privacy.links_per_record"),
        ("--neighbours", "model.neighbours"),
    ],
)
def test_an_option_that_is_a_setting_is_named_so(option: str, setting: str, capfd: Capture) -> None:
    ended = securevfl(capfd, "train", "fed.toml", option, "5")
    assert ended.code == 2
    said = " ".join(ended.err.replace("│", " ").split())
    assert f"it is a setting of the federation file: write {setting} there" in said
    assert "setting" not in securevfl(capfd, "predict", "run", option, "5").err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help(command: str, flag: str, capfd: Capture) -> None:
    """Both spellings work and name --json, which every computing command has."""
    ended = securevfl(capfd, *command.split(), flag)
    assert ended.code == 0
    assert "--json" in ended.out
    assert ended.err == ""


@pytest.mark.parametrize("arguments", [("trian",), ("train",), ("train", "a", "--oout", "b")])
def test_mistyped_command_is_wrong_input(arguments: tuple[str, ...], capfd: Capture) -> None:
    """Exit code 2 and no traceback."""
    ended = securevfl(capfd, *arguments)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert ended.out == ""


def test_json_is_the_only_thing_on_stdout(tmp_path: Path, capfd: Capture) -> None:
    """One object with the figures of metrics.json; progress and warnings are on stderr."""
    path = write_federation(tmp_path, **SMALL)
    out = tmp_path / "run"
    ended = securevfl(capfd, "simulate", path, "--out", out, "--json")
    assert ended.code == 0
    printed = json.loads(ended.out)
    assert printed == json.loads((out / "metrics.json").read_text())
    assert {"task", "family", "metric", "train", "validation", "test", "alone_test"} <= set(printed)
    assert any('mechanism = "none"' in text for text in ended.warnings)
    again = securevfl(capfd, "simulate", path, "--out", out, "--json", "--resume")
    assert again.code == 0
    assert json.loads(again.out) == printed
    assert "finished already" in again.err
    report = securevfl(capfd, "report", out, "--json")
    assert json.loads(report.out) == {"report": str(out / "report.html")}


def test_provision_in_json(tmp_path: Path, capfd: Capture) -> None:
    """One public text a party; private keys stay in their folders, readable by their owner only."""
    path = write_federation(tmp_path, rows=30)
    ended = securevfl(capfd, "identity", "create", path, "--out", tmp_path / "ids", "--json")
    assert ended.code == 0
    identities = json.loads(ended.out)["identities"]
    assert set(identities) == {"agency", "bank-1", "bank-2"}
    assert all(text.startswith("ed25519:") for text in identities.values())
    for name in identities:
        assert (tmp_path / "ids" / name / "identity.key").stat().st_mode & 0o777 == 0o600


def test_error_of_several_lines_is_one(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a message quotes, the user gets one line."""

    def fail(*_arguments: object, **_options: object) -> None:
        raise ConfigError("first\nsecond")

    monkeypatch.setattr("securevfl.desk.report.page.write_report", fail)
    ended = securevfl(capfd, "report", "somewhere")
    assert (ended.code, ended.err) == (2, "securevfl: first second\n")


def test_interrupt_is_no_traceback(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends with the shell's usual code and one word."""

    def interrupt(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("securevfl.desk.report.page.write_report", interrupt)
    ended = securevfl(capfd, "report", "somewhere")
    assert (ended.code, ended.err) == (130, "securevfl: interrupted\n")


def test_package_itself_is_light() -> None:
    """Importing the package and its errors loads nothing big."""
    heavy = {"torch", "crypten", "pandas", "sklearn", "dp_accounting"}
    assert not heavy & loaded_by(
        "import securevfl\nsecurevfl.SecureVflError\nsecurevfl.__version__"
    )


def test_budget_needs_no_torch() -> None:
    """The calculator answers without torch or CrypTen, from the command's own entry point."""
    code = (
        "import sys\n"
        "sys.argv = ['securevfl', 'budget', '--noise-multiplier', '1.0', '--sampling-rate', '0.1',"
        " '--steps', '10', '--delta', '1e-5', '--json']\n"
        "from securevfl.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
    )
    assert not {"torch", "crypten"} & loaded_by(code)


def test_version_and_help_load_no_numerics() -> None:
    """Whoever asks what there is does not wait for libraries that only computing needs."""
    heavy = {"numpy", "scipy", "pandas", "matplotlib", "sklearn", "torch", "crypten"}
    pages = [["--version"], ["--help"]]
    pages += [[*pages_of, "--help"] for pages_of in every_command()]
    code = (
        "import sys\n"
        "from securevfl.cli.main import main\n"
        f"for page in {pages}:\n"
        "    sys.argv = ['securevfl', *page]\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        assert not end.code, page\n"
    )
    assert not heavy & loaded_by(code)


@pytest.mark.parametrize(
    ("arguments", "buffered"),
    [
        (("check",), True),
        (("check", "--json"), False),
        (("--version",), True),
    ],
)
def test_a_reader_that_went_away_ends_a_command_quietly(
    tmp_path: Path, arguments: tuple[str, ...], buffered: bool
) -> None:
    """As ``| head -1`` does: neither a bug (1), nor a line about it."""
    command = [sys.executable, *([] if buffered else ["-u"]), "-m", "securevfl.cli.main"]
    if arguments[0] == "check":
        arguments = (*arguments, str(write_federation(tmp_path, **SMALL)))
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [*command, *arguments],
            stdout=write,
            stderr=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            timeout=PATIENCE_S,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(os.name != "posix", reason="a POSIX shell closes the streams")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_bug(tmp_path: Path, closed: str) -> None:
    """A service may have none; the exit code says what happened."""
    line = f"exec {sys.executable} -m securevfl check {tmp_path}/none.toml {closed}"
    ended = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
