"""Protected linkage, its parties as threads: same links, no plain keys on any line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.lines import SECRET, SESSION, Wires, data_party, link_as_threads, run_all
from helpers.linking import SHORT_KEY, hidden_spec, key_table, text_table
from scipy.stats import kstest

from securevfl.core.errors import AuthenticationError, ConfigError, DataError, ProtocolError
from securevfl.core.progress import CiphertextsMade, LinksMade, ProgressEvent
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import LinkTable
from securevfl.linkage.protections.protection import LinkageHelper
from securevfl.linkage.spec import LinkageSecret, LinkSpec, SimilaritySpec
from securevfl.linkage.stage.link_cache import LinkCache
from securevfl.linkage.stage.linkage_parts import protection_of, reveals_of
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.messages import LinkingKind
from securevfl.stages.bloom.by_codes import CodeKind
from securevfl.stages.encrypted_linkage import block_search, blockwise, homomorphic, paillier
from securevfl.stages.encrypted_linkage.block_search import Shapes
from securevfl.stages.encrypted_linkage.blockwise import (
    BlockKind,
    DistanceShare,
    Offer,
    RowBlocks,
    Turn,
)
from securevfl.stages.encrypted_linkage.homomorphic import PackedRows
from securevfl.stages.encrypted_linkage.paillier import EncryptedRows, Paillier
from securevfl.transport.channels import SealedChannel
from securevfl.transport.message import Message


@pytest.fixture(autouse=True)
def _keys_may_be_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        paillier, "Keyholder", partial(homomorphic.Keyholder, insecure_short_key=True)
    )


def tables() -> dict[str, KeyTable]:
    """Return three tables of points."""
    sizes = {"agency": 60, "bank": 40, "shop": 30}
    return {name: key_table(name, rows, seed=rows) for name, rows in sizes.items()}


def in_process(spec: LinkSpec, keys: dict[str, KeyTable]) -> dict[str, np.ndarray]:
    """Return the links of each secondary as a simulation finds them."""
    link = Linker(spec, keys["agency"], secret=SECRET)
    rows = np.arange(keys["agency"].num_rows)
    return {name: link(keys[name]).source.link(rows).indices for name in spec.roles.secondaries}


class Heard(list[tuple[str, dict[str, Any]]]):
    """What a coordinator has received, line by line."""

    def __call__(self, kind: str, **values: Any) -> None:
        self.append((kind, values))

    def require_shown(self, spec: LinkSpec, keys: dict[str, KeyTable]) -> None:
        """A simulation shows the same, to the last line."""
        link, shown = Linker(spec, keys["agency"], secret=SECRET), Heard()
        for name in spec.roles.present if protection_of(spec).helpers else ():
            link.record_coordinator(keys[name], shown)
        assert [kind for kind, _ in self] == [kind for kind, _ in shown]
        for (_, one), (_, other) in zip(self, shown, strict=True):
            assert one.keys() == other.keys()
            assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("protection", "cap"),
    [
        ("none", None),
        ("bloom", None),
        ("bloom", 3),
        ("shares", None),
        ("shares", 3),
        ("paillier", None),
    ],
)
def test_links_are_those_of_one_process(
    protection: str, cap: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two secondaries, blocks smaller than the tables, with and without a record-side cap."""
    monkeypatch.setattr(block_search, "_BLOCK_PAIRS", 700)
    monkeypatch.setattr(block_search, "_BLOCK_ANSWERS", 1)
    spec = hidden_spec(protection, links_per_record=cap)
    keys, heard = tables(), Heard()
    found, _ = link_as_threads(spec, keys, take=heard)
    rows = np.arange(60)

    for name, wanted in in_process(spec, keys).items():
        assert np.array_equal(found[name].source.link(rows).indices, wanted)
    assert found["agency"].similarities is None
    heard.require_shown(spec, keys)
    assert bool(heard) == (protection != "none")


