"""Recall on real tables, where they are at hand: what docs/linkage.md claims."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.nearest import nearest_codes, nearest_records, nearest_texts

from securevfl.linkage.spec import LinkageSecret
from securevfl.stages.bloom.codes import PointCode, TextCode, encode_keys

DATA = Path(os.environ.get("SECUREVFL_DATA", "no data"))
SECRET = LinkageSecret(b"s" * 32)

pytestmark = pytest.mark.skipif(
    not (DATA / "febrl").is_dir(), reason="SECUREVFL_DATA names no folder with the tables"
)


def test_people_find_themselves() -> None:
    """The first 400 of 5,000 people of febrl, by 1,024-bit codes and by edits: at least 99.5 %.

    All 5,000 take minutes (``research/linkage/recall.py``: 1.000 and 0.9998).
    """
    tables = [
        pd.read_csv(DATA / "febrl" / f"{name}.csv.gz", dtype=str, keep_default_na=False)
        for name in ("primary", "secondary")
    ]
    keys = [name for name in tables[0].columns if name.startswith("key_")]
    texts = [
        [" ".join(filter(None, row)) for row in table[keys].itertuples(index=False)]
        for table in tables
    ]
    entities = [table["entity"].to_numpy() for table in tables]
    code = {"all": TextCode(bits=1024)}
    mine, theirs = (encode_keys({"all": text}, code, SECRET) for text in (texts[0][:400], texts[1]))
    by_code = nearest_codes(mine, theirs, 1).indices[:, 0]
    by_edits = nearest_texts(texts[0][:100], texts[1], 1).indices[:, 0]

    assert (entities[1][by_code] == entities[0][:400]).mean() >= 0.995
    assert (entities[1][by_edits] == entities[0][:100]).mean() >= 0.99


@pytest.mark.parametrize(("name", "least"), [("house_kc", 0.88), ("hdb", 0.98)])
def test_positions_find_their_neighbours(name: str, least: float) -> None:
    """50 Euclidean nearest among the 50 nearest codes of 2,048 bits, for 300 rows."""
    mine, theirs = (
        table[["key_lon", "key_lat"]].to_numpy(np.float64)
        for table in (
            pd.read_csv(DATA / name / f"{part}.csv.gz") for part in ("primary", "secondary")
        )
    )
    mine = mine[np.random.default_rng(0).choice(len(mine), 300, replace=False)]
    both = np.concatenate([mine, theirs])
    code = {"at": PointCode(low=tuple(both.min(axis=0)), high=tuple(both.max(axis=0)))}
    codes = [encode_keys({"at": keys}, code, SECRET) for keys in (mine, theirs)]
    near = nearest_codes(codes[0], codes[1], 50).indices
    exact = nearest_records(mine, theirs, 50).indices

    assert np.mean([np.isin(a, b).mean() for a, b in zip(exact, near, strict=True)]) >= least
