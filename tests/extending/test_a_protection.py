"""A protection of one's own: a class, and a line in the table of protections."""

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from helpers.lines import SECRET, Wires, link_as_threads
from helpers.linking import hidden_spec, text_table

from securevfl.config.disclosure import channels
from securevfl.config.federation import link_spec
from securevfl.config.reading import read_federation
from securevfl.config.rules import require_helpers
from securevfl.core.errors import ConfigError
from securevfl.core.progress import unheard
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import LinkTable, nearest_by_block
from securevfl.linkage.metrics.metric import ComparedKeys
from securevfl.linkage.spec import LinkageSecret, LinkSpec
from securevfl.linkage.stage.link_cache import LinkCache
from securevfl.linkage.stage.linkage_parts import PROTECTIONS
from securevfl.linkage.stage.linking import LinkageInput, Linker
from securevfl.linkage.text import joined_texts, normalise_text
from securevfl.stages.bloom.by_codes import ByCodes, CodeKind
from securevfl.testing import save_federation, write_federation


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EqualCodes(ComparedKeys):
    """Codes that are equal or have nothing in common."""

    def nearest_of(self, keys: np.ndarray, ids: np.ndarray, k: int) -> LinkTable:
        """Link each row to records of the very same code, and to no other."""
        theirs = self.records[ids]

        def block(start: int, end: int) -> np.ndarray:
            return (keys[start:end, None] != theirs[None]).any(axis=2).astype(np.float64)

        return nearest_by_block(block, rows=len(keys), ids=ids, k=k, chunk_cells=2**20).within(0)


class SortedWords(ByCodes):
    """Hashes of keys' words in sorted order: the same words are linked, and no others."""

    name = "sorted-words"
    learned: ClassVar[Mapping[str, str]] = {
        "primary": "nothing of a secondary's records",
        "secondary": "for each primary row, which of its own records have the same words",
        "coordinator": "which keys have the same words, and how often these occur",
    }

    def encode(self, spec: LinkSpec, keys: KeyTable, secret: LinkageSecret) -> np.ndarray:
        """Hash each row's words, whatever their order."""
        key = secret.subkey("sorted-words")
        hashes = [
            hashlib.blake2b(" ".join(words).encode(), key=key, digest_size=16).digest()
            for words in (
                sorted(normalise_text(text).split()) for text in joined_texts(keys.columns)
            )
        ]
        return np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(-1, 16)

    def code_bytes(self, spec: LinkSpec) -> int:
        """Return the length of a hash."""
        return 16

    def compare_codes(self, rows: np.ndarray, records: np.ndarray) -> EqualCodes:
        """Ask which hashes are equal."""
        return EqualCodes(primary=rows, records=records)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    # In the package, this is the line in stages/bloom/__init__.py.
    monkeypatch.setitem(PROTECTIONS, SortedWords.name, SortedWords())


def tables() -> dict[str, KeyTable]:
    """Return three tables of names, the first ten of which are spelt alike everywhere."""
    keys = {name: text_table(name, 30, seed=n) for n, name in enumerate(("agency", "bank", "shop"))}
    for name in ("bank", "shop"):
        keys[name].columns["lon"][:10] = keys["agency"].columns["lon"][:10]
    return keys


def test_parties_find_the_links_of_one_process() -> None:
    """Equal keys are linked, whoever compares the hashes; only hashes travel to the coordinator."""
    spec, keys = hidden_spec("sorted-words", metric="levenshtein", ranges=None), tables()
    found, wires = link_as_threads(spec, keys)
    alone = Linker(spec, keys["agency"], secret=SECRET)
    rows = np.arange(30)

    for name in ("bank", "shop"):
        links = found[name].source.link(rows)
        assert np.array_equal(links.indices, alone(keys[name]).source.link(rows).indices)
        assert links.indices[:10, 0].tolist() == list(range(10))
        assert not links.present[10:].any()
    heard = [m for _, b, m in wires.travelled if b == "coordinator" and m.tensors]
    assert {m.kind for m in heard} == {CodeKind.LINK_CODES}
    assert {m.tensors["codes"].shape for m in heard} == {(30, 16)}


def test_a_federation_file_asks_for_what_it_rests_on(tmp_path: Path) -> None:
    """The third party and the secret are asked for, and the run folder says who learns what."""
    ranges = [[-1.0, 11.0], [-1.0, 11.0]]
    path = write_federation(tmp_path, linkage={"protection": "sorted-words", "ranges": ranges})
    with pytest.raises(ConfigError, match='role = "coordinator"'):
        require_helpers(read_federation(path))
    source = tomllib.loads(path.read_text())
    source["party"].append({"name": "broker", "role": "coordinator"})
    config = read_federation(save_federation(tmp_path, source))
    require_helpers(config)
    place = LinkageInput(
        spec=link_spec(config),
        keys=tables()["agency"],
        data_root=tmp_path,
        cache=LinkCache(None),
    )
    with pytest.raises(ConfigError, match=r"linkage\.secret: No such file.*openssl rand"):
        place.with_channels(Wires().of("x"), rows=3, session=b"s", observe=unheard)
    (linkage,) = [one for one in channels(config) if one["channel"] == "linkage"]
    assert "the coordinator: which keys have the same words" in linkage["reveals"]