@pytest.mark.parametrize("protection", ["none", "bloom", "shares", "paillier"])
def test_an_absent_secondary_is_left_out(protection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two: the other keeps its rank, and has the links that it always has."""
    monkeypatch.setattr(block_search, "_BLOCK_PAIRS", 700)
    spec, keys = hidden_spec(protection, links_per_record=3, key_bits=SHORT_KEY), tables()
    wanted = in_process(spec, keys)["shop"]
    spec = replace(spec, roles=replace(spec.roles, absent=frozenset({"bank"})))
    found, wires = link_as_threads(spec, keys)

    assert np.array_equal(found["shop"].source.link(np.arange(60)).indices, wanted)
    assert not isinstance(found["agency"], Exception)
    assert spec.roles.ranks["shop"] == 2
    assert "bank" not in {name for sender, to, _ in wires.travelled for name in (sender, to)}


@pytest.mark.parametrize(
    ("protection", "cap", "cell"),
    [
        ("shares", None, 0.4),
        ("shares", None, 3.0),
        ("shares", 3, 0.4),
        ("shares", 3, 3.0),
        ("paillier", None, 3.0),
        ("paillier", 2, 0.4),
    ],
)
def test_cells_leave_links_as_they_are(
    protection: str, cap: int | None, cell: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few pairs in narrow cells, with wider ones to follow, and of many in wide ones."""
    monkeypatch.setattr(block_search, "_BLOCK_PAIRS", 50)
    monkeypatch.setattr(block_search, "_BLOCK_ANSWERS", 4)
    monkeypatch.setattr(blockwise, "fresh_shift", lambda key_dim: np.zeros(key_dim, int))
    spec = hidden_spec(protection, links_per_record=cap, cell=cell, key_bits=SHORT_KEY)
    sizes = {"agency": 60, "bank": 40} if protection == "shares" else {"agency": 30, "bank": 12}
    keys = {name: key_table(name, rows, seed=rows) for name, rows in sizes.items()}
    spec = replace(spec, roles=replace(spec.roles, secondaries=("bank",)))
    heard = Heard()
    found, wires = link_as_threads(spec, keys, take=heard)
    heard.require_shown(spec, keys)
    shares = [m for a, b, m in wires.travelled if m.kind is BlockKind.LINK_SHARE and a == "bank"]
    rows = np.arange(sizes["agency"])

    wanted = in_process(spec, keys)["bank"]
    assert np.array_equal(found["bank"].source.link(rows).indices, wanted)
    compared = sum(m.tensors["share"].size for m in shares)
    told = protection_of(spec).figures(spec, keys["agency"], keys["bank"])
    assert told["comparing"]["pairs"] == compared
    assert protection == "paillier" or compared < 0.7 * 60 * 40


@pytest.mark.parametrize("protection", ["shares", "paillier"])
def test_small_cells_are_compared_in_few_exchanges(protection: str) -> None:
    """Two passes are two exchanges, not one a cell: each waits for round trips of a slow line."""
    spec = hidden_spec(protection, cell=0.4, key_bits=SHORT_KEY)
    sizes = {"agency": 30, "bank": 12, "shop": 12}
    if protection == "paillier":  # seconds a secondary
        del sizes["shop"]
    _, *secondaries = sizes
    spec = replace(spec, roles=replace(spec.roles, secondaries=tuple(secondaries)))
    found, wires = link_as_threads(spec, {n: key_table(n, r, seed=r) for n, r in sizes.items()})
    for name in secondaries:
        asked = [
            message
            for sender, receiver, message in wires.travelled
            if receiver == name and message.kind is BlockKind.LINK_BLOCK
        ]
        assert found[name].source.link(np.arange(30)).present.all()
        assert len(asked) == 2
        assert len(asked[0].tensors["sizes"]) > 20  # cells that hold rows


def test_a_coordinator_asks_for_the_next_blocks_before_the_last_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A data party that answers the first exchange when it has the second is no deadlock."""
    monkeypatch.setattr(block_search, "_BLOCK_PAIRS", 700)
    spec = hidden_spec("shares")
    wires, mine, theirs = Wires(), np.arange(60), np.arange(40)

    def data_parties() -> int:
        agency, bank = wires.of("agency"), wires.of("bank")
        agency.send(Turn(records=40, tags=("", "")).to_message(), "coordinator")
        bank.send(Offer(records=40, tag="").to_message(), "coordinator")
        exchanges = -(-60 // (700 // 40))
        waiting = [agency.receive("coordinator", BlockKind.LINK_BLOCK)]
        for number in range(exchanges):
            if number + 1 < exchanges:
                waiting.append(agency.receive("coordinator", BlockKind.LINK_BLOCK))
            asked = RowBlocks.from_message(waiting.pop(0), num_rows=60)
            squared = ((mine[asked.rows, None] - theirs[None]) ** 2).astype(np.uint64)
            for party, words in ((agency, squared), (bank, np.zeros_like(squared))):
                party.send(DistanceShare(share=words.ravel()).to_message(), "coordinator")
        return exchanges

    helper = LinkageHelper(
        spec=spec, rows=60, channels=wires.of("coordinator"), cache=LinkCache(None)
    )
    lives = {
        "data parties": data_parties,
        "coordinator": lambda: protection_of(spec).find(helper, "bank", None),
    }
    ended = run_all(lives)

    assert ended["data parties"] == 4
    lists, _ = ended["coordinator"]
    assert lists.candidates.indices[:40, 0].tolist() == list(range(40))


def test_cells_do_not_say_where() -> None:
    """The coordinator gets them under a shift of the session that data parties alone know."""
    spec, keys = hidden_spec("shares", cell=1.0), tables()
    seen = []
    for _ in range(3):
        _, wires = link_as_threads(spec, keys)
        sent = [(a, b, m) for a, b, m in wires.travelled if m.kind is BlockKind.LINK_CELLS]
        assert {b for _, b, m in sent if "shift" in m.tensors} == {"bank", "shop"}
        cells = {a: m.tensors["cells"] for a, b, m in sent if b == "coordinator"}
        assert set(cells) == set(keys)
        seen.append(cells)
    steps = [np.concatenate([again[name] - seen[0][name] for name in keys]) for again in seen[1:]]

    for step in steps:
        assert (np.ptp(step, axis=0) <= 1).all()  # one shift for all parties, but for rounding
    # Drawn anew: a shift is within a cell of another once in 10^7, and two are once in 10^14.
    assert (np.abs(steps).max(axis=(0, 1)) > 1).all()


def test_a_shift_is_anything_within_its_range() -> None:
    """200 of them against the uniform distribution; a false alarm once in 10^9."""
    shifts = np.concatenate([blockwise.fresh_shift(2) for _ in range(200)])

    assert kstest(shifts / 2**40, "uniform").pvalue > 1e-9


def test_links_of_another_session_need_no_comparing(tmp_path: Path) -> None:
    """Where links are kept, a coordinator that knows both tables' tags asks for no block."""
    spec, keys = hidden_spec("shares", cell=1.0), tables()
    first, _ = link_as_threads(spec, keys, cache=tmp_path)
    again, wires = link_as_threads(spec, keys, cache=tmp_path)

    assert not any(m.kind is BlockKind.LINK_SHARE for _, _, m in wires.travelled)
    rows = np.arange(60)
    links = [found["bank"].source.link(rows).indices for found in (first, again)]
    assert np.array_equal(*links)


def test_a_family_s_own_limit_holds_under_shares() -> None:
    """``exact`` takes records of the very same place, and none otherwise."""
    spec, keys = hidden_spec("shares", max_distance=0.0), tables()
    keys["bank"].columns["lon"][:20] = keys["agency"].columns["lon"][:20]
    keys["bank"].columns["lat"][:20] = keys["agency"].columns["lat"][:20]
    found, _ = link_as_threads(spec, keys)
    links = found["bank"].source.link(np.arange(60))

    assert links.indices[:20, 0].tolist() == list(range(20))
    assert not links.present[20:].any()


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        (
            Turn(records=41, tags=("mine", "theirs")),
            "reports 41 records of bank, but",
        ),
        (Turn(records=40, tags=("mine", "older")), "another tag of the table of bank than bank"),
    ],
)
def test_a_coordinator_has_a_table_s_size_and_tag_from_its_owner(turn: Turn, text: str) -> None:
    """With an older table's tag, links that are kept would be numbered for another table."""
    spec, wires = hidden_spec("shares"), Wires()
    wires.of("agency").send(turn.to_message(), "coordinator")
    wires.of("bank").send(Offer(records=40, tag="theirs").to_message(), "coordinator")
    lines, cache = wires.of("coordinator"), LinkCache(None)
    helper = LinkageHelper(spec=spec, rows=60, channels=lines, cache=cache)
    with pytest.raises(ProtocolError, match=f"agency: .*{text}.*nothing was compared"):
        protection_of(spec).find(helper, "bank", None)


