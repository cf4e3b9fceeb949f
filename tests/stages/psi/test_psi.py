"""Private set intersection: the links of shown keys, a number for the primary, and liars."""

import functools
import hashlib
import operator
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.lines import SECRET, SESSION, Wires, data_party, link_as_threads, run_all
from helpers.linking import hidden_spec, link_spec

from securevfl.config.reading import read_federation
from securevfl.config.rules import require_helpers, require_linkable
from securevfl.core.errors import ConfigError, DataError, ProtocolError
from securevfl.core.progress import KeysAnnounced
from securevfl.data.tables import KeyTable
from securevfl.linkage.spec import LinkSpec
from securevfl.linkage.stage.linkage_parts import protection_of
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.messages import Linked, LinkingKind
from securevfl.stages.psi import oprf, psi
from securevfl.stages.psi.psi import BlindedPoints, EvaluatedPoints, PsiKind, RowValues
from securevfl.testing import save_federation, write_federation
from securevfl.transport.message import Message

rbcl = pytest.importorskip("rbcl")


def keys(name: str, ids: Sequence[str | None]) -> KeyTable:
    column = np.array(list(ids), object)
    return KeyTable(name=name, columns={"lon": column, "lat": np.array(["1"] * len(ids), object)})


def tables() -> dict[str, KeyTable]:
    """Return three tables that share ten keys, some twice, lack some, and have others."""
    return {
        name: keys(name, [*[f"id {row}" for row in range(10)] * 2, f"of {name}", None])
        for name in ("agency", "bank", "shop")
    }


def of_bank(*, neighbours: int = 1, pad_to: int | None = None) -> LinkSpec:
    """Return a linkage of one secondary with few records."""
    spec = psi_spec(pad_to=pad_to)
    return replace(
        spec,
        roles=replace(spec.roles, secondaries=("bank",)),
        choice=replace(spec.choice, neighbours=neighbours),
    )


def psi_spec(*, pad_to: int | None = None, **changes: Any) -> LinkSpec:
    return hidden_spec("psi", metric="exact", ranges=None, pad_to=pad_to, **changes)


def sent(wires: Wires, sender: str, receiver: str) -> list[Message]:
    return [
        message
        for one, other, message in wires.travelled
        if (one, other, message.kind) == (sender, receiver, PsiKind.LINK_POINTS)
    ]


def points_of(messages: Sequence[Message]) -> list[bytes]:
    """Return the points of messages, or the values of those that carry rows."""
    return [row.tobytes() for one in messages for rows in one.tensors.values() for row in rows]


