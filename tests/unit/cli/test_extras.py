"""Packages of extras, where they are missing: what needs none of them works, the rest says so."""

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
import runpy, sys
names = sys.argv.pop(1).split(",")
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
runpy.run_module("securevfl", run_name="__main__")
"""


ROOT = Path(__file__).parents[3]


def test_few_packages_are_mandatory_and_every_other_has_its_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 14
    for package, extra in EXTRAS.items():
        brought = " ".join(project["optional-dependencies"][extra]).replace("-", "_")
        assert package in brought


def without_extras(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in an interpreter that has no package of an extra."""
    names = ",".join([*EXTRAS, *_OTHERS])
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT, names, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation")
    privacy = {"epsilon": 8.0, "delta": 1e-5, "encoder": "frozen", "links_per_record": 2}
    training = {"epochs": 1, "batch_size": 16}
    path = write_federation(folder, rows=60, privacy=privacy, training=training)
    path.write_text(path.read_text().replace("[[party]]", '[[party]]\nscaling = "none"'))
    return path


def test_a_run_on_csv_files_needs_no_extra(federation: Path) -> None:
    """It ends well under a promise, without a report, and predicts; ``report`` says what lacks."""
    run = federation.parent / "run"
    ended = without_extras("simulate", federation, "--out", run)
    assert ended.returncode == 0, ended.stderr
    said = " ".join(ended.stderr.split())
    assert "warning: no report: this needs the package matplotlib" in said
    assert "report:" not in ended.stdout
    assert not (run / "report.html").exists()
    rows = pd.read_csv(federation.with_name("agency.csv")).drop(columns="y")[:5]
    rows.to_csv(federation.with_name("new.csv"), index=False)
    new, out = federation.with_name("new.csv"), federation.with_name("out.csv")
    folder = ("--data-root", federation.parent)
    told = without_extras("predict", run, "--rows", new, "--out", out, *folder)
    assert told.returncode == 0, told.stderr
    assert len(pd.read_csv(out)) == 5
    asked = without_extras("report", run)
    assert asked.returncode == 2
    assert re.fullmatch(r"securevfl: .*pip install 'securevfl\[report\]'\n", asked.stderr)


def test_a_parquet_table_says_what_to_install(federation: Path) -> None:
    table = federation.parent / "agency.csv"
    pd.read_csv(table).to_parquet(table.with_suffix(".parquet"))
    other = federation.with_name("other.toml")
    other.write_text(federation.read_text().replace("agency.csv", "agency.parquet"))
    ended = without_extras("simulate", other, "--out", federation.parent / "other")
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].endswith("pip install 'securevfl[parquet]'")
    assert "Traceback" not in ended.stderr