@pytest.mark.parametrize("number", [60, -1])
def test_a_block_of_rows_that_there_are_not_is_refused(number: int) -> None:
    """By the primary, before anything of it is sent."""
    wires = Wires()
    spec, keys = hidden_spec("shares"), tables()
    wires.of("bank").send(Offer(records=40, tag="x").to_message(), "agency")
    block = RowBlocks(rows=np.array([3, number]), sizes=np.array([[2, 40]]), done=0, of=60)
    wires.of("coordinator").send(block.to_message(), "agency")
    party = data_party(spec, keys["agency"], wires.of("agency"))
    with pytest.raises(ProtocolError, match=r"coordinator: .*rows must lie in 0 to 59"):
        protection_of(spec).link_as_primary(party)


def test_paillier_takes_all_cores_and_tells_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each secondary of its ciphertexts and the primary of its rows, both to the very end."""
    monkeypatch.setattr(block_search, "_BLOCK_ANSWERS", 1)
    monkeypatch.setattr(homomorphic, "_BATCH", 8)
    monkeypatch.setattr(homomorphic, "_CIPHERTEXTS_A_TASK", 2)
    asked: list[tuple[int, int]] = []

    @contextmanager
    def in_place(workers: int, *, after: int, check: Callable[[], None]) -> Iterator[Any]:
        check()
        asked.append((workers, after))
        yield map

    monkeypatch.setattr(paillier, "on_cores", in_place)
    spec = hidden_spec("paillier", key_bits=SHORT_KEY)
    told: list[ProgressEvent] = []
    sizes = {"agency": 60, "bank": 6, "shop": 5}
    keys = {name: key_table(name, rows, seed=rows) for name, rows in sizes.items()}
    found, wires = link_as_threads(spec, keys, told=told)
    answers = [m for a, b, m in wires.travelled if (a, b) == ("bank", "agency") and m.tensors]

    assert found["bank"].source.link(np.arange(60)).indices.shape == (60, 4)
    assert asked == 3 * [(-1, paillier._IN_PLACE_TASKS)]
    for name, of in (("bank", 60), ("shop", 60)):
        rows = [e for e in told if isinstance(e, LinksMade) and e.name == name]
        done = [event.done for event in rows]
        assert done == sorted(done)
        assert done[-1] == of
        assert len(done) > 3  # also while a block is decrypted
        assert rows[-1].seconds_left == 0
    due = sum(len(m.tensors["answers"]) for m in answers)
    own = [e for e in told if isinstance(e, CiphertextsMade) and e.name == "bank"]
    assert [event.done for event in own] == sorted(event.done for event in own)
    assert (own[-1].done, own[-1].seconds_left) == (due, 0)


def test_a_key_that_changes_between_blocks_is_refused() -> None:
    """Obfuscators of the first key would hide nothing under another one."""
    spec, wires = hidden_spec("paillier"), Wires()
    party, units = data_party(spec, tables()["bank"], wires.of("bank")), np.array([[1, 2], [3, 4]])
    modulus = 2**2047 + 1
    for number in (modulus, modulus + 2):
        packed = PackedRows(modulus=number, rows=5, packs=((7, 7),))
        wires.of("agency").send(EncryptedRows(blocks=[packed]).to_message(), "bank")
    shapes, records = Shapes(rows=np.array([5]), records=np.array([2])), [np.array([0, 1])]

    with Paillier().secondary_shares(party, units) as share:
        share(shapes, records, 2)
        with pytest.raises(ProtocolError, match="changed"):
            share(shapes, records, 2)


def test_secret_samples_work_on_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a rate below 1 the coordinator ranks more, and only the secondary knows the sample."""
    monkeypatch.setattr(block_search, "_BLOCK_PAIRS", 700)
    spec = hidden_spec("shares", sampling_rate=0.5)
    found, wires = link_as_threads(spec, tables())
    links = found["bank"].source.link(np.arange(60))
    sent = [m for a, b, m in wires.travelled if (a, b) == ("coordinator", "bank")]

    assert links.indices.shape == (60, 4)
    assert (links.indices >= 0).all()  # fewer than 4 of 40 records are in a sample once in 10^8
    assert sent[-1].tensors["indices"].shape[1] > 4
    again = found["bank"].source.link(np.arange(60))
    assert not np.array_equal(links.indices, again.indices)  # they are of two samples


