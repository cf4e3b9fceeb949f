"""Aligned views: the sets at hand, and loaders of public formats on small files of that format."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from research.common.aligned.avazu import load_avazu
from research.common.aligned.halves import digits_halves, folder_views, mfeat_views, mnist_halves
from research.common.aligned.nuswide import load_nuswide
from research.common.aligned.views import AlignedViews, scarce_rows
from research.common.folder_tables import data_folder
from securevfl.core.errors import ConfigError, DataError


def views(rows: int = 40) -> AlignedViews:
    generator = np.random.default_rng(0)
    return AlignedViews(
        name="toy",
        views=tuple(generator.normal(3, 2, (rows, width)).astype(np.float32) for width in (3, 2)),
        labels=np.arange(rows) % 4,
        train=np.arange(rows - 10),
        test=np.arange(rows - 10, rows),
        metric="accuracy",
    )


@pytest.mark.parametrize(("parties", "widths"), [(2, [32, 32]), (3, [24, 24, 16])])
def test_digits_are_cut_into_strips(parties: int, widths: list[int]) -> None:
    """Side by side, the strips of a row are the digit; testing and training rows are disjoint."""
    data = digits_halves(parties)

    assert [view.shape[1] for view in data.views] == widths
    strips = [view[0].reshape(shape) for view, shape in zip(data.views, data.images, strict=True)]
    digit = np.concatenate(strips, axis=2)[0]
    assert digit.shape == (8, 8)
    assert digit[0].tolist() == [0, 0, 5 / 16, 13 / 16, 9 / 16, 1 / 16, 0, 0]
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert set(data.labels) == set(range(10))


@pytest.mark.parametrize(
    ("load", "widths", "rows"),
    [
        (lambda: mfeat_views(2), [280, 369], (1600, 400)),
        (lambda: mfeat_views(3), [222, 287, 140], (1600, 400)),
        (lambda: mnist_halves(2, rows=500), [392, 392], (500, 10000)),
        (lambda: folder_views("fate_vehicle"), [9, 9], (677, 169)),
        (lambda: folder_views("fate_breast"), [10, 20], (456, 113)),
    ],
)
def test_real_sets_have_their_known_sizes(
    load: Callable[[], AlignedViews], widths: list[int], rows: tuple[int, int]
) -> None:
    """Where the real tables are at hand."""
    if data_folder() is None:
        pytest.skip("SECUREVFL_DATA is not set")
    data = load()

    assert [view.shape[1] for view in data.views] == widths
    assert (len(data.train), len(data.test)) == rows


def test_numbers_are_standardised_by_the_training_rows_alone() -> None:
    """Another test row changes nothing in what the training rows become."""
    data = views()
    scaled = data.standardised()
    assert scaled.views[0][data.train].mean(axis=0) == pytest.approx(np.zeros(3), abs=1e-5)
    assert scaled.views[0][data.train].std(axis=0) == pytest.approx(np.ones(3), abs=1e-5)
    data.views[0][data.test] += 100
    assert np.array_equal(data.standardised().views[0][data.train], scaled.views[0][data.train])


def test_scarce_rows_are_nested_and_hold_every_class() -> None:
    """Labelled rows are aligned, aligned ones are for training, and no class is missing."""
    data = views(110)
    for seed in range(20):
        rows = scarce_rows(data, aligned=0.2, labelled=4, seed=seed)
        assert len(rows.aligned) == 20
        assert set(rows.labelled) <= set(rows.aligned) <= set(rows.local) == set(data.train)
        assert sorted(data.labels[rows.labelled]) == [0, 1, 2, 3]
    again = scarce_rows(data, aligned=0.2, labelled=4, seed=19)
    assert np.array_equal(again.labelled, rows.labelled)


def test_more_labels_than_aligned_rows_are_refused() -> None:
    """The message has both numbers."""
    with pytest.raises(ConfigError, match="7 rows, but only 6 of toy are aligned"):
        scarce_rows(views(), aligned=0.2, labelled=7, seed=0)


def test_views_that_do_not_fit_are_refused() -> None:
    """Other lengths, rows on both sides, values that are not finite."""
    data = views()
    fields = {"name": "toy", "views": data.views, "labels": data.labels, "metric": "accuracy"}
    rows = {"train": data.train, "test": data.test}
    with pytest.raises(DataError, match="as many rows as labels"):
        AlignedViews(**{**fields, "views": (data.views[0], data.views[1][1:])}, **rows)
    with pytest.raises(DataError, match="for training and for testing"):
        AlignedViews(**fields, train=data.train, test=data.train)
    data.views[1][2, 1] = np.nan
    with pytest.raises(DataError, match=r"view 2: column 'x1', row 3"):
        AlignedViews(**fields, **rows)


def write_nuswide(folder: Path, *, concepts: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Write small files of NUS-WIDE's format, and return what they hold."""
    generator = np.random.default_rng(1)
    held = {}
    for part, rows in (("Train", 12), ("Test", 7)):
        marks = (generator.random((rows, len(concepts))) < 0.4).astype(int)
        marks[:3] = [1, 0], [0, 1], [1, 1]
        held[part] = marks
        labels = folder / "Groundtruth" / "TrainTestLabels"
        labels.mkdir(parents=True, exist_ok=True)
        for column, concept in enumerate(concepts):
            text = "\n".join(str(mark) for mark in marks[:, column])
            (labels / f"Labels_{concept}_{part}.txt").write_text(text + "\n")
        features = folder / "Low_Level_Features"
        features.mkdir(exist_ok=True)
        widths = {"CH": 64, "CM55": 225, "CORR": 144, "EDH": 73, "WT": 128}
        for name, width in widths.items():
            numbers = generator.random((rows, width))
            held[f"{part}_{name}"] = numbers
            lines = [" ".join(f"{number:.6f}" for number in row) + " " for row in numbers]
            path = features / f"{part}_Normalized_{name}.dat"
            path.write_text("\n".join(lines) + "\n")
        tags = folder / "NUS_WID_Tags"
        tags.mkdir(exist_ok=True)
        words = (generator.random((rows, 1000)) < 0.05).astype(int)
        held[f"{part}_tags"] = words
        lines = ["\t".join(str(word) for word in row) + "\t" for row in words]
        (tags / f"{part}_Tags1k.dat").write_text("\n".join(lines) + "\n")
    return held


