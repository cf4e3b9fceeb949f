"""The page of errors is what the errors and the service say."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import securevfl
from securevfl import SecureVflError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/errors.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "make_errors_page.py"))


def test_the_table_is_what_the_docstrings_say(tool: dict[str, Any]) -> None:
    assert tool["written"](PAGE) == PAGE, "run: python tools/make_errors_page.py"


def test_every_public_error_and_every_exit_code_is_on_the_page() -> None:
    named = dict(re.findall(r"^\| `(\w+)`, (\d)", PAGE, flags=re.MULTILINE))
    public = [getattr(securevfl, name) for name in securevfl.__all__ if name.endswith("Error")]
    codes = set(re.findall(r"^\| (\d+) \|", PAGE, flags=re.MULTILINE))

    assert {one.__name__ for one in public} - {SecureVflError.__name__} <= set(named)
    assert set(named.values()) <= codes
    assert {"0", "1", "130", "141"} <= codes


def test_every_status_of_the_service_is_on_the_page() -> None:
    serving = ROOT / "securevfl" / "serving"
    code = "".join(path.read_text(encoding="utf-8") for path in sorted(serving.glob("*.py")))
    found = set(re.findall(r"error_response\(\s*(\d{3}), \"(\w+)\"", code))

    assert len(found) > 5
    assert found <= set(re.findall(r"^\| (\d{3}) \| `(\w+)`", PAGE, flags=re.MULTILINE))