@pytest.mark.parametrize("protection", ["bloom", "shares", "paillier"])
def test_nothing_plain_travels(protection: str) -> None:
    """No message to anybody holds a key, a quantised key or a distance."""
    cell = 4.0 if protection == "shares" else None
    spec, keys = hidden_spec(protection, cell=cell, key_bits=SHORT_KEY), tables()
    _, wires = link_as_threads(spec, keys)
    plain = [numbers for table in keys.values() for numbers in table.columns.values()]
    units = [np.rint(column / 10 * 65535).astype(np.int64) for column in plain]

    for sender, receiver, message in wires.travelled:
        for array in message.tensors.values():
            flat = array.ravel()
            for column in plain + units:
                same = flat.size >= column.size and np.isin(column, flat).mean() > 0.5
                assert not same or array.dtype == np.uint8, (sender, receiver, message)
    kinds = {(a, b): m.kind for a, b, m in wires.travelled}
    assert ("coordinator", "dealer") not in kinds
    assert not any(b == "bank" and a == "shop" for a, b in kinds)


def test_another_secret_is_found_before_linking() -> None:
    """The coordinator names the party whose secret differs; nobody gets a list."""
    spec, keys = hidden_spec("bloom"), tables()
    other = {"shop": LinkageSecret(b"other secret of another file")}
    found, wires = link_as_threads(spec, keys, secrets=other)

    assert isinstance(found["coordinator"], ConfigError)
    assert "'shop'" in str(found["coordinator"])
    lists = [b for _, b, m in wires.travelled if m.kind is LinkingKind.LINK_LISTS]
    assert "shop" not in lists


