"""Private set intersection: the links of shown keys, a number for the primary, and liars."""

import hashlib
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.federations import save, write_federation
from helpers.lines import SECRET, SESSION, Wires, data_party, link_as_threads, run_all
from helpers.linking import hidden_spec, link_spec

from securevfl.config.reading import read_federation
from securevfl.config.rules import require_helpers, require_linkable
from securevfl.core.errors import ConfigError, DataError, ProtocolError
from securevfl.data.tables import KeyTable
from securevfl.linkage.protections import psi
from securevfl.linkage.protections.psi import RecordPoints, ReturnedPoints, RowPoints
from securevfl.linkage.spec import LinkSpec
from securevfl.linkage.stage.linking import Linker, protection_of
from securevfl.linkage.stage.messages import Linked, LinkingKind
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
    spec = hidden_spec("psi", metric="exact", ranges=None, **changes)
    return replace(spec, hiding=replace(spec.hiding, pad_to=pad_to))


def sent(wires: Wires, sender: str, receiver: str) -> list[Message]:
    return [
        message
        for one, other, message in wires.travelled
        if (one, other, message.kind) == (sender, receiver, LinkingKind.LINK_POINTS)
    ]


def points_of(messages: Sequence[Message]) -> list[bytes]:
    return [row.tobytes() for one in messages for row in one.tensors["points"]]


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
        assert {one.kind for one in came} == {LinkingKind.LINK_POINTS, LinkingKind.LINKED}
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
    """[RFC9496] appendix A.3, its first hash to the group; and powers commute."""
    text = b"Ristretto is traditionally a short shot of espresso coffee"
    assert hashlib.sha512(text).hexdigest().startswith("5d1be09e3d0c82fc538112490e35701979d99e06")
    point = psi.hashed([text[5:].decode()], text[:5])
    assert point.hex() == "3066f82a1a747d45120d1740f14358531a8f04bbffe6a819f86dfe50f44a0a46"
    one, other = psi._secret(), psi._secret()
    assert psi.raised(one, psi.raised(other, point)) == psi.raised(other, psi.raised(one, point))


def test_a_hand_made_primary_meets_a_secondary() -> None:
    """By the formulas alone: what is sent is a H(x), and what comes back is b H(y)."""
    spec = of_bank(neighbours=2)
    wires, secret = Wires(), rbcl.crypto_core_ristretto255_scalar_random()
    context = b"securevfl/linkage/psi/v1" + SESSION + (4).to_bytes(4, "big") + b"bank"

    def power(point: bytes) -> bytes:
        return bytes(rbcl.crypto_scalarmult_ristretto255(secret, point))

    def primary() -> int:
        lines = wires.of("agency")
        hashes = [
            rbcl.crypto_core_ristretto255_from_hash(
                hashlib.sha512(context + f"{len(x)}:{x}1:1".encode()).digest()
            )
            for x in ("b", "zz")
        ]
        lines.send(RowPoints(points=array([power(one) for one in hashes])).to_message(), "bank")
        came = points_of([lines.receive("bank", LinkingKind.LINK_POINTS)])
        lines.send(ReturnedPoints(points=array([power(one) for one in came])).to_message(), "bank")
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
LIES: dict[str, tuple[Callable[[], list[RecordPoints]], str]] = {
    "neutral": (lambda: records([*random_points(2), NEUTRAL]), "no point of the group"),
    "no point": (lambda: records([*random_points(2), b"\xff" * 32]), "no point of the group"),
    "repeated": (lambda: records(random_points(1) * 2), "sent a point twice"),
    "fewer": (lambda: [RecordPoints(count=3, points=array(random_points(2)))], "other points than"),
    "none": (lambda: [RecordPoints(count=0, points=array([]))], "count"),
    "too many": (lambda: [RecordPoints(count=2**40, points=array(random_points(1)))], "count"),
}


def records(points: list[bytes]) -> list[RecordPoints]:
    return [RecordPoints(count=len(points), points=array(points))]


@pytest.mark.parametrize("name", LIES)
def test_a_secondary_that_lies_is_refused(name: str) -> None:
    """Before the primary has computed anything with its secret that goes back."""
    make, message = LIES[name]
    spec = of_bank()
    wires = Wires()

    def secondary() -> None:
        lines = wires.of("bank")
        lines.receive("agency", LinkingKind.LINK_POINTS)
        for one in make():
            lines.send(one.to_message(), "agency")

    party = data_party(spec, keys("agency", "abc"), wires.of("agency"), rows=3)
    found = run_all(
        {"bank": secondary, "agency": lambda: protection_of(spec).link_as_primary(party)}
    )
    assert isinstance(found["agency"], ProtocolError), found["agency"]
    assert message in str(found["agency"])
    assert len(sent(wires, "agency", "bank")) == 1


@pytest.mark.parametrize("lie", ["neutral rows", "one point for all", "fewer rows"])
def test_a_primary_that_lies_is_refused(lie: str) -> None:
    spec = of_bank()
    wires = Wires()

    def primary() -> None:
        lines = wires.of("agency")
        rows = {"neutral rows": [NEUTRAL] * 3, "fewer rows": random_points(2)}
        points = rows.get(lie, random_points(3))
        lines.send(RowPoints(points=array(points)).to_message(), "bank")
        lines.receive("bank", LinkingKind.LINK_POINTS)
        lines.send(ReturnedPoints(points=array(random_points(1) * 3)).to_message(), "bank")

    party = data_party(spec, keys("bank", "abc"), wires.of("bank"), rows=3)
    found = run_all(
        {"agency": primary, "bank": lambda: protection_of(spec).link_as_secondary(party)}
    )
    assert isinstance(found["bank"], ProtocolError), found["bank"]
    assert not any(one.kind is Linked.KIND for _, _, one in wires.travelled)


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


@pytest.mark.parametrize(
    ("linkage", "message"),
    [
        ({"metric": "euclidean", "protection": "psi"}, "finds equal keys alone"),
        ({"metric": "exact", "protection": "hashes", "pad_to": 9}, 'goes with protection = "psi"'),
        ({"metric": "exact", "protection": "psi", "pad_to": 0}, "pad_to"),
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
    config = read_federation(save(tmp_path, source))
    require_linkable(config)
    require_helpers(config)


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rbcl", None)
    with pytest.raises(ConfigError, match=r"pip install 'securevfl\[psi\]'"):
        psi.hashed(["a"], b"")


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
