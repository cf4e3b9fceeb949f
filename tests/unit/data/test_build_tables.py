"""Tables of SECUREVFL_DATA come from public sources, and are those that figures rest on."""

import gzip
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from research.common import build_tables
from research.common.build_tables import TABLES, Source, Table, digest
from research.common.folder_tables import _FOLDER_TASKS
from research.common.full_tables import _FULL_TABLES

CONTENT = b"Letter,1,2\nB,3,4\nA,5,6\n"
BUILT = b"x0,x1,y\n3,4,1\n5,6,0\n"
URL = "https://example.org/at/"
MADE = Table(
    sources=(Source(url=URL, paths=("letters.csv",), sha256=digest({"": CONTENT})),),
    build=TABLES["letter"].build,
    sha256=digest({"": BUILT}),
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    place = tmp_path / "sources/example.org/at/letters.csv"
    place.parent.mkdir(parents=True)
    place.write_bytes(CONTENT)
    return tmp_path / "sources"


def test_a_table_is_built_from_its_sources(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(build_tables.TABLES, "made", MADE)
    folder = build_tables.build("made", folder=tmp_path, sources=sources)
    assert gzip.decompress((folder / "full.csv.gz").read_bytes()) == BUILT


@pytest.mark.parametrize("of_source", [True, False], ids=["source", "table"])
def test_another_source_or_table_ends_it_before_anything_is_written(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, of_source: bool
) -> None:
    other = replace(MADE, sha256="0" * 64)
    if of_source:
        other = replace(MADE, sources=(replace(MADE.sources[0], sha256="0" * 64),))
    monkeypatch.setitem(build_tables.TABLES, "made", other)
    with pytest.raises(SystemExit, match=r"has SHA-256 .*, and must have 0000"):
        build_tables.build("made", folder=tmp_path, sources=sources)
    assert not (tmp_path / "made").exists()


def test_every_table_that_is_read_has_a_source_and_a_licence() -> None:
    """Gisette alone is in no figure, and the page says so."""
    read = {*_FOLDER_TASKS, *_FULL_TABLES, "febrl"}
    assert set(TABLES) == read - {"gisette"}
    page = (Path(build_tables.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    rows = [line for line in page.partition("## Tables")[2].splitlines() if line.startswith("| ")]
    assert all(len(line.split(" | ")) == 4 for line in rows)
    named = {name for line in rows for name in line[2:].partition(" | ")[0].split(", ")}
    assert read <= named


@pytest.mark.parametrize("name", TABLES)
def test_the_folder_has_the_tables_of_the_figures(name: str) -> None:
    """Byte by byte, whoever built them."""
    if "SECUREVFL_DATA" not in os.environ:
        pytest.skip("SECUREVFL_DATA is not set")
    folder = Path(os.environ["SECUREVFL_DATA"]) / name
    if (folder / f"{name}.npz").exists():
        with np.load(folder / f"{name}.npz") as archive:
            parts = build_tables.contents(dict(archive))
    else:
        files = sorted(folder.glob("*.csv.gz"))
        parts = {path.name: gzip.decompress(path.read_bytes()) for path in files}
    assert digest(parts) == TABLES[name].sha256


def test_views_and_words_become_columns() -> None:
    """The shapes that loaders expect, of made-up files."""
    views = {f"mfeat-{name}.csv": b"0,1,0\n0.5,1.5,3\n" for name in ("fac", "mor")}
    arrays = TABLES["mfeat"].build(views)
    assert arrays["mor"].tolist() == [[0.5, 1.5]]
    assert arrays["y"].tolist() == [3]
    halves = TABLES["fate_breast"].build({"guest": b"id,y,x0\n7,1,0.5\n", "host": b"id,x0\n7,2\n"})
    expected = pd.DataFrame({"key_id": [7], "x0": [0.5], "y": [1]})
    pd.testing.assert_frame_equal(halves["primary"], expected)