def test_a_value_that_leaves_its_range_stops_its_party() -> None:
    """Before anything of it is sent."""
    spec, keys = hidden_spec("shares"), tables()
    keys["bank"].columns["lat"][7] = 11.0
    with pytest.raises(DataError, match="row 8"):
        protection_of(spec).link_as_secondary(data_party(spec, keys["bank"], Wires().of("bank")))


@pytest.mark.parametrize("protection", ["bloom", "shares"])
def test_similarities_keep_their_noise(protection: str, tmp_path: Path) -> None:
    """The primary gets them sorted, secondaries do not; a second session has the same noise."""
    spec, keys = hidden_spec(protection, similarities=SimilaritySpec(noise=0.5)), tables()
    first, _ = link_as_threads(spec, keys, cache=tmp_path)
    again, wires = link_as_threads(spec, keys, cache=tmp_path)
    fresh, _ = link_as_threads(spec, keys, cache=tmp_path / "other")

    values = first["agency"].similarities
    assert values.shape == (60, 2, 4)
    assert (np.diff(values, axis=2) <= 0).all()
    assert np.array_equal(values, again["agency"].similarities)
    assert not np.array_equal(values, fresh["agency"].similarities)
    to_primary = {m.kind for _, b, m in wires.travelled if b == "agency"}
    assert LinkingKind.LINK_LISTS not in to_primary


