"""The page of the federation file names every setting, as the settings themselves tell it."""

import dataclasses
import re
import runpy
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from federation_schema import federation_schema, section_classes
from helpers.command_line import securevfl

from securevfl.config.reading import parse_federation
from securevfl.core.errors import ConfigError
from securevfl.models.registry import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/federation-file.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "make_federation_file_page.py"))


def settings_in(table: str) -> list[str]:
    """Return the names of a table's first column, whose cells may show a default."""
    return re.findall(r"^\| `(\w+)(?: = .*?)?` \|", table, re.MULTILINE)


def allowed_by_the_reader(source: dict[str, Any]) -> set[str]:
    """What a refusal says is allowed where something unknown stands."""
    with pytest.raises(ConfigError, match="Allowed: ") as refused:
        parse_federation(source, file="fed.toml")
    return set(str(refused.value).split("Allowed: ")[1].split(", "))


def test_the_page_is_what_the_docstrings_say(tool) -> None:
    assert tool["page"]() == PAGE, "run: python tools/make_federation_file_page.py"


def test_the_schema_is_what_the_settings_say(tool, capfd) -> None:
    """It is the file of the package, and what ``check --schema`` prints."""
    path = ROOT / "securevfl/config/federation-file.schema.json"
    written = path.read_text(encoding="utf-8")

    assert tool["schema"]() == written, "run: python tools/make_federation_file_page.py"
    printed = securevfl(capfd, "check", "--schema")
    assert (printed.code, printed.out) == (0, written)


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("examples/**/*.toml")), ids=lambda path: path.stem
)
def test_the_schema_knows_every_setting_of_the_examples(path: Path) -> None:
    """So an editor marks none of them."""
    sections = federation_schema()["properties"]
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    if "federation" not in source:
        pytest.skip("no federation file")
    for name, written in source.items():
        schema, tables = sections[name], [written]
        if name == "party":
            schema, tables = schema["items"], written
        elif name == "model":
            (schema,) = (
                one
                for one in schema["anyOf"]
                if one["properties"]["family"]["const"] == written["family"]
            )
        for table in tables:
            assert set(schema.get("required", ())) <= set(table)
            assert name == "methods" or set(table) <= set(schema["properties"])


def test_the_schema_has_limits_words_and_defaults() -> None:
    sections = federation_schema()["properties"]
    training, privacy = sections["training"]["properties"], sections["privacy"]["properties"]

    epochs = {name: training["epochs"][name] for name in ("type", "minimum", "maximum", "default")}
    assert epochs == {"type": "integer", "minimum": 1, "maximum": 1_000_000, "default": 20}
    assert training["epochs"]["description"].startswith("Passes over")
    assert privacy["delta"]["exclusiveMaximum"] == 1
    assert "exact" in sections["linkage"]["properties"]["metric"]["enum"]
    assert sections["training"]["additionalProperties"] is False


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
    part = PAGE.split(heading)[1].split("\n#")[0]
    several = set(settings_in(PAGE.split("### Several families")[1].split("\n#")[0]))
    lines = re.findall(r"^Above: (.*)$", part, re.MULTILINE)
    above = {name for line in lines for name in line.split("`")[1::2]}

    assert above <= several
    allowed = allowed_by_the_reader(source)
    assert {*settings_in(part), *above} == allowed - {"neighbours"}
    if "neighbours" in allowed:
        (row,) = re.findall(r"^\| `model.neighbours`.*$", PAGE, re.MULTILINE)
        assert f"`{family}`" in row


SECTIONS = (
    *("federation", "party", "training", "base", "privacy", "linkage", "encoder", "prediction"),
    *("mpc", "runtime", "pretraining"),
)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_of_a_section_is_in_its_table(section: str) -> None:
    """Or in the first table, that of settings which most files have, and not in both."""
    fields = [field.name for field in dataclasses.fields(section_classes()[section])]
    brackets = "[[party]]" if section == "party" else f"[{section}]"
    table = PAGE.split(f"\n## `{brackets}`")[1].split("\n## ")[0].split("\n### ")[0]
    first = re.findall(rf"^\| `{section}\.(\w+)", PAGE, re.MULTILINE)

    assert sorted([*settings_in(table), *first]) == sorted(fields)


def test_the_first_table_has_the_settings_that_a_user_meets() -> None:
    first = PAGE.split("## The settings that most files have")[1].split("\n## ")[0]

    assert len(re.findall(r"^\| `\w+\.\w+", first, re.MULTILINE)) == 25


@dataclass
class Undocumented:
    epochs: int = 1
    """Passes."""

    batch_size: int = 2


def test_a_setting_without_a_docstring_is_refused(tool) -> None:
    with pytest.raises(LookupError, match=r"Undocumented\.batch_size has no docstring"):
        tool["table_of"](Undocumented)
