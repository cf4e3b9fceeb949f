"""The linking stage: the same links whatever protects them; similarities that belong to them."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.lines import Wires, data_party
from helpers.linking import RANGES, key_table, link_spec, text_table

from securevfl.core.errors import ConfigError, DataError, ProtocolError
from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import KeyTable
from securevfl.lab.links_alone import link_quality
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import Field, numbers_of
from securevfl.linkage.protections.plaintext import LinkKeys
from securevfl.linkage.sampling import FixedLinks
from securevfl.linkage.spec import SimilaritySpec
from securevfl.linkage.stage.link_cache import CachedLinks, LinkCache
from securevfl.linkage.stage.linkage_parts import protection_of
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.noised_similarities import similar_links


def links_of(protection: str, **changes: Any) -> LinkTable:
    spec = link_spec(protection, **changes)
    keys = text_table if spec.keys.metric.name == "levenshtein" else key_table
    link = Linker(spec, keys("agency", 60, seed=1))
    source = link(keys("bank", 40, seed=2)).source
    assert isinstance(source, FixedLinks)
    return source.table


def test_protected_links_are_those_of_rounded_keys() -> None:
    """Shares and Paillier find the plain links; only keys nearer than a unit could differ."""
    plain = links_of("none", ranges=RANGES)
    for protection in ("shares", "paillier"):
        hidden = links_of(protection, ranges=RANGES)
        assert np.array_equal(hidden.indices, plain.indices)


def test_a_coordinator_tells_no_distances() -> None:
    """A secondary with known records could find the primary's keys by their distances."""
    hidden = links_of("shares", ranges=RANGES)
    assert np.array_equal(np.unique(hidden.distances), np.arange(4))


def test_codes_of_numbers_find_most_of_the_nearest() -> None:
    """Fixed seeds for the keys; the secret is fresh, which moves recall by a few links."""
    plain = links_of("none")
    coded = links_of("bloom", ranges=RANGES)
    common = [len(np.intersect1d(a, b)) for a, b in zip(plain.indices, coded.indices, strict=True)]
    assert np.mean(common) > 2.5  # of 4


@pytest.mark.parametrize("protection", ["none", "bloom"])
def test_texts_find_their_twins(protection: str) -> None:
    """Distorted names: every row's own record is its first link, coded or not."""
    links = links_of(protection, metric="levenshtein")
    assert np.array_equal(links.indices[:40, 0], np.arange(40))


def test_mixed_fields_need_no_model_keys() -> None:
    """Texts are no inputs of a model: its keys have no columns."""
    fields = (Field(name="lon", kind="text", weight=2.0), Field(name="lat", kind="exact"))
    link = Linker(link_spec(metric="mixed", fields=fields), text_table("agency", 60, seed=1))
    linked = link(text_table("bank", 40, seed=2))
    assert linked.keys.shape == (40, 0)
    assert link.primary.keys.shape == (60, 0)


def test_a_value_that_leaves_the_agreed_range_is_refused() -> None:
    """The row, the value and the range are named, and nothing is sent."""
    link = Linker(
        link_spec("shares", ranges=((0.0, 10.0), (0.0, 2.0))), key_table("agency", 60, seed=1)
    )
    with pytest.raises(DataError, match=r"outside the agreed range \[0\.0, 2\.0\]"):
        link(key_table("bank", 40, seed=2))


def test_agreed_ranges_scale_model_keys_at_every_party() -> None:
    """No statistic of the primary's keys is needed: the range becomes [-1, 1]."""
    keys = key_table("agency", 60, seed=1)
    scaled = Linker(link_spec("shares", ranges=RANGES), keys).primary.keys
    assert scaled[:, 0] == pytest.approx(keys.columns["lon"] / 5 - 1, abs=1e-6)