def test_nuswide_keeps_rows_of_exactly_one_concept(tmp_path: Path) -> None:
    """634 image features against 1000 tags, the authors' own split, classes in the given order."""
    held = write_nuswide(tmp_path, concepts=("sky", "lake"))
    data = load_nuswide(tmp_path, concepts=("sky", "lake"))

    one = {part: held[part].sum(axis=1) == 1 for part in ("Train", "Test")}
    assert [view.shape[1] for view in data.views] == [634, 1000]
    assert (len(data.train), len(data.test)) == (one["Train"].sum(), one["Test"].sum())
    expected = np.concatenate([held[part][one[part]].argmax(axis=1) for part in one])
    assert np.array_equal(data.labels, expected)
    histogram = held["Train_CH"][one["Train"]]
    scaled = (histogram - histogram.mean(axis=0)) / histogram.std(axis=0)
    assert data.views[0][data.train, :64] == pytest.approx(scaled, abs=1e-3)


def test_nuswide_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """A missing file and one that is too short are told by name."""
    write_nuswide(tmp_path, concepts=("sky", "lake"))
    with pytest.raises(DataError, match=r"Labels_water_Train\.txt: can't be read"):
        load_nuswide(tmp_path, concepts=("sky", "water"))
    path = tmp_path / "Low_Level_Features" / "Train_Normalized_EDH.dat"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    with pytest.raises(DataError, match=r"EDH\.dat has 11 rows, Train_Normalized_CH\.dat has 12"):
        load_nuswide(tmp_path, concepts=("sky", "lake"))


AVAZU_COLUMNS = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,"
    "device_id,device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)


def avazu_lines(rows: int) -> list[str]:
    return [
        f"1{row},{row % 3 == 0:d},14102{row % 9}{row % 24:02d},1005,0,1fbe01fe,f3845767,28905ebd,"
        f"ecad2386,7801e8d9,07d7df22,a99f214a,ip{row:06x},m{row % 5},1,{row % 3},15706,320,50,"
        f"{1700 + row % 4},0,35,-1,79"
        for row in range(rows)
    ]


@pytest.mark.parametrize("compressed", [False, True])
def test_avazu_codes_words_by_the_training_rows(tmp_path: Path, compressed: bool) -> None:
    """Seven words and four numbers a party; a device seen in testing alone has no code."""
    text = "\n".join([AVAZU_COLUMNS, *avazu_lines(60)]) + "\n"
    path = tmp_path / ("train.gz" if compressed else "train.csv")
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    data = load_avazu(path, train_rows=40, test_rows=15, seed=3)

    assert [view.shape for view in data.views] == [(55, 11), (55, 11)]
    assert [len(own) for own in data.categories] == [7, 7]
    assert dict(data.categories[0])[0] == 40
    ips = data.views[0][:, 0]
    assert sorted(ips[data.train]) == list(range(40))
    assert set(ips[data.test]) == {40.0}
    hours = data.views[0][data.train, 10]
    assert hours.mean() == pytest.approx(0, abs=1e-5)
    assert len(np.unique(hours)) > 10
    again = load_avazu(path, train_rows=40, test_rows=15, seed=3)
    assert np.array_equal(again.views[0], data.views[0])
    other = load_avazu(path, train_rows=40, test_rows=15, seed=4)
    assert not np.array_equal(other.labels, data.labels)


def test_avazu_tells_what_is_missing(tmp_path: Path) -> None:
    """Too few rows, and a column that is not there."""
    path = tmp_path / "train.csv"
    path.write_text("\n".join([AVAZU_COLUMNS, *avazu_lines(9)]))
    with pytest.raises(DataError, match="has 9 rows, 30 are needed"):
        load_avazu(path, train_rows=20, test_rows=10)
    pd.read_csv(path).drop(columns="C21").to_csv(path, index=False)
    with pytest.raises(DataError, match=r"can't be read: .*C21"):
        load_avazu(path, train_rows=5, test_rows=2)
