"""Who plays what in a rehearsal: columns, keys, ranges and the settings that follow."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.tables import PartyTable
from securevfl.lab.rehearsal import Cast, rehearsal_config, set_aside
from securevfl.runtime.run_tables import read_party

ROWS = 60


def source(*, secondaries: int = 2, hidden: int = 4, **sections: Any) -> dict[str, Any]:
    parties = [
        {"name": "bank", "role": "primary", "data": "bank.csv", "key": ["lon"], "label": "y"}
        | {"address": "127.0.0.1:0"}
    ]
    parties += [
        {"name": f"p{number}", "role": "secondary", "data": "elsewhere.csv", "key": ["lon"]}
        for number in range(secondaries)
    ]
    return {
        "federation": {"name": "test", "task": "binary", "seed": 3},
        "model": {"family": "fet", "neighbours": 2, "hidden": hidden, "release": "pooled"}
        | {"top": "additive"},
        "encoder": {"method": "principal"},
        "privacy": {"epsilon": 8.0, "encoder": "frozen", "links_per_record": 1},
        "linkage": {"protection": "none", "choose": "records"},
        "party": parties,
        **sections,
    }


def played(
    folder: Path, columns: int = 9, seed: int = 0, key_noise: float = 0.0, **sections: Any
) -> tuple[FederationConfig, PartyTable, Cast]:
    """Set columns aside of a table with numbers and, the last, words."""
    random = np.random.default_rng(5)
    frame = pd.DataFrame({f"x{i}": random.normal(size=ROWS) for i in range(columns - 1)})
    frame["colour"] = random.choice(["red", "green", "blue"], ROWS)
    frame["lon"] = np.arange(ROWS) / 7
    frame["y"] = random.integers(0, 2, ROWS)
    frame.to_csv(folder / "bank.csv", index=False)
    config = parse_federation(source(**sections), file="test")
    table = read_party(config, config.primary, folder)
    return config, table, set_aside(config, table, seed=seed, key_noise=key_noise)


def test_every_column_has_one_place_and_nobody_else_the_labels(tmp_path: Path) -> None:
    _, table, cast = played(tmp_path)

    names = [*cast.own, *(name for part in cast.aside.values() for name in part)]
    assert sorted(names) == sorted([*(f"x{i}" for i in range(8)), "colour"])
    assert len(cast.own) == 5
    features = [name for one in cast.tables.values() for name in one.feature_names]
    assert sorted(features) == sorted(table.feature_names)
    assert [one.name for one in cast.tables.values() if one.labels is not None] == ["bank"]


def test_words_stay_together(tmp_path: Path) -> None:
    """Some seed sets the words aside, some keeps them; their features are never divided."""
    where = set()
    for seed in range(6):
        _, _, cast = played(tmp_path, seed=seed)
        holders = {
            name: sum(feature.startswith("colour=") for feature in one.feature_names)
            for name, one in cast.tables.items()
        }
        assert max(holders.values()) == 3, holders
        assert sum(holders.values()) == 3
        where.add(max(holders, key=holders.__getitem__))
    assert len(where) > 1


def test_records_keep_their_keys_and_lose_their_order(tmp_path: Path) -> None:
    _, table, cast = played(tmp_path)

    own = {float(key): row for row, key in enumerate(table.keys[:, 0])}
    for name in cast.aside:
        one = cast.tables[name]
        rows = [own[float(key)] for key in one.keys[:, 0]]
        assert rows != sorted(rows)
        places = [table.feature_names.index(feature) for feature in one.feature_names]
        np.testing.assert_array_equal(one.features, table.features[rows][:, places])


def test_noise_on_keys_is_in_deviations_and_stays_in_their_range(tmp_path: Path) -> None:
    _, table, cast = played(tmp_path, key_noise=0.05)

    low, high, deviation = table.keys.min(), table.keys.max(), table.keys.std()
    for name in cast.aside:
        keys = np.sort(cast.tables[name].keys[:, 0])
        moved = np.abs(keys - np.sort(table.keys[:, 0])).max()
        assert 0 < moved < 5 * 0.05 * deviation
        assert keys.min() >= low
        assert keys.max() <= high


def test_partners_are_fewer_where_columns_are_few(tmp_path: Path) -> None:
    """Five columns set two aside: one partner of two numbers, and not two of one column each."""
    config, _, cast = played(tmp_path, columns=5, secondaries=2, hidden=4)

    assert len(cast.aside) == 1
    # The words among them are three features; numbers are one each.
    assert rehearsal_config(config, cast, 8.0).model.hidden == 2


def test_the_last_partner_writes_fewer_numbers(tmp_path: Path) -> None:
    config, _, cast = played(tmp_path, columns=3, secondaries=1, hidden=8, seed=1)
    features = len(cast.tables["pretended-1"].feature_names)

    assert features < 8
    assert rehearsal_config(config, cast, 8.0).model.hidden == features


def test_class_means_keep_their_score_and_no_trees_are_fitted(tmp_path: Path) -> None:
    """However few features a pretended partner has."""
    model = {"family": "class-means", "top": "mixed"}
    encoder = {"method": "class-means", "labels": "plaintext"}
    config, _, cast = played(tmp_path, columns=5, seed=2, model=model, encoder=encoder)

    assert len(cast.aside) == 2
    assert min(cast.tables[name].num_features for name in cast.aside) == 1
    played_by = rehearsal_config(config, cast, 8.0)
    assert played_by.model.numbers == 1
    assert played_by.top is not None
    assert played_by.top.name == "tied"


def test_the_file_is_rehearsed_with_its_settings(tmp_path: Path) -> None:
    """Whatever partners have not declared: nobody but the primary is here."""
    config, _, cast = played(tmp_path)
    before = str(config.source)

    at_two, without = (rehearsal_config(config, cast, epsilon) for epsilon in (2.0, None))

    assert at_two.privacy.epsilon == 2.0
    assert without.privacy.mechanism == "none"
    assert at_two.linkage == config.linkage
    assert at_two.model == config.model
    assert {party.scaling for party in at_two.secondaries} == {"bounds"}
    assert str(config.source) == before


def test_ranges_are_the_declared_ones_where_there_are_any(tmp_path: Path) -> None:
    declared = source()["party"]
    declared[0] |= {"scaling": "bounds", "bounds": [-50.0, 50.0]}
    _, _, cast = played(tmp_path, party=declared)
    _, table, own = played(tmp_path)

    for name in cast.aside:
        numbers = [pair for one, pair in cast.bounds[name].items() if one.startswith("x")]
        assert set(numbers) == {(-50.0, 50.0)}
    assert cast.taken == ()
    assert set(own.taken) == {n for part in own.aside.values() for n in part if n != "colour"}
    for name, bounds in own.bounds.items():
        one = own.tables[name]
        ranges = np.array([bounds[feature] for feature in one.feature_names])
        assert (one.features >= ranges[:, 0]).all()
        assert (one.features <= ranges[:, 1]).all()
    assert table.num_rows == ROWS


def test_what_is_told_already_is_measured(tmp_path: Path) -> None:
    """Columns that only repeat the key say nothing new; random ones nearly all."""
    random = np.random.default_rng(2)
    lon = np.arange(ROWS) / 7
    told = []
    for repeat in (True, False):
        frame = pd.DataFrame(
            {f"x{i}": (i + 1) * lon if repeat else random.normal(size=ROWS) for i in range(6)}
        )
        frame["lon"], frame["y"] = lon, random.integers(0, 2, ROWS)
        frame.to_csv(tmp_path / "bank.csv", index=False)
        config = parse_federation(source(), file="test")
        table = read_party(config, config.primary, tmp_path)
        told.append(set_aside(config, table, seed=0).predictable_share)

    assert told[0] == pytest.approx(1.0, abs=1e-6)
    assert told[1] < 0.3


def test_one_column_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'bank': has 1 column beside key and label"):
        played(tmp_path, columns=1)


def test_texts_get_no_noise(tmp_path: Path) -> None:
    linkage = {"protection": "none", "choose": "records", "metric": "exact"}
    model = source()["model"] | {"keys_as_features": False}

    with pytest.raises(ConfigError, match="--key-noise: goes with keys that are numbers"):
        played(tmp_path, key_noise=0.1, linkage=linkage, model=model)
