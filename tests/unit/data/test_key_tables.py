"""Key columns of any kind, and the records of febrl, whose true matches are known."""

from pathlib import Path

import numpy as np
import pytest
from helpers.nearest import nearest_codes, nearest_mixed, nearest_texts

from research.common.folder_tables import data_folder
from securevfl.core.errors import DataError
from securevfl.data.keys_and_labels import read_key_table
from securevfl.data.tables import KeyTable
from securevfl.lab.links_alone import link_quality
from securevfl.linkage.metrics.metric import Field
from securevfl.linkage.spec import LinkageSecret
from securevfl.linkage.text import joined_texts
from securevfl.stages.bloom.codes import TextCode, encode_keys

TEXT = "name,post,born,who\nanna,0123,1980,1\n,0456,,2\n"
FEBRL_KEYS = (
    *("key_given_name", "key_surname", "key_street_number", "key_address_1", "key_address_2"),
    *("key_suburb", "key_postcode", "key_state", "key_date_of_birth", "key_soc_sec_id"),
)


def test_texts_keep_their_spelling_and_gaps(tmp_path: Path) -> None:
    """A leading zero stays, a gap is None or NaN, and truth is no key."""
    (tmp_path / "keys.csv").write_text(TEXT)
    kinds = {"name": "text", "post": "text", "born": "number"}
    table = read_key_table(tmp_path / "keys.csv", name="agency", key=kinds, truth="who")

    assert table.columns["name"].tolist() == ["anna", None]
    assert table.columns["post"].tolist() == ["0123", "0456"]
    assert table.columns["born"][0] == 1980
    assert np.isnan(table.columns["born"][1])
    assert table.entities is not None
    assert table.entities.tolist() == [1, 2]
    assert joined_texts(table.columns) == ["anna 0123 1980.0", "0456"]
    assert repr(table) == "KeyTable('agency', 2 rows, 3 key columns)"


@pytest.mark.parametrize(
    ("key", "truth", "message"),
    [
        ({"nam": "text"}, None, "has no column 'nam'; did you mean 'name'"),
        ({"name": "number"}, None, "key 'name': must be numeric"),
        ({"name": "text"}, "born", "truth 'born': must be whole numbers"),
        ({}, None, "at least one key column"),
    ],
)
def test_bad_key_columns_are_refused(
    tmp_path: Path, key: dict[str, str], truth: str | None, message: str
) -> None:
    """One line, with the column."""
    (tmp_path / "keys.csv").write_text(TEXT)

    with pytest.raises(DataError, match=message):
        read_key_table(tmp_path / "keys.csv", name="agency", key=key, truth=truth)


def febrl() -> tuple[KeyTable, KeyTable]:
    """Read 1,000 originals and all 5,000 distorted duplicates."""
    folder = data_folder()
    if folder is None:
        pytest.skip("SECUREVFL_DATA is not set")
    primary, secondary = (
        read_key_table(
            folder / "febrl" / f"{role}.csv.gz", name=role, key=FEBRL_KEYS, truth="entity"
        )
        for role in ("primary", "secondary")
    )
    assert primary.entities is not None
    columns = {name: column[:1000] for name, column in primary.columns.items()}
    return KeyTable(name="primary", columns=columns, entities=primary.entities[:1000]), secondary


@pytest.mark.parametrize("way", ["levenshtein", "mixed", "bloom"])
def test_true_matches_of_febrl_are_found(way: str) -> None:
    """Every way puts the true match first for at least 99.5 % of the rows."""
    primary, secondary = febrl()
    if way == "levenshtein":
        # Comparing long texts takes longest, so a fifth of the rows must do.
        primary = KeyTable(
            name="primary",
            columns={name: column[:200] for name, column in primary.columns.items()},
            entities=primary.entities[:200],
        )
        links = nearest_texts(joined_texts(primary.columns), joined_texts(secondary.columns), 5)
    elif way == "mixed":
        fields = [Field(name=name, kind="text") for name in FEBRL_KEYS]
        links = nearest_mixed(primary.columns, secondary.columns, fields, 5)
    else:
        secret, codes = LinkageSecret(b"s" * 32), {"all": TextCode()}
        mine, theirs = (
            encode_keys({"all": joined_texts(table.columns)}, codes, secret)
            for table in (primary, secondary)
        )
        links = nearest_codes(mine, theirs, 5)
    quality = link_quality(
        links,
        num_records=secondary.num_rows,
        primary_entities=primary.entities,
        record_entities=secondary.entities,
    )

    assert quality["recall_at_1"] is not None
    assert quality["recall_at_1"] >= 0.995
