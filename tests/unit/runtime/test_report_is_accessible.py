"""A report read by others than eyes: axe-core in a headless browser, light, dark, wide, narrow."""

import html
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from helpers.federations import FROZEN
from helpers.labelled_runs import write

from securevfl.desk.report.page import write_report
from securevfl.lab.attacks.run_audit import audit_run
from securevfl.testing import run_in_process

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
axe = pytest.importorskip("axe_core_python")
pytestmark = [pytest.mark.pictures, pytest.mark.skipif(BROWSER is None, reason="needs Chromium")]

_RUN = """
axe.run(document, {}).then(found => {
  document.title = "AXE" + JSON.stringify(found.violations.map(
    one => [one.id, one.nodes.map(node => node.html.slice(0, 120))]))
})
"""


def violations(page: str, folder: Path, *, width: int) -> list[Any]:
    """Return what axe-core complains of, with the elements that it is about."""
    script = files(axe).joinpath("axe.min.js").read_text(encoding="utf-8")
    path = folder / "with_axe.html"
    path.write_text(page.replace("</body>", f"<script>{script}{_RUN}</script></body>"), "utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
    shown = subprocess.run(
        [str(BROWSER), *options, f"--window-size={width},900", "--dump-dom", f"file://{path}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = re.search(r"<title>AXE(.*?)</title>", shown.stdout, re.DOTALL)
    assert title is not None, "axe did not end"
    found: list[Any] = json.loads(html.unescape(title[1]))
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the report of a run behind a promise that was attacked."""
    folder = tmp_path_factory.mktemp("run")
    path = write(folder, {"privacy": FROZEN})
    run_in_process(path, folder / "run", record_mib=16)
    assert audit_run(folder / "run", ["row-numbers", "reconstruction"]).findings
    return write_report(folder / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [420, 1200])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_stands_in_the_way(page: str, width: int, dark: bool, tmp_path: Path) -> None:
    """Headings in order, names of pictures, contrast, tables that can be reached by keys."""
    if dark:
        page = page.replace("@media screen and (prefers-color-scheme: dark)", "@media screen")
    assert violations(page, tmp_path, width=width) == []


def test_the_check_can_fail(page: str, tmp_path: Path) -> None:
    """Of a picture without a name, and of a text that is hardly seen."""
    spoilt = page.replace("</h1>", '</h1><img src="x.png"><p style="color:#ddd">hardly</p>', 1)
    found = violations(spoilt, tmp_path, width=1200)
    assert {one for one, _ in found} == {"image-alt", "color-contrast"}