@pytest.mark.parametrize("pad_to", [None, 40])
@pytest.mark.parametrize("changes", [{}, {"links_per_record": 1}])
def test_the_links_are_those_of_shown_keys(
    changes: dict[str, Any], pad_to: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between parties and in one process, in one block and in several."""
    monkeypatch.setattr(psi, "_BLOCK", 7)
    monkeypatch.setattr(psi, "_IN_PLACE", 1000)
    spec, found_in = psi_spec(pad_to=pad_to, **changes), tables()
    found, _ = link_as_threads(spec, found_in)
    rows = np.arange(22)
    for name in ("bank", "shop"):
        shown = Linker(link_spec("none", metric="exact", **changes), found_in["agency"])
        wanted = shown(found_in[name]).source.link(rows)
        here = Linker(spec, found_in["agency"], secret=SECRET)(found_in[name]).source.link(rows)
        assert wanted.present[:20].any(axis=1).sum() >= 10
        assert np.array_equal(found[name].source.link(rows).indices, wanted.indices)
        assert np.array_equal(here.indices, wanted.indices)


def test_rows_of_one_key_are_seen_as_in_a_simulation() -> None:
    """By equal values, and by the keys themselves where these are shown; no key is nobody's."""
    spec, shown = psi_spec(), link_spec("none", metric="exact")
    picked = replace(spec.choice, by="records", links_per_record=1)
    spec, shown = replace(spec, choice=picked), replace(shown, choice=picked)
    found, _ = link_as_threads(spec, tables())
    firsts = [*range(10), *range(10), 20, 21]
    for linked in (
        found["bank"],
        Linker(spec, tables()["agency"], secret=SECRET)(tables()["bank"]),
        Linker(shown, tables()["agency"])(tables()["bank"]),
    ):
        assert linked.firsts is not None
        assert linked.firsts.tolist() == firsts


@pytest.mark.parametrize(
    ("theirs", "linked"),
    [(["x", "y"], 0), (["b"], 1), (["c", "a", "b"], 3), ([None, None], 0)],
    ids=["none", "one", "all", "no-key"],
)
def test_overlaps(theirs: list[str | None], linked: int) -> None:
    spec = of_bank()
    found, _ = link_as_threads(
        spec, {"agency": keys("agency", "abc"), "bank": keys("bank", theirs)}
    )
    assert not isinstance(found["bank"], Exception), found["bank"]
    links = found["bank"].source.link(np.arange(3))
    assert links.present.any(axis=1).sum() == linked
    for row, record in zip(*np.nonzero(links.present), strict=True):
        assert theirs[links.indices[row, record]] == "abc"[row]


def test_the_primary_gets_a_number_of_points_and_nothing_else() -> None:
    """Of tables of other sizes and overlaps it gets as much, where they are padded alike."""
    sizes = set()
    for theirs in ("abc", "xyzuvw", "a"):
        spec = of_bank(pad_to=8)
        _, wires = link_as_threads(
            spec, {"agency": keys("agency", "abc"), "bank": keys("bank", list(theirs))}
        )
        came = [one for sender, _, one in wires.travelled if sender == "bank"]
        assert {one.kind for one in came} == {PsiKind.LINK_POINTS, LinkingKind.LINKED}
        points = points_of(sent(wires, "bank", "agency"))
        assert len(set(points)) == 8
        sizes.add(
            tuple((one.kind, len(one.tensors.get("points", ())), len(one.meta)) for one in came)
        )
    assert len(sizes) == 1


def test_two_runs_and_two_secondaries_have_no_point_in_common() -> None:
    found = [link_as_threads(psi_spec(), tables())[1] for _ in range(2)]
    groups = [
        set(points_of(sent(wires, "agency", name))) for wires in found for name in ("bank", "shop")
    ]
    groups += [
        set(points_of(sent(wires, name, "agency"))) for wires in found for name in ("bank", "shop")
    ]
    together = set().union(*groups)
    assert len(together) == sum(map(len, groups))


def test_points_are_those_of_the_standard() -> None:
    """[RFC9496] appendix A.3, its first hash to the group; and multiples commute."""
    text = b"Ristretto is traditionally a short shot of espresso coffee"
    wide = hashlib.sha512(text).digest()
    assert wide.hex().startswith("5d1be09e3d0c82fc538112490e35701979d99e06")
    point = rbcl.crypto_core_ristretto255_from_hash(wide)
    assert point.hex() == "3066f82a1a747d45120d1740f14358531a8f04bbffe6a819f86dfe50f44a0a46"
    one, other = oprf.fresh_scalar(), oprf.fresh_scalar()
    twice = [
        oprf.multiply_points([a], oprf.multiply_points([b], [point]))
        for a, b in ((one, other), (other, one))
    ]
    assert twice[0] == twice[1]


KEY = bytes.fromhex("5ebcea5ee37023ccb9fc2d2019f9d7737be85591ae8652ffa9ef0f4d37063b0e")
BLIND = bytes.fromhex("64d37aed22a27f5191de1c1d69fadb899d8862b58eb4220029e036ec4c1f6706")
VECTORS = [
    (
        "00",
        "609a0ae68c15a3cf6903766461307e5c8bb2f95e7e6550e1ffa2dc99e412803c",
        "7ec6578ae5120958eb2db1745758ff379e77cb64fe77b0b2d8cc917ea0869c7e",
        "527759c3d9366f277d8c6020418d96bb393ba2afb20ff90df23fb7708264e2f3"
        "ab9135e3bd69955851de4b1f9fe8a0973396719b7912ba9ee8aa7d0b5e24bcf6",
    ),
    (
        "5a" * 17,
        "da27ef466870f5f15296299850aa088629945a17d1f5b7f5ff043f76b3c06418",
        "b4cbf5a4f1eeda5a63ce7b77c7d23f461db3fcab0dd28e4e17cecb5c90d02c25",
        "f4a74c9c592497375e796aa837e907b1a045d34306a749db9f34221f7e750cb4"
        "f2a6413a6bf6fa5e19ba6348eb673934a722a7ede2e7621306d18951e7cf2c73",
    ),
]


@pytest.mark.parametrize(("message", "blinded", "evaluated", "output"), VECTORS)
def test_the_function_is_that_of_the_standard(
    message: str, blinded: str, evaluated: str, output: str
) -> None:
    """[RFC9497] appendix A.1.1: ristretto255, SHA-512, mode OPRF."""
    given = bytes.fromhex(message)
    [point] = oprf.multiply_points([BLIND], [oprf.point_of(given)])
    assert point.hex() == blinded
    [answer] = oprf.multiply_points([KEY], [point])
    assert answer.hex() == evaluated
    [unblinded] = oprf.multiply_points(oprf.invert_scalars([BLIND]), [answer])
    assert oprf.output_of(given, unblinded).hex() == output


@pytest.mark.parametrize("count", [1, 2, 5])
def test_inverses_of_a_batch(count: int) -> None:
    scalars = [oprf.fresh_scalar() for _ in range(count)]
    for scalar, inverse in zip(scalars, oprf.invert_scalars(scalars), strict=True):
        assert rbcl.crypto_core_ristretto255_scalar_invert(scalar) == inverse


def test_a_hand_made_primary_meets_a_secondary() -> None:
    """By the formulas alone: F(x) is what is sent, and k b H(y) what comes back."""
    spec = of_bank(neighbours=2)
    wires, secret = Wires(), oprf.fresh_scalar()
    context = b"securevfl/linkage/psi/v2" + SESSION + (4).to_bytes(4, "big") + b"bank"

    def power(point: bytes) -> bytes:
        return bytes(rbcl.crypto_scalarmult_ristretto255(secret, point))

    def value(key: str) -> bytes:
        message = hashlib.sha512(context + f"{len(key)}:{key}1:1".encode()).digest()
        point = power(oprf.point_of(message))
        framed = b"\0\x40" + message + b"\0\x20" + point + b"Finalize"
        return hashlib.sha512(framed).digest()[:16]

    def primary() -> int:
        lines = wires.of("agency")
        rows = np.frombuffer(value("b") + value("zz"), dtype=np.uint8).reshape(-1, 16)
        lines.send(RowValues(values=rows).to_message(), "bank")
        came = points_of([lines.receive("bank", PsiKind.LINK_POINTS)])
        lines.send(EvaluatedPoints(points=array([power(one) for one in came])).to_message(), "bank")
        lines.receive("bank", LinkingKind.LINKED)
        return len(came)

    party = data_party(spec, keys("bank", ["a", "b", "b"]), wires.of("bank"), rows=2)
    found = run_all(
        {"agency": primary, "bank": lambda: protection_of(spec).link_as_secondary(party)}
    )
    assert found["agency"] == 2
    links = found["bank"].source.link(np.arange(2))
    assert links.indices[:, :2].tolist() == [[1, 2], [-1, -1]]


def array(points: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(points), dtype=np.uint8).reshape(-1, 32)


def random_points(count: int) -> list[bytes]:
    return [bytes(rbcl.crypto_core_ristretto255_random()) for _ in range(count)]


NEUTRAL = bytes(32)
LIES: dict[str, tuple[Callable[[], list[BlindedPoints]], str]] = {
    "neutral": (lambda: records([*random_points(2), NEUTRAL]), "no point of the group"),
    "no point": (lambda: records([*random_points(2), b"\xff" * 32]), "no point of the group"),
    "fewer": (lambda: [BlindedPoints(count=3, points=array(random_points(2)))], "other points tha"),
    "more": (lambda: [BlindedPoints(count=1, points=array(random_points(2)))], "other points than"),
    "none": (lambda: [BlindedPoints(count=0, points=array([]))], "count"),
    "too many": (lambda: [BlindedPoints(count=2**40, points=array(random_points(1)))], "count"),
}


def records(points: list[bytes]) -> list[BlindedPoints]:
    return [BlindedPoints(count=len(points), points=array(points))]


def told_by(spec: LinkSpec, sent_by_bank: list[BlindedPoints], ids: str = "abc") -> Any:
    """Return what a primary of these rows makes of a hand-made secondary, and what travelled."""
    wires = Wires()

    def secondary() -> None:
        lines = wires.of("bank")
        lines.receive("agency", PsiKind.LINK_POINTS)
        for one in sent_by_bank:
            lines.send(one.to_message(), "agency")
        lines.send(Linked().to_message(), "agency")

    party = data_party(spec, keys("agency", ids), wires.of("agency"), rows=len(ids))
    found = run_all(
        {"bank": secondary, "agency": lambda: protection_of(spec).link_as_primary(party)}
    )
    return found["agency"], wires


@pytest.mark.parametrize("name", LIES)
def test_a_secondary_that_lies_is_refused(name: str) -> None:
    """Before the primary has computed anything with its key that goes back."""
    make, message = LIES[name]
    told, wires = told_by(of_bank(), make())
    assert isinstance(told, ProtocolError), told
    assert message in str(told)
    assert len(sent(wires, "agency", "bank")) == 1


def test_points_that_add_up_and_points_sent_twice_tell_no_more_than_one_key_each() -> None:
    """The sum of all hashes, answered, is the value of no row, of no key, and of no list."""
    spec, suspects = of_bank(), "abc"
    context = b"securevfl/linkage/psi/v2" + SESSION + (4).to_bytes(4, "big") + b"bank"
    inputs = oprf._inputs(context, [f"1:{key}1:1" for key in suspects])
    add = rbcl.crypto_core_ristretto255_add
    total = functools.reduce(add, [oprf.point_of(one) for one in inputs])
    told, wires = told_by(
        spec, records([total, oprf.point_of(inputs[0]), oprf.point_of(inputs[0])])
    )
    assert told.announced == {"bank": 3}

    rows, answers = sent(wires, "agency", "bank")
    values, points = points_of([rows]), points_of([answers])
    assert {len(value) for value in values} == {16}
    # One announced key is found, as it should be; the sum fits neither a row nor all rows.
    assert values[0] == oprf.output_of(inputs[0], points[1])[:16]
    assert points[1] == points[2]
    others = [oprf.output_of(one, points[0])[:16] for one in [*inputs, b"".join(inputs), b""]]
    assert not set(others) & set(values)
    numbers = [int.from_bytes(value, "big") for value in values]
    sums = {sum(numbers) % 2**128, functools.reduce(operator.xor, numbers)}
    assert not sums & {int.from_bytes(one, "big") for one in [*others, points[0][:16]]}


@pytest.mark.parametrize(
    ("changes", "count", "message"),
    [
        ({"pad_to": 4}, 5, "bank: announces 5 keys, and linkage.pad_to is 4"),
        ({"pad_to": 4}, 3, "bank: announces 3 keys, and linkage.pad_to is 4"),
        ({"most_keys": 4}, 5, "bank: announces 5 keys, and linkage.most_keys allows 4"),
        (
            {},
            100_001,
            "bank: announces 100,001 keys, and linkage.most_keys allows 100,000 for 3 rows",
        ),
        ({"pad_to": 4}, 4, None),
        ({"most_keys": 4}, 4, None),
    ],
)
def test_a_secondary_announces_what_was_agreed(
    changes: dict[str, int], count: int, message: str | None
) -> None:
    """It is refused by its name, with the setting and both numbers, before anything goes back."""
    spec = of_bank()
    spec = replace(spec, hiding=replace(spec.hiding, settings=changes))
    points = random_points(min(count, 10))
    told, wires = told_by(spec, [BlindedPoints(count=count, points=array(points))])
    if message is None:
        assert told.announced == {"bank": count}
        return
    assert isinstance(told, ProtocolError), told
    assert str(told).startswith(message)
    assert len(sent(wires, "agency", "bank")) == 1


def test_the_primary_is_shown_how_many_keys_were_announced() -> None:
    told: list[Any] = []
    found, _ = link_as_threads(psi_spec(), tables(), told=told)
    shown = {one.name: (one.keys, one.rows) for one in told if isinstance(one, KeysAnnounced)}
    assert shown == {"bank": (11, 22), "shop": (11, 22)}
    assert found["agency"].announced == {"bank": 11, "shop": 11}


@pytest.mark.parametrize("lie", ["neutral", "no point", "fewer rows", "fewer points"])
@pytest.mark.parametrize("at", range(4))
def test_a_primary_that_lies_is_refused(lie: str, at: int) -> None:
    """Wherever the lie stands: at padding too, or an end would show which points are padding."""
    spec, wires = of_bank(pad_to=4), Wires()

    def primary() -> None:
        lines = wires.of("agency")
        rows = np.zeros((2 if lie == "fewer rows" else 3, 16), dtype=np.uint8)
        lines.send(RowValues(values=rows).to_message(), "bank")
        lines.receive("bank", PsiKind.LINK_POINTS)
        points = random_points(3 if lie == "fewer points" else 4)
        if lie in ("neutral", "no point"):
            points[at] = NEUTRAL if lie == "neutral" else b"\xff" * 32
        lines.send(EvaluatedPoints(points=array(points)).to_message(), "bank")

    party = data_party(spec, keys("bank", "abc"), wires.of("bank"), rows=3)
    found = run_all(
        {"agency": primary, "bank": lambda: protection_of(spec).link_as_secondary(party)}
    )
    assert isinstance(found["bank"], ProtocolError), found["bank"]
    assert not any(one.kind is Linked.KIND for _, _, one in wires.travelled)


def test_wrong_answers_link_nobody() -> None:
    """Points of another session's key, or in another order, are values of no row."""
    spec, wires = of_bank(), Wires()
    context = b"securevfl/linkage/psi/v2" + SESSION + (4).to_bytes(4, "big") + b"bank"
    key = oprf.fresh_scalar()

    def primary() -> None:
        lines = wires.of("agency")
        values = oprf.evaluate((key, context, ["1:a1:1", "1:b1:1"]))
        rows = np.frombuffer(values, dtype=np.uint8).reshape(-1, 16)
        lines.send(RowValues(values=rows).to_message(), "bank")
        came = points_of([lines.receive("bank", PsiKind.LINK_POINTS)])
        answers = oprf.multiply_points([key] * 2, came)[::-1]
        lines.send(EvaluatedPoints(points=array(answers)).to_message(), "bank")
        lines.receive("bank", LinkingKind.LINKED)

    party = data_party(spec, keys("bank", "ab"), wires.of("bank"), rows=2)
    found = run_all(
        {"agency": primary, "bank": lambda: protection_of(spec).link_as_secondary(party)}
    )
    assert not found["bank"].source.link(np.arange(2)).present.any()


def test_a_long_table_is_answered_while_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side holds more than two batches of the other's points; none waits for the other."""
    monkeypatch.setattr(psi, "_BLOCK", 2)
    monkeypatch.setattr(psi, "_BATCH", 2)
    monkeypatch.setattr(psi, "_AHEAD", 4)
    monkeypatch.setattr(psi, "_IN_PLACE", 1000)
    ids = [f"id {number}" for number in range(61)]
    found, wires = link_as_threads(
        of_bank(), {"agency": keys("agency", ids[::-1]), "bank": keys("bank", ids)}
    )
    assert found["bank"].source.link(np.arange(61)).indices[:, 0].tolist() == [*range(60, -1, -1)]
    ahead, most = 0, 0
    for sender, _, message in wires.travelled:
        if message.kind is PsiKind.LINK_POINTS and "points" in message.tensors:
            ahead += 1 if sender == "bank" else -1
            most = max(most, ahead)
    assert most <= 4


def test_a_table_with_more_keys_than_it_may_announce_is_refused() -> None:
    spec = psi_spec(pad_to=2)
    found, wires = link_as_threads(spec, tables())
    assert isinstance(found["bank"], DataError)
    assert "11 are different, and linkage.pad_to hides up to 2" in str(found["bank"])
    assert sent(wires, "bank", "agency") == []


def test_more_keys_than_a_run_takes_are_refused_without_a_setting_that_nobody_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psi, "MOST_KEYS", 5)
    found, _ = link_as_threads(psi_spec(), tables())
    assert str(found["bank"]).endswith("11 are different, and one run takes 5")


