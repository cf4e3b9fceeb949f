"""Real tables by name."""

import bz2
from pathlib import Path

import numpy as np
import pytest

from research.common.folder_tables import data_folder, load_folder
from research.common.full_tables import load_full
from securevfl.core.errors import ConfigError, DataError
from securevfl.lab.datasets import load_builtin, split_table, split_views


def real_data() -> None:
    """Skip where the real tables are not at hand."""
    if data_folder() is None:
        pytest.skip("SECUREVFL_DATA is not set")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("digits", (1797, 64)),
        ("breast_cancer", (569, 30)),
        ("wine", (178, 13)),
        ("diabetes", (442, 10)),
    ],
)
def test_builtin_tables_can_be_split(name: str, shape: tuple[int, int]) -> None:
    """Every built-in table has its known size, and fits its task."""
    table = load_builtin(name)

    assert table.X.shape == shape
    assert split_table(table.X, table.y, parties=2, task=table.task)[0].num_rows == shape[0]


def test_unknown_names_are_refused() -> None:
    """With the names that there are."""
    with pytest.raises(ConfigError, match="no built-in table 'iris'; there are digits"):
        load_builtin("iris")


def test_a_wrong_data_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not set, no folder, or a folder without the table: each says what to do."""
    monkeypatch.delenv("SECUREVFL_DATA", raising=False)
    assert data_folder() is None
    with pytest.raises(ConfigError, match="set SECUREVFL_DATA to the folder that holds 'hdb'"):
        load_folder("hdb")
    monkeypatch.setenv("SECUREVFL_DATA", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="absent is not a folder"):
        load_full("mnist")
    monkeypatch.setenv("SECUREVFL_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="has no folder 'hdb'"):
        load_folder("hdb")


@pytest.mark.parametrize(
    ("name", "primary", "secondary", "key_dim"),
    [
        ("hdb", (92_240, 68), (165, 8), 2),
        ("house_kc", (21_408, 17), (7_739, 25), 2),
        ("fate_breast", (569, 10), (569, 20), 1),
        ("fate_vehicle", (846, 9), (846, 9), 1),
    ],
)
def test_two_party_folders_are_read(
    name: str, primary: tuple[int, int], secondary: tuple[int, int], key_dim: int
) -> None:
    """Sizes are those that the folders' descriptions state."""
    real_data()
    first, second = load_folder(name)

    assert (first.num_rows, first.num_features) == primary
    assert (second.num_rows, second.num_features) == secondary
    assert first.key_dim == second.key_dim == key_dim
    assert first.labels is not None
    assert second.labels is None


def test_full_tables_are_read() -> None:
    """Letter has 26 classes, mnist 60,000 training rows, mfeat six views that cover its columns."""
    real_data()
    letter, mfeat = load_full("letter"), load_full("mfeat")

    assert letter.X.shape == (20_000, 16)
    assert len(np.unique(letter.y)) == 26
    assert mfeat.X.shape == (2_000, 649)
    assert sorted(column for view in mfeat.views.values() for column in view) == list(range(649))
    assert len(split_views(mfeat.X, mfeat.y, views=mfeat.views)) == 6
    assert load_full("mnist").X.shape == (60_000, 784)


def test_gisette_is_read_as_libsvm_gives_it_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Columns from 1 on, those that are not named are zero; two classes, -1 and 1."""
    (tmp_path / "gisette").mkdir()
    file = tmp_path / "gisette" / "gisette_scale.bz2"
    monkeypatch.setenv("SECUREVFL_DATA", str(tmp_path))
    with pytest.raises(DataError, match="gisette_scale"):
        load_full("gisette")
    lines = [f"{label} 1:0.5 {column}:-1 12:0.25\n" for label in (1, -1) for column in (2, 3, 5)]
    file.write_bytes(bz2.compress("".join(lines * 5).encode()))
    table = load_full("gisette")
    assert table.X.shape == (30, 12)
    assert table.X[1].tolist() == [0.5, 0, -1, *[0] * 8, 0.25]
    assert sorted(set(table.y)) == [-1, 1]
    (tmp_path / "gisette" / "gisette_scale.bz2").write_bytes(b"no archive")
    with pytest.raises(DataError, match="can't be read"):
        load_full("gisette")


def test_gisette_has_its_size() -> None:
    """As the collection states it, where it is at hand."""
    folder = data_folder()
    if folder is None or not (folder / "gisette").is_dir():
        pytest.skip("gisette is not at hand")
    table = load_full("gisette")
    assert table.X.shape == (6000, 5000)
    assert table.task == "binary"
