"""What the README and the shortest federation file show works as it stands, and stays short."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import securevfl
from helpers.housing import write_tables
from helpers.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


STARTING = (ROOT / "docs/starting.md").read_text(encoding="utf-8").split("## By hand")[1]
STARTING = STARTING.split("\n## ")[0]
ORDERS = (ROOT / "docs/orders.md").read_text(encoding="utf-8")


def block(language: str, page: str = README) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)
    return found


def commands(page: str) -> list[str]:
    """Return the lines that call securevfl, continued ones in one."""
    lines = page.replace("\\\n    ", "").splitlines()
    return [line for line in lines if line.startswith("securevfl ")]


def test_the_federation_file_runs_keeps_its_epsilon_and_gains(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As it stands, on tables where there is something to gain.

    With fresh noise the joint RMSE had mean 125.3, deviation 11.0, over 20 runs; alone has 161.9.
    """
    write_tables(tmp_path)
    path = tmp_path / "fed.toml"
    path.write_text(block("toml", STARTING), encoding="utf-8")

    ended = securevfl(capfd, "simulate", path, "--out", tmp_path / "run", "--json")

    assert ended.code == 0, ended.err
    metrics = json.loads(ended.out)
    assert metrics["metric"] == "rmse"
    assert metrics["privacy"]["epsilon"] == pytest.approx(8.0, rel=1e-3)
    assert metrics["privacy"]["epsilon"] <= 8.0
    assert metrics["test"] < metrics["alone_test"]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that holds what a wheel of this tree installs, and nothing else."""
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "securevfl", source / "securevfl", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input")
    quickly = ("--no-deps", "--no-index", "--no-compile")
    run(*pip, "wheel", *quickly[:2], "--no-build-isolation", "-w", tmp_path / "wheels", source)
    (wheel,) = (tmp_path / "wheels").iterdir()
    run(*pip, "install", *quickly, "--target", tmp_path / "site", wheel)
    return tmp_path / "site"


def run(*command: object, **options: Any) -> str:
    ended = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        **options,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_python_lines_run_where_the_wheel_is_installed(installed: Path, tmp_path: Path) -> None:
    """Outside the repository, on the tables of docs/orders.md: its epsilon is kept.

    The template of the report and the marker of types are in the wheel, and tests are not.
    """
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    made = block("python", ORDERS).replace("people = 3000", "people = 600").replace("2500", "500")
    lines = f"{made}\n{block('python')}\nprint(sv.__file__)\n"
    path = {**os.environ, "PYTHONPATH": str(installed)}
    *shown, where = run(sys.executable, "-c", lines, cwd=elsewhere, env=path).splitlines()

    assert Path(where).is_relative_to(installed)
    assert shown[0].startswith("RunResult(simulation: class-means, binary, 2 parties")
    joint, alone = map(float, re.findall(r"(\d\.\d+) by the", shown[1]))
    assert 0.5 < alone < 0.8
    assert 0.5 < joint < 0.9
    assert shown[2].split() == ["epsilon:", "2"]
    ours = {path.relative_to(ROOT) for path in (ROOT / "securevfl").rglob("*") if path.is_file()}
    theirs = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    assert {path for path in ours if path.suffix != ".pyc"} <= theirs
    assert {path.parts[0] for path in theirs if path.suffix == ".py"} == {"securevfl"}


def test_the_commands_are_those_of_the_page_that_tests_run() -> None:
    """``tests/docs/test_orders_page.py`` runs every line of docs/orders.md."""
    assert len(commands(README)) == 4
    assert set(commands(README)) <= set(commands(ORDERS))


def test_it_is_as_short_as_it_says() -> None:
    assert len(README.splitlines()) <= 120
    assert len(block("toml", STARTING).splitlines()) == 10
    assert len([line for line in block("python").splitlines() if line]) <= 10


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https://)([^)#]+)", README)

    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).is_file()] == []