def test_an_honest_table_over_the_bound_says_so_itself_and_so_does_a_simulation() -> None:
    spec = psi_spec()
    spec = replace(spec, hiding=replace(spec.hiding, settings={"most_keys": 10}))
    found, wires = link_as_threads(spec, tables())
    assert isinstance(found["bank"], DataError)
    assert "11 are different, and linkage.most_keys allows 10 for 22 rows" in str(found["bank"])
    assert sent(wires, "bank", "agency") == []
    with pytest.raises(DataError, match=r"linkage\.most_keys allows 10"):
        Linker(spec, tables()["agency"], secret=SECRET)(tables()["bank"])


@pytest.mark.parametrize(
    ("linkage", "message"),
    [
        ({"metric": "euclidean", "protection": "psi"}, "finds equal keys alone"),
        ({"metric": "exact", "protection": "hashes", "pad_to": 9}, 'goes with protection = "psi"'),
        ({"metric": "exact", "protection": "psi", "pad_to": 0}, "pad_to"),
        ({"metric": "exact", "protection": "none", "most_keys": 9}, 'goes with protection = "psi"'),
        ({"metric": "exact", "protection": "psi", "pad_to": 9, "most_keys": 9}, "one of them"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(
    tmp_path: Path, linkage: dict[str, Any], message: str
) -> None:
    path = write_federation(tmp_path, linkage=linkage)
    with pytest.raises(ConfigError, match=message):
        require_linkable(read_federation(path))


def test_it_needs_no_other_party(tmp_path: Path) -> None:
    source = tomllib.loads(
        write_federation(tmp_path, linkage={"metric": "exact", "protection": "psi"}).read_text()
    )
    source["model"] = {"family": "top1sim"}
    config = read_federation(save_federation(tmp_path, source))
    require_linkable(config)
    require_helpers(config)


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rbcl", None)
    with pytest.raises(ConfigError, match=r"pip install 'securevfl\[psi\]'"):
        oprf.point_of(b"")


def test_a_session_of_predictions_tests_no_more_keys_than_were_announced() -> None:
    """A later request sends its rows alone, and links by what the first one has found."""
    spec, memories = of_bank(), dict[str, dict[str, Any]](agency={}, bank={})
    theirs = keys("bank", ["c", "a", "x"])
    links, travelled = [], []
    for asked in ("abc", "cz"):
        wires = Wires()

        def party(name: str, own: KeyTable, wires: Wires = wires, rows: int = len(asked)) -> Any:
            made = data_party(spec, own, wires.of(name), rows=rows)
            return replace(made, memory=memories[name])

        parts = {"agency": party("agency", keys("agency", asked)), "bank": party("bank", theirs)}
        found = run_all(
            {
                "agency": lambda parts=parts: protection_of(spec).link_as_primary(parts["agency"]),
                "bank": lambda parts=parts: protection_of(spec).link_as_secondary(parts["bank"]),
            }
        )
        links.append(found["bank"].source.link(np.arange(len(asked))).indices[:, 0].tolist())
        ways = (("bank", "agency"), ("agency", "bank"))
        travelled.append([len(sent(wires, *way)) for way in ways])

    assert links == [[1, -1, 0], [0, -1]]
    assert travelled == [[1, 2], [0, 1]]
