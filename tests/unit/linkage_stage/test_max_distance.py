"""``linkage.max_distance``: farther links are none, for every metric, protection and family."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.federations import COMMON_IDS, ROWS, write_overlapping
from helpers.lines import SECRET, link_as_threads
from helpers.linking import RANGES, SHORT_KEY, hidden_spec, key_table, link_spec, text_table

from securevfl.config.federation import link_spec as spec_of
from securevfl.config.reading import read_federation
from securevfl.core.errors import ConfigError
from securevfl.lab.links_alone import study_links
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import Field
from securevfl.linkage.sampling import FixedLinks, PickedLinks
from securevfl.linkage.spec import ChoiceSpec
from securevfl.linkage.stage.link_cache import links_key
from securevfl.linkage.stage.linkage_parts import reveals_of
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import simulate_federation
from securevfl.stages.encrypted_linkage import homomorphic, paillier
from securevfl.testing import write_federation

FIELDS = (Field(name="lon", kind="text", weight=2.0), Field(name="lat", kind="exact"))
METRICS: dict[str, tuple[dict[str, Any], float]] = {
    "euclidean": ({}, 0.8),
    "great-circle": ({}, 80_000.0),
    "levenshtein": ({}, 2),
    "mixed": ({"fields": FIELDS}, 0.05),
    "bloom": ({"ranges": RANGES}, 400),
}


def linked(limit: float | None, **spec: Any) -> LinkTable:
    """Return the links of all rows as one process finds them."""
    if limit is not None:
        spec["max_distance"] = limit
    wanted = link_spec(**spec)
    keys = text_table if spec.get("metric") in ("levenshtein", "mixed") else key_table
    source = Linker(wanted, keys("agency", 60, seed=1))(keys("bank", 40, seed=2)).source
    return source.link(np.arange(60))


@pytest.mark.parametrize("metric", METRICS)
def test_farther_links_are_none(metric: str) -> None:
    """And those at the limit or nearer stay what they were, in their order."""
    settings, limit = METRICS[metric]
    whole = linked(None, metric=metric, **settings)
    near = linked(limit, metric=metric, **settings)
    kept = whole.distances <= limit
    assert 0 < kept.sum() < kept.size
    assert np.array_equal(near.present, kept)
    assert np.array_equal(near.indices[kept], whole.indices[kept])
    at_limit = float(whole.distances[kept].max())
    assert linked(at_limit, metric=metric, **settings).present.sum() == kept.sum()


@pytest.mark.parametrize("protection", ["bloom", "shares", "paillier"])
@pytest.mark.parametrize("cap", [None, 3])
def test_parties_find_the_near_links_of_one_process(
    protection: str, cap: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever ranks leaves out the far ones; the secondary still sees no distance."""
    limit = 300.0 if protection == "bloom" else 0.6
    monkeypatch.setattr(
        paillier, "Keyholder", partial(homomorphic.Keyholder, insecure_short_key=True)
    )
    spec = hidden_spec(protection, max_distance=limit, links_per_record=cap, key_bits=SHORT_KEY)
    sizes = {"agency": 60, "bank": 40, "shop": 30}
    if protection == "paillier":
        sizes = {"agency": 60, "bank": 20, "shop": 10}
    keys = {
        name: key_table(name, rows, seed=seed) for seed, (name, rows) in enumerate(sizes.items(), 1)
    }
    found, _ = link_as_threads(spec, keys)
    link = Linker(spec, keys["agency"], secret=SECRET)
    rows = np.arange(60)
    for name in ("bank", "shop"):
        theirs, alone = found[name].source.link(rows), link(keys[name]).source.link(rows)
        assert np.array_equal(theirs.indices, alone.indices)
        assert 0 < theirs.present.sum() < theirs.present.size
        distances = link.metric(keys[name]).nearest(None, sizes[name])
        near = (distances.distances <= limit).any(axis=1)
        if cap is None:
            assert np.array_equal(theirs.present.any(axis=1), near)
    assert "within the largest distance" in " ".join(reveals_of(spec, "secondary"))


def test_records_that_choose_keep_to_it() -> None:
    """A row's sum has no record that is farther, though nobody else picked the row."""
    choice = ChoiceSpec(neighbours=4, by="records", links_per_record=3, once=True, max_distance=0.5)
    spec = link_spec(choice=choice)
    source = Linker(spec, key_table("agency", 60, seed=1))(key_table("bank", 40, seed=2)).source
    assert isinstance(source, PickedLinks)
    links = source.link(np.arange(60))
    assert links.present.any()
    assert links.distances[links.present].max() <= 0.5