def test_codes_of_texts_find_twins() -> None:
    """Names are compared as codes; models get no key columns."""
    spec = hidden_spec("bloom", metric="levenshtein", ranges=None)
    keys = {name: text_table(name, 30, seed=n) for n, name in enumerate(("agency", "bank", "shop"))}
    found, _ = link_as_threads(spec, keys)
    assert np.array_equal(found["bank"].source.link(np.arange(30)).indices[:, 0], np.arange(30))
    assert found["bank"].keys.shape == (30, 0)


def test_every_role_has_a_statement() -> None:
    """Whoever takes part is told what it learns."""
    for protection in ("bloom", "shares", "paillier"):
        for role in ("primary", "secondary", "coordinator"):
            assert reveals_of(hidden_spec(protection), role)
    plain, cells = hidden_spec("shares"), hidden_spec("shares", cell=1.0)
    for role in ("primary", "secondary", "coordinator", "dealer"):
        assert len(reveals_of(cells, role)) == len(reveals_of(plain, role)) + 1
    capped = hidden_spec("shares", cell=1.0, links_per_record=2)
    assert "where the records lie" in reveals_of(capped, "primary")[-1]
    assert "where the records lie" not in reveals_of(cells, "primary")[-1]


class TestSealedLine:
    """Two callers behind a primary that must not read what it relays."""

    def lines(self) -> tuple[SealedChannel, SealedChannel]:
        return (
            SealedChannel(b"p" * 32, session=SESSION, own_rank=1, peer="b", peer_rank=2),
            SealedChannel(b"p" * 32, session=SESSION, own_rank=2, peer="a", peer_rank=1),
        )

    def message(self, value: int) -> Message:
        tensors = {"codes": np.full((3, 40_000), value, dtype=np.uint8)}
        return Message(kind=CodeKind.LINK_CODES, meta={"check": "x"}, tensors=tensors)

    def test_messages_come_out_as_they_went_in(self) -> None:
        one, other = self.lines()
        for value in (1, 2):
            opened = other.open(one.seal(self.message(value)))
            assert opened.kind is CodeKind.LINK_CODES
            assert opened.sender == "a"
            assert (opened.tensors["codes"] == value).all()
        back = one.open(other.seal(self.message(3)))
        assert (back.tensors["codes"] == 3).all()

    def test_the_relay_sees_no_content(self) -> None:
        one, other = self.lines()
        first, second = one.seal(self.message(1)), other.seal(self.message(1))
        assert b"codes" not in first.tensors["sealed"].tobytes()
        assert not np.array_equal(first.tensors["sealed"], second.tensors["sealed"])

    @pytest.mark.parametrize("attack", ["changed", "replayed", "left out", "turned round"])
    def test_what_a_relay_does_to_them_is_found(self, attack: str) -> None:
        one, other = self.lines()
        sealed, later = one.seal(self.message(1)), one.seal(self.message(2))
        if attack == "changed":
            bits = sealed.tensors["sealed"].copy()
            bits[100] ^= 1
            sealed = replace(sealed, tensors={"sealed": bits})
        elif attack == "replayed":
            other.open(sealed)
        elif attack == "left out":
            sealed = later
        else:
            other = one
        with pytest.raises(AuthenticationError, match="relayed"):
            other.open(sealed)


def test_lists_of_a_coordinator_hold_an_order_only() -> None:
    """Candidates without distances: places of the list instead."""
    indices = np.array([[3, 1, -1]])
    distances = np.array([[0.5, 0.7, np.inf]])
    bare = LinkTable(indices=indices, distances=distances).without_distances()
    assert bare.distances.tolist() == [[0.0, 1.0, np.inf]]
