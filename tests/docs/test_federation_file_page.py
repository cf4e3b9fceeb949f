"""The page of the federation file names every setting, as the settings themselves tell it."""

import dataclasses
import re
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from securevfl.config.reading import parse_federation
from securevfl.core.errors import ConfigError
from securevfl.models.registry import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/federation-file.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "make_federation_file_page.py"))


def allowed_by_the_reader(source: dict[str, Any]) -> set[str]:
    """What a refusal says is allowed where something unknown stands."""
    with pytest.raises(ConfigError, match="Allowed: ") as refused:
        parse_federation(source, file="fed.toml")
    return set(str(refused.value).split("Allowed: ")[1].split(", "))


def test_the_page_is_what_the_docstrings_say(tool) -> None:
    assert tool["page"]() == PAGE, "run: python tools/make_federation_file_page.py"


def test_every_section_that_the_reader_takes_has_a_heading() -> None:
    headings = set(re.findall(r"^## `\[+(\w+)", PAGE, flags=re.MULTILINE))

    assert headings == allowed_by_the_reader({"nonsense": {}})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_setting_of_a_family_that_the_reader_takes_is_in_its_table(family: str) -> None:
    parties = [
        {"name": "a", "role": "primary", "data": "a", "key": ["k"], "address": "127.0.0.1:0"},
        {"name": "b", "role": "secondary", "data": "b", "key": ["k"]},
    ]
    source = {
        "federation": {"name": "f", "task": "binary"},
        "privacy": {"mechanism": "none"},
        "linkage": {"protection": "none"},
        "party": parties,
        "model": {"family": family, "nonsense": 1},
    }
    (heading,) = (
        one for one in re.findall(r"^### family .*$", PAGE, re.MULTILINE) if f"`{family}`" in one
    )
    table = PAGE.split(heading)[1].split("\n#")[0]

    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == allowed_by_the_reader(source)


@pytest.mark.parametrize("section", ["federation", "training", "privacy", "runtime", "encoder"])
def test_every_setting_of_a_section_is_in_its_table(section: str, tool) -> None:
    fields = {field.name for field in dataclasses.fields(tool["section_classes"]()[section])}
    table = PAGE.split(f"## `[{section}]`")[1].split("\n## ")[0]

    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == fields


@dataclass
class Undocumented:
    epochs: int = 1
    """Passes."""

    batch_size: int = 2


def test_a_setting_without_a_docstring_is_refused(tool) -> None:
    with pytest.raises(LookupError, match=r"Undocumented\.batch_size has no docstring"):
        tool["table_of"](Undocumented)