@pytest.mark.parametrize(
    ("linkage", "words"),
    [
        ({"max_distance": -1.0}, "max_distance must be finite and >= 0"),
        ({"max_distance": float("inf")}, "max_distance must be finite and >= 0"),
        ({"metric": "levenshtein", "max_distance": 1.5}, r"whole numbers here \(unit: edits\)"),
        ({"metric": "bloom", "max_distance": 0.5}, r"whole numbers here \(unit: bits\)"),
        (
            {"protection": "bloom", "ranges": [[-1.0, 11.0]] * 2, "max_distance": 0.01},
            r"whole numbers here \(unit: bits\), got 0.01",
        ),
        (
            {
                "metric": "mixed",
                "max_distance": 3.0,
                "fields": {name: {"kind": "text"} for name in ("lon", "lat")},
            },
            r"at most 1 here \(unit: 0 to 1\), got 3",
        ),
    ],
)
def test_a_distance_of_another_unit_is_refused(
    linkage: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Degrees where bits are counted would leave the links of equal keys, without a word."""
    path = write_federation(tmp_path, model={"family": "top1sim"}, linkage=linkage)
    with pytest.raises(ConfigError, match=words):
        read_federation(path)


def test_a_family_s_own_limit_and_the_file_s_are_both_kept(tmp_path: Path) -> None:
    """``exact`` stays exact, whatever the file allows the others."""
    linkage = {"protection": "none", "max_distance": 7.0}
    for family, limit in (("exact", 0.0), ("top1sim", 7.0)):
        path = write_overlapping(tmp_path, model={"family": family}, linkage=linkage)
        assert spec_of(read_federation(path)).choice.max_distance == limit


def test_families_share_no_links_of_another_limit(tmp_path: Path) -> None:
    """One folder of kept links, first for ``exact``, then for ``top1sim``, and the other way."""
    for first, second in (("exact", "top1sim"), ("top1sim", "exact")):
        (folder := tmp_path / first).mkdir()
        (folder / "linkage.cache").mkdir()
        found = {}
        for family in (first, second):
            linkage = {"protection": "none"}
            path = write_overlapping(folder, model={"family": family}, linkage=linkage)
            config = read_federation(path)
            tables = read_tables(config, folder)
            spec = spec_of(config)
            # The command first: what it keeps is what runs read.
            study_links(config, folder, folder / f"study-{family}", observe=print)
            keys = keys_of(spec.keys, tables["agency"])
            link = Linker(spec, keys, data_root=folder, folder=folder / family)
            source = link(keys_of(spec.keys, tables["bank-1"])).source
            assert isinstance(source, FixedLinks)
            found[family] = int(source.table.present.any(axis=1).sum())
        assert found == {"exact": 120, "top1sim": ROWS}


def test_another_limit_is_another_key() -> None:
    """Links that were kept are made anew when the limit changes, and stay while it does not."""
    keys = key_table("agency", 5, seed=1)
    found = [
        links_key(link_spec(**({} if limit is None else {"max_distance": limit})), keys)
        for limit in (None, 0.0, 0.5, 0.5)
    ]
    assert len(set(found)) == 3
    assert found[2] == found[3]


@pytest.mark.parametrize(
    ("family", "model"),
    [
        ("fet", {"neighbours": 4, "hidden": 8, "heads": 2, "fourier_features": 8}),
        ("fedsim", {"neighbours": 4, "kernel": 3}),
        ("top1sim", {}),
        ("avgsim", {"neighbours": 4}),
        ("featuresim", {"neighbours": 4}),
        ("fedsplitnn", {"hidden": 8, "encoder_hidden": 8}),
    ],
)
def test_every_family_trains_on_rows_without_a_link(
    family: str, model: dict[str, Any], tmp_path: Path
) -> None:
    """Some rows have all of their links, some have a few, and some none at any secondary."""
    path = write_federation(
        tmp_path,
        rows=120,
        model={"family": family, **model},
        training={"epochs": 1},
        linkage={"max_distance": 0.4},
    )
    config = read_federation(path)
    tables = read_tables(config, tmp_path)
    frame = pd.read_csv(tmp_path / "agency.csv")
    frame.loc[:9, "lon"] += 500
    frame.to_csv(tmp_path / "agency.csv", index=False)
    tables = read_tables(config, tmp_path)
    result = simulate_federation(
        config, tables, RunOptions(run_folder=tmp_path / "run"), with_alone=False
    )
    assert np.isfinite(result.losses).all()
    assert np.isfinite(result.metrics["test"])


def test_the_link_command_says_how_many_rows_keep_a_link(tmp_path: Path) -> None:
    """At each secondary and at all of them; what is far is not measured, nor written."""
    path = write_overlapping(tmp_path)
    found = study_links(read_federation(path), tmp_path, tmp_path / "out", observe=print).figures
    assert found["max_distance"] == 0.0
    assert found["rows_linked_everywhere"] == COMMON_IDS
    for one in found["secondaries"].values():
        assert one["rows"] - one["rows_without_links"] == 120
        assert one["last_distance_quantiles"]["1"] == 0.0
    with np.load(tmp_path / "out/parties/bank-1/lists.npz") as lists:
        assert (lists["indices"] >= 0).sum() == 120


def test_links_of_nobody_are_figures_too(tmp_path: Path) -> None:
    """No key is known to a secondary at all: the command says so, and fails at nothing."""
    path = write_overlapping(tmp_path, model={"family": "exact"})
    for name in ("bank-1", "bank-2"):
        frame = pd.read_csv(tmp_path / f"{name}.csv")
        frame["id"] += 0.25
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    study = study_links(read_federation(path), tmp_path, tmp_path / "out", observe=print)
    assert study.figures["rows_linked_everywhere"] == 0
    assert study.curves == {"bank-1": [], "bank-2": []}