def test_similarities_fall_and_keep_their_links() -> None:
    """The primary's K numbers fall; each still belongs to the link in the same place."""
    spec = link_spec(similarities=SimilaritySpec(noise=0.5))
    distances = np.sort(np.random.default_rng(0).random((60, 4)), axis=1)
    links = LinkTable(indices=np.tile(np.arange(4), (60, 1)), distances=distances)
    similar = similar_links(spec, links)
    exact = (-similar.links.distances - similar.scale.mean) / similar.scale.deviation

    assert (np.diff(similar.values, axis=1) <= 0).all()
    assert np.abs(similar.values - exact).max() < 7.5 * 0.5  # 240 draws: fails once in 10^10
    assert not np.array_equal(similar.links.indices, links.indices)
    again = np.take_along_axis(distances, similar.links.indices, axis=1)
    assert np.array_equal(again, similar.links.distances)


def test_a_missing_link_has_no_similarity() -> None:
    """NaN, in the last places, whatever the noise."""
    spec = link_spec(similarities=SimilaritySpec(noise=9.0))
    indices, distances = np.tile(np.arange(4), (60, 1)), np.random.default_rng(0).random((60, 4))
    indices[7, 2:], distances[7, 2:] = -1, np.inf
    similar = similar_links(spec, LinkTable(indices=indices, distances=distances))
    assert np.isnan(similar.values[7]).tolist() == [False, False, True, True]
    assert (similar.links.indices[7, 2:] == -1).all()


@pytest.mark.parametrize(
    ("distances", "tau", "words"),
    [
        ([1.0, 2.0], 1e-9, ["cannot be reached", "leaves 0."]),
        ([1.0, 2.5], 0.9, ["whole-number distances", "similarity_noise"]),
    ],
)
def test_a_bound_that_cannot_be_had(distances: list[float], tau: float, words: list[str]) -> None:
    """Tau is refused below its floor, and for distances that it says nothing of."""
    spec = link_spec(similarities=SimilaritySpec(tau=tau))
    links = LinkTable(indices=np.tile(np.arange(2), (60, 1)), distances=np.tile(distances, (60, 1)))
    with pytest.raises(ConfigError) as raised:
        similar_links(spec, links)
    assert all(word in str(raised.value) for word in words), raised.value


def test_equal_distances_have_one_similarity() -> None:
    """As of exact ids at K = 1."""
    spec = link_spec(similarities=SimilaritySpec())
    links = LinkTable(indices=np.zeros((60, 1), dtype=np.int64), distances=np.ones((60, 1)))
    assert not similar_links(spec, links).values.any()


def test_key_columns_travel_as_they_are() -> None:
    """Texts of any script, empty and missing ones come out as they went in."""
    spec = link_spec(metric="levenshtein")
    keys = text_table("agency", 4, seed=1)
    keys.columns["lon"][:] = ["Ame\u0301lie", None, "", "東京 ﬁ"]
    message = replace(LinkKeys(keys=keys, scaler=None).to_message(), sender="x")
    back = LinkKeys.from_message(message, spec=spec.keys, rows=4).keys

    assert back.columns["lon"].tolist() == ["Ame\u0301lie", None, "", "東京 ﬁ"]
    assert back.columns["lat"].tolist() == keys.columns["lat"].tolist()


def test_lengths_that_do_not_add_up_are_refused() -> None:
    """What arrives is checked before it is cut to pieces."""
    spec = link_spec(metric="levenshtein")
    sent = LinkKeys(keys=text_table("agency", 4, seed=1), scaler=None).to_message()
    arrays = {**sent.tensors, "lengths:0": sent.tensors["lengths:0"] + 1}
    with pytest.raises(ProtocolError, match="do not add up"):
        LinkKeys.from_message(replace(sent, tensors=arrays), spec=spec.keys, rows=4)


def _sent(keys: KeyTable, scaler: KeyScaler, metric: str = "euclidean") -> str:
    """Return what a secondary says of keys and statistics that a primary sends."""
    spec, wires = link_spec(metric=metric), Wires()
    message = LinkKeys(keys=keys, scaler=scaler).to_message()
    wires.of("agency").send(message, "bank")
    party = data_party(spec, key_table("bank", 60, seed=2), wires.of("bank"), rows=60)
    with pytest.raises(ProtocolError) as refused:
        protection_of(spec).link_as_secondary(party)
    assert refused.value.exit_code == 3
    return str(refused.value)


