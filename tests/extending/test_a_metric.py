"""A metric of one's own: a class, and a line in the table of metrics."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.lines import link_as_threads
from helpers.linking import hidden_spec, text_table
from rapidfuzz import process
from rapidfuzz.distance import JaroWinkler as Scorer

from securevfl.config.reading import read_federation
from securevfl.core.errors import ConfigError
from securevfl.data.tables import KeyTable
from securevfl.lab.links_alone import study_links
from securevfl.linkage.links import LinkTable, nearest_by_block
from securevfl.linkage.metrics.metric import ComparedKeys, KeyKind, KeySpec, Metric
from securevfl.linkage.stage.linkage_parts import METRICS
from securevfl.linkage.text import checked_texts, joined_texts
from securevfl.testing import save_federation


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JaroWinklerKeys(ComparedKeys):
    """Texts whose first letters matter most."""

    def nearest_of(self, keys: list[str], ids: np.ndarray, k: int) -> LinkTable:
        """Link by all distances, in blocks that fit into memory."""
        chosen = [self.records[record] for record in ids]

        def block(start: int, end: int) -> np.ndarray:
            return process.cdist(keys[start:end], chosen, scorer=Scorer.distance, dtype=np.float64)

        return nearest_by_block(block, rows=len(keys), ids=ids, k=k, chunk_cells=2**22)


class JaroWinkler(Metric):
    """Jaro and Winkler's distance: common letters in common places, first ones first."""

    name = "jaro-winkler"
    unit = "0 to 1"

    def kind(self, spec: KeySpec) -> KeyKind:
        """Keys are texts."""
        return "text"

    def compare(
        self, spec: KeySpec, primary: KeyTable, records: KeyTable, *, neighbours: int
    ) -> JaroWinklerKeys:
        """Read all key columns of a row as one text."""
        mine, theirs = (
            checked_texts(joined_texts(keys.columns), whose=keys.name)
            for keys in (primary, records)
        )
        return JaroWinklerKeys(primary=mine, records=theirs)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    # In the package, this is the line in linkage/stage/linkage_parts.py.
    monkeypatch.setitem(METRICS, JaroWinkler.name, JaroWinkler())


def write(folder: Path, **linkage: Any) -> Path:
    """Write two tables of names that are spelt alike, and a federation that links by them."""
    names = text_table("clinic", 40, seed=0).columns["lon"]
    parties: list[dict[str, Any]] = [
        {"name": "clinic", "role": "primary", "address": "127.0.0.1:0"},
        {"name": "registry", "role": "secondary"},
    ]
    for party in parties:
        party |= {"data": f"{party['name']}.csv", "key": ["name"]}
        pd.DataFrame({"name": names}).to_csv(folder / party["data"], index=False)
    source = {
        "federation": {"name": "people", "task": "regression"},
        "model": {"family": "top1sim"},
        "base": {"estimator": "none"},
        "privacy": {"mechanism": "none"},
        "linkage": {"metric": "jaro-winkler", "protection": "none", **linkage},
        "party": parties,
    }
    return save_federation(folder, source)


def test_a_federation_file_links_by_it(tmp_path: Path) -> None:
    """Settings take its name and figures its unit; every name finds itself."""
    config = read_federation(write(tmp_path), only_linkage=True)
    study = study_links(config, tmp_path, tmp_path / "run", observe=lambda _event: None)
    figures = study.figures["secondaries"]["registry"]
    assert (figures["distance_unit"], study.figures["metric"]) == ("0 to 1", "jaro-winkler")
    assert max(study.curves["registry"]) == 0


def test_protections_ask_the_metric_what_they_need(tmp_path: Path) -> None:
    """Shares need numbers, and say so in the words that every other metric of texts gets."""
    with pytest.raises(
        ConfigError, match=r'"shares" computes Euclidean.*jaro-winkler. goes with "none" or "bloom"'
    ):
        read_federation(write(tmp_path, protection="shares"), only_linkage=True)


@pytest.mark.parametrize("protection", ["none", "bloom"])
def test_parties_link_by_it(protection: str) -> None:
    """The primary's texts travel, or both parties' codes: distorted names find their twins."""
    spec = hidden_spec(protection, metric="jaro-winkler", ranges=None)
    keys = {name: text_table(name, 30, seed=n) for n, name in enumerate(("agency", "bank", "shop"))}
    found, _ = link_as_threads(spec, keys)
    assert np.array_equal(found["bank"].source.link(np.arange(30)).indices[:, 0], np.arange(30))
