"""The federation file in memory: what it says of parties, and the hash that parties compare."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from securevfl import read_federation
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.config.rules import require_own_files
from securevfl.config.sections import parse_address
from securevfl.core.errors import ConfigError
from securevfl.testing import save_federation, write_federation

SPELLED = """
[linkage]
protection = 'none'
[federation]
seed = 3 # a comment
task = "multiclass"
name = "test"
[model]
family = "fet"
neighbours = 4
[privacy]
mechanism = "none"
delta = 1e-5
[[party]]
key = ["lon", "lat"]
name = "agency"
role = "primary"
data = "a.csv"
label = "y"
address = "127.0.0.1:7431"
[[party]]
name = "bank"
role = "secondary"
data = "b.csv"
key = [ "lon", "lat", ]
"""

RESPELLED = """
federation = { name = "test", task = "multiclass", seed = 0x3 }
model = { neighbours = 4, family = "fet" }
privacy = { delta = 0.00001, mechanism = "none" }
linkage = { protection = "none" }
[[party]]
name = "agency"
role = "primary"
label = "y"
address = "127.0.0.1:7431"
data = "a.csv"
key = ["lon", "lat"]
[[party]]
role = "secondary"
name = "bank"
data = "b.csv"
key = ["lon", "lat"]
"""


def parsed(text: str) -> FederationConfig:
    return parse_federation(tomllib.loads(text), file="test")


def test_digest_is_of_the_content_not_of_its_spelling() -> None:
    """Order of fields, comments, quotes and number formats do not change the hash."""
    assert parsed(SPELLED).digest == parsed(RESPELLED).digest
    assert len(parsed(SPELLED).digest) == 64


CHANGES = [
    ("seed = 3", "seed = 4"),
    ("delta = 1e-5", "delta = 1e-6"),
    ("neighbours = 4", "neighbours = 5"),
    ('data = "b.csv"', 'data = "c.csv"'),
    ('name = "bank"', 'name = "rival"'),
    ('address = "127.0.0.1:7431"', 'address = "127.0.0.1:7432"'),
    ('key = ["lon", "lat"]\nname', 'key = ["lat", "lon"]\nname'),
]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_digest_tells_any_other_content(old: str, new: str) -> None:
    """One changed value, wherever it is, gives another hash."""
    assert SPELLED.count(old) == 1
    assert parsed(SPELLED.replace(old, new)).digest != parsed(SPELLED).digest


def test_digest_tells_the_order_of_parties() -> None:
    """Ranks are places in the file, and masks are bound to ranks."""
    source = tomllib.loads(SPELLED)
    turned = {**source, "party": source["party"][::-1]}
    assert parse_federation(turned, file="t").digest != parse_federation(source, file="t").digest


def test_settings_digest_survives_a_restart() -> None:
    """A resumed run may have another address and new identities, and nothing else."""
    moved = SPELLED.replace("127.0.0.1:7431", "10.0.0.7:9000").replace(
        'name = "bank"', 'name = "bank"\nidentity = "ed25519:AAAA"'
    )
    assert parsed(moved).digest != parsed(SPELLED).digest
    assert parsed(moved).settings_digest == parsed(SPELLED).settings_digest
    reseeded = moved.replace("seed = 3", "seed = 4")
    assert parsed(reseeded).settings_digest != parsed(SPELLED).settings_digest


def test_ranks_and_roles(tmp_path: Path) -> None:
    """The primary is 0 wherever it stands in the file; secondaries count in the file's order."""
    path = write_federation(tmp_path, secondaries=3, rows=20)
    source = tomllib.loads(path.read_text())
    source["party"] = source["party"][1:] + source["party"][:1]
    config = read_federation(save_federation(tmp_path, source))
    assert config.ranks == {"agency": 0, "bank-1": 1, "bank-2": 2, "bank-3": 3}
    assert config.primary.name == "agency"
    assert [party.name for party in config.secondaries] == ["bank-1", "bank-2", "bank-3"]
    assert config.party("bank-2").data == "bank-2.csv"
    with pytest.raises(ConfigError, match=r"'bank-7'.*agency"):
        config.party("bank-7")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:7431", ("127.0.0.1", 7431)),
        ("host.example:0", ("host.example", 0)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_address(text: str, parts: tuple[str, int]) -> None:
    """Host and port come apart, brackets of IPv6 come off."""
    assert parse_address(text) == parts


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:65536", "host:-1", "host:²"])
def test_address_that_is_none(text: str) -> None:
    """Anything else is refused, with an example of what is wanted."""
    with pytest.raises(ConfigError, match="host:port"):
        parse_address(text)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "..", "ä", "a" * 41, "a\nb"])