@pytest.mark.parametrize("number", [3e38, 1e200, -1e300])
def test_a_primary_s_extreme_keys_are_its_own_fault(number: float) -> None:
    """And so are statistics that are not those of its keys."""
    keys = key_table("agency", 60, seed=1)
    scaler = KeyScaler.fit(numbers_of(keys))
    far = KeyTable(name="agency", columns={**keys.columns, "lon": np.full(60, number)})
    assert _sent(far, scaler).startswith("agency: sent ")
    for wrong in (
        replace(scaler, centre=(number, number)),
        replace(scaler, width=(abs(number),) * 2),
        replace(scaler, width=(5e-324, 5e-324)),
    ):
        assert _sent(keys, wrong).startswith("agency: sent statistics of keys")
    assert "agency: sent impossible statistics" in _sent(keys, replace(scaler, width=(0.0, 0.0)))
    assert "agency: sent impossible keys" in _sent(far, scaler, "great-circle")


def test_quality_of_protected_links_needs_no_distances() -> None:
    """Recall reads indices alone, so a secondary can be told how good its links are."""
    hidden = links_of("shares", ranges=RANGES)
    entities = np.arange(60)
    quality = link_quality(
        hidden, num_records=40, primary_entities=entities, record_entities=np.arange(40)
    )
    assert quality["rows_with_a_match"] == 40


def test_kept_links_of_something_else_are_refused(tmp_path: Path) -> None:
    """One line that says which file to remove, whatever it holds."""
    cache, links = (
        LinkCache(tmp_path),
        LinkTable(indices=np.zeros((2, 1), int), distances=np.ones((2, 1))),
    )
    one, other = "a" * 64, "a" * 63 + "b"
    cache.get(one, lambda: CachedLinks(links=links, similar=None))
    with pytest.raises(DataError, match="belong to other keys; remove"):
        cache.get(other, lambda: CachedLinks(links=links, similar=None))
    (tmp_path / f"links-{one[:16]}.npz").write_bytes(b"something else")
    with pytest.raises(DataError, match="is damaged or not a file of links"):
        cache.get(one, lambda: CachedLinks(links=links, similar=None))


def npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def damaged_links(whole: bytes, key: str) -> dict[str, bytes]:
    """Files that a full disk, a bad disk or somebody else could leave in a cache."""
    figures = {
        "no JSON": b"{",
        "too deep": b"[" * 100_000,
        "a list": b"[]",
        "no key": b"{}",
    }
    one = np.zeros((2, 1), int)
    return {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "cut by a byte": whole[:-1],
        "flipped": whole[:200] + bytes([whole[200] ^ 1]) + whole[201:],
        "foreign": npz(x=np.zeros(3)),
        "an array": whole[:0] + b"\x93NUMPY\x01\x00\x08\x00{'descr'",
        "no distances": npz(
            figures=np.frombuffer(json.dumps({"key": key}).encode(), np.uint8), indices=one
        ),
        "a record of 2^60": npz(
            figures=np.frombuffer(json.dumps({"key": key}).encode(), np.uint8),
            indices=one + 2**60,
            distances=np.ones((2, 1)),
        ),
        "half similar": npz(
            figures=np.frombuffer(json.dumps({"key": key}).encode(), np.uint8),
            indices=one,
            distances=one,
            values=one,
            similar_indices=one,
        ),
        **{
            name: npz(figures=np.frombuffer(text, np.uint8), indices=one)
            for name, text in figures.items()
        },
    }


def test_damaged_links_are_one_line_and_kept(tmp_path: Path) -> None:
    """Never made anew in silence: fresh noise beside the old tells more than either."""
    cache, key = LinkCache(tmp_path), "a" * 64
    kept = CachedLinks(
        links=LinkTable(indices=np.zeros((2, 1), int), distances=np.ones((2, 1))), similar=None
    )
    cache.get(key, lambda: kept)
    path = tmp_path / f"links-{key[:16]}.npz"
    for name, content in damaged_links(path.read_bytes(), key).items():
        path.write_bytes(content)
        with pytest.raises(DataError, match="restore it from a copy") as caught:
            cache.get(key, lambda: pytest.fail("links were made anew"))
        assert str(path) in str(caught.value), name
        assert "\n" not in str(caught.value), name
        assert path.read_bytes() == content, name
