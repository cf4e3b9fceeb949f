"""Packages of extras, where they are missing: what needs none of them works, the rest says so."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pytest
from helpers.patience import PATIENCE_S

from securevfl.core.errors import EXTRAS
from securevfl.testing import write_federation

_OTHERS = ("PIL", "charset_normalizer", "platformdirs", "polars", "tomli_w")

_WITHOUT = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
names, *commands = json.load(sys.stdin)
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from securevfl.cli.main import main
for command in commands:
    sys.argv, code = ["securevfl", *command], 0
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


ROOT = Path(__file__).parents[3]


def test_few_packages_are_mandatory_and_every_other_has_its_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 14
    for package, extra in EXTRAS.items():
        brought = " ".join(project["optional-dependencies"][extra]).replace("-", "_")
        assert package in brought


Ended = tuple[int, str, str]
"""Exit code, output and messages of a command."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation on CSV files, another with a Parquet file, and new rows."""
    folder = tmp_path_factory.mktemp("federation")
    privacy = {"epsilon": 8.0, "delta": 1e-5, "encoder": "frozen", "links_per_record": 2}
    training = {"epochs": 1, "batch_size": 16}
    path = write_federation(folder, rows=60, privacy=privacy, training=training)
    path.write_text(path.read_text().replace("[[party]]", '[[party]]\nscaling = "none"'))
    table = pd.read_csv(folder / "agency.csv")
    table.drop(columns="y")[:5].to_csv(folder / "new.csv", index=False)
    table.to_parquet(folder / "agency.parquet")
    (folder / "other.toml").write_text(path.read_text().replace("agency.csv", "agency.parquet"))
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """Run commands in one interpreter that has no package of an extra."""
    run = folder / "run"
    new, out = ("--rows", folder / "new.csv"), ("--out", folder / "out.csv")
    commands = {
        "simulate": ("simulate", folder / "fed.toml", "--out", run),
        "predict": ("predict", run, *new, *out, "--data-root", folder),
        "report": ("report", run),
        "parquet": ("simulate", folder / "other.toml", "--out", folder / "other"),
    }
    asked = [[*EXTRAS, *_OTHERS], *([str(word) for word in one] for one in commands.values())]
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return dict(zip(commands, map(json.loads, done.stdout.splitlines()), strict=True))


def test_a_run_on_csv_files_needs_no_extra(folder: Path, ended: dict[str, Ended]) -> None:
    """It ends well under a promise, without a report, and predicts; ``report`` says what lacks."""
    code, printed, messages = ended["simulate"]
    assert code == 0, messages
    said = " ".join(messages.split())
    assert "warning: no report: this needs the package matplotlib" in said
    assert "report:" not in printed
    assert not (folder / "run" / "report.html").exists()
    code, _, messages = ended["predict"]
    assert code == 0, messages
    assert len(pd.read_csv(folder / "out.csv")) == 5
    code, _, messages = ended["report"]
    assert code == 2
    assert re.fullmatch(r"securevfl: .*pip install 'securevfl\[report\]'\n", messages)


def test_a_parquet_table_says_what_to_install(ended: dict[str, Ended]) -> None:
    code, _, messages = ended["parquet"]
    assert code == 2
    assert messages.splitlines()[-1].endswith("pip install 'securevfl[parquet]'")
    assert "Traceback" not in messages