def test_party_name_is_a_safe_folder(name: str) -> None:
    """A party's name becomes a folder, so it cannot be a path or a line break."""
    source: dict[str, Any] = tomllib.loads(SPELLED)
    source["party"][1]["name"] = name
    with pytest.raises(ConfigError, match=r"party\[1\]\.name"):
        parse_federation(source, file="test")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bounds = { day = ['2024-01-01', '2023-01-01'] }", r"bounds: must be \[low, high\]"),
        ("bounds = { day = ['1.1.2024', '2.1.2024'] }", "must be a date in ISO form"),
        ("bounds = { day = ['2024-01-01', 3.0] }", r"bounds: must be \[low, high\]"),
        ("bounds = [1, 2, 3]", r"bounds: must be \[low, high\], got \[1.0, 2.0, 3.0\]"),
        ("bounds = [0, nan]", r"bounds: must be \[low, high\]"),
        ("missing = 'drop'", "missing: must be one of 'fill', 'refuse'; got 'drop'"),
        ("max_categories = 0", "max_categories must be at least 1"),
        ("missing = 'refuse'\nmissing_columns = ['a']", "missing_columns: goes with missing"),
    ],
)
def test_what_a_party_says_of_its_columns_is_checked(line: str, message: str) -> None:
    """Dates as bounds are read as dates, so that a wrong one is named before any table is read."""
    scaling = "scaling = 'bounds'\n" if "bounds" in line else ""
    with pytest.raises(ConfigError, match=message) as caught:
        parsed(f"{SPELLED}\n{scaling}{line}\n")
    assert "\n" not in str(caught.value)


def test_bounds_may_be_dates() -> None:
    """Beside numbers of other columns, and with a time of day."""
    both = 'bounds = { day = ["2015-01-01", "2025-12-31T00:00"], debt = [0, 9] }'
    config = parsed(f'{SPELLED}\nscaling = "bounds"\n{both}\nmissing_columns = ["debt"]\n')
    assert config.secondaries[0].bounds == {
        "day": ("2015-01-01", "2025-12-31T00:00"),
        "debt": (0.0, 9.0),
    }


@pytest.mark.parametrize("changes", [{"key": ["y", "lat"]}, {"exclude": ["lon"]}])
@pytest.mark.parametrize("metric", ["exact", "euclidean"])
def test_a_column_has_one_role(tmp_path: Path, metric: str, changes: dict[str, Any]) -> None:
    """Whether keys are texts or numbers: a label in a key would be shown to every secondary."""
    source = tomllib.loads(write_federation(tmp_path, secondaries=1).read_text())
    source["linkage"]["metric"] = metric
    source["party"][0] |= changes
    with pytest.raises(ConfigError, match="one column has one role"):
        read_federation(save_federation(tmp_path, source))


@pytest.mark.parametrize("data", ["data\tel.csv", "data\\tel.csv"])
def test_a_path_with_backslashes_is_named(tmp_path: Path, data: str) -> None:
    """A tab that an escape has become, and a backslash between single quotes."""
    source = tomllib.loads(write_federation(tmp_path, secondaries=1).read_text())
    source["party"][1]["data"] = data
    with pytest.raises(ConfigError, match="forward slashes"):
        read_federation(save_federation(tmp_path, source))


def test_two_parties_have_two_tables(tmp_path: Path) -> None:
    """Also where a link or a source file leads to one; two sheets of a workbook are two."""
    source = tomllib.loads(write_federation(tmp_path, secondaries=1).read_text())
    first = source["party"][0]["data"]
    (tmp_path / "link.csv").symlink_to(tmp_path / first)
    (tmp_path / "own.source.toml").write_text(f'file = "{first}"')
    for other in (first, "link.csv", "own.source.toml"):
        source["party"][1]["data"] = other
        config = read_federation(save_federation(tmp_path, source))
        with pytest.raises(ConfigError, match="have one table"):
            require_own_files(config, tmp_path)
    for party, sheet in zip(source["party"], ("a", "b"), strict=True):
        party |= {"data": first, "reading": {"table": sheet}}
    require_own_files(read_federation(save_federation(tmp_path, source)), tmp_path)
