"""Heads that others keep: rolled back, emptied and rewritten ledgers are noticed and named."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.countersigners import NAMES, OCCASION, Table, remembered, rewrite
from helpers.star import make_star, together
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from securevfl.core.errors import AuthenticationError, ConfigError, PrivacyError, ProtocolError
from securevfl.ledger.chain import GENESIS, Chain, ChainedFile, head_after
from securevfl.ledger.countersigning import (
    SERVED_ROWS,
    SERVED_S,
    Countersigner,
    Countersigning,
    CountersignRequest,
    Heads,
    LedgerKind,
    Memories,
    SignedHead,
    forget_party,
)
from securevfl.transport.message import Message

NAMED = "party 'rental': its ledger does not continue the one that it signed on"


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def run(table: Table, *, charges: int = 3) -> None:
    """Let everybody meet, release something, and part."""
    with table.open() as session:
        session.start()
        session.charge(charges)
        session.meet("epoch 1")
        session.charge(charges)
        session.meet("end")


def test_the_head_is_a_fold_of_line_hashes(tmp_path: Path) -> None:
    """Whoever knows a head follows the chain from there by hashes alone."""
    file = ChainedFile(tmp_path / "ledger.jsonl")
    for number in range(5):
        file.append({"kind": "charge", "number": number})
    file.close()
    chain = file.chain

    assert chain.head_at(0) == GENESIS
    for known in range(6):
        head = chain.head_at(known)
        assert head is not None
        assert head_after(head, chain.hashes_after(known)) == chain.head
    assert (chain.head_at(6), chain.head_at(-1)) == (None, None)
    assert chain.contains(chain.head.hex())
    assert not chain.contains("00")


def test_equal_lines_have_unequal_hashes() -> None:
    """A hash that travels tells nothing that could be guessed: every line has its own salt."""
    one, two = Chain(), Chain()

    lines = {chain.line_of({"kind": "charge", "epsilon": 1.0}) for chain in (one, two)}

    assert len(lines) == 2
    assert all(len(json.loads(line)["salt"]) == 32 for line in lines)


def test_honest_ledgers_go_on_from_run_to_run(table: Table) -> None:
    """Three sessions, charges elsewhere in between; everybody's lines hold the others' heads."""
    run(table)
    elsewhere = ChainedFile(table.path("bank"))
    for number in range(40):
        elsewhere.append({"kind": "charge", "number": number})
    elsewhere.close()
    run(table)
    run(table)

    for name in NAMES:
        file = ChainedFile(table.path(name))
        kept = [entry for entry in file.entries if entry["kind"] == "countersigned"]
        file.close()
        assert [entry["point"] for entry in kept] == ["start", "epoch 1", "end"] * 3
        assert all(
            [one["party"] for one in entry["statements"]] == [p for p in NAMES if p != name]
            for entry in kept
        )
        # Public data alone: no spending, no rows.
        assert set(kept[0]) == {
            "kind",
            "time",
            "federation",
            "digest",
            "run",
            "meeting",
            "point",
            "statements",
        }
        known = remembered(file.entries, OCCASION.federation)
        for other, one in known.items():
            theirs = ChainedFile(table.path(other))
            assert theirs.chain.head_at(one.lines) == one.head
            theirs.close()


def roll_back(table: Table, copies: Path) -> None:
    shutil.copy(copies / "rental.jsonl", table.path("rental"))


def empty(table: Table, _copies: Path) -> None:
    table.path("rental").unlink()


def forge(table: Table, _copies: Path) -> None:
    rewrite(table.path("rental"))


def exchange(table: Table, _copies: Path) -> None:
    shutil.copy(table.path("bank"), table.path("rental"))


@pytest.mark.parametrize("tamper", [roll_back, empty, forge, exchange])
def test_a_ledger_that_does_not_go_on_is_noticed_by_each_of_the_others(
    table: Table, tmp_path: Path, tamper
) -> None:
    """Every other party notices by itself, names it and writes nothing."""
    run(table)
    copies = tmp_path / "copies"
    copies.mkdir()
    shutil.copy(table.path("rental"), copies)
    run(table)
    tamper(table, copies)
    before = {name: table.path(name).read_bytes() for name in ("agency", "bank")}

    with table.open() as session:
        memories = session.memories()
        for signer in session.signers.values():
            signer.open(memories)
        heads = session.heads("start")
        for name in ("agency", "bank"):
            with pytest.raises(ProtocolError, match=NAMED) as caught:
                session.signers[name].keep("start", heads)
            assert caught.value.party == "rental"
            assert "rolled back, emptied or rewritten" in str(caught.value)

    assert before == {name: table.path(name).read_bytes() for name in ("agency", "bank")}


def test_a_rollback_within_a_run_is_noticed_at_the_next_point(table: Table) -> None:
    """The proof of every point begins where the last one ended."""
    with table.open() as session:
        session.start()
        kept = table.path("rental").read_bytes()
        session.charge(2)
        session.meet("epoch 1")
        session.ledgers["rental"].close()
        table.path("rental").write_bytes(kept)
        back = ChainedFile(table.path("rental"))
        session.charge(1, "agency", "bank")
        session.signers["rental"].ledger = back
        heads = session.heads("epoch 2")
        back.close()

        with pytest.raises(ProtocolError, match=NAMED):
            session.signers["bank"].keep("epoch 2", heads)


def test_who_remembers_nothing_takes_a_ledger_as_it_comes(table: Table) -> None:
    """A first meeting, or another federation of the same names, refuses nobody."""
    run(table)
    table.path("rental").unlink()

    with table.open(occasion=replace(OCCASION, federation="another")) as session:
        session.start()


def test_an_old_ledger_is_forgotten_on_purpose_alone(table: Table) -> None:
    """A new table under an old name: who remembers says so in its own ledger."""
    run(table)
    table.path("rental").unlink()
    for name in ("agency", "bank"):
        assert forget_party(table.path(name), party="rental") == ["test"]
        assert json.loads(table.path(name).read_text().splitlines()[-1])["kind"] == "forgotten"
    run(table)
    run(table)

    with pytest.raises(ConfigError, match="remembers nothing of 'nobody'; it knows of 'bank', 'r"):
        forget_party(table.path("agency"), party="nobody")
    with pytest.raises(ConfigError, match="does not exist"):
        forget_party(table.folder / "none.jsonl", party="rental")
    assert not (table.folder / "none.jsonl").exists()


def test_forgetting_one_party_keeps_the_others(table: Table) -> None:
    """The way out is for one party alone."""
    run(table)
    forget_party(table.path("agency"), party="rental")
    rewrite(table.path("bank"))

    with table.open() as session, pytest.raises(ProtocolError, match="party 'bank': its ledger"):
        session.start()


def altered_bytes(raw: bytes, draw) -> bytes:
    position = draw(st.integers(0, len(raw) - 1))
    mask = draw(st.integers(1, 255))
    return raw[:position] + bytes([raw[position] ^ mask]) + raw[position + 1 :]


def altered_head(one: SignedHead, field: str, draw) -> SignedHead:
    if field in ("head", "signature"):
        return replace(one, **{field: altered_bytes(getattr(one, field), draw)})
    if field in ("lines", "since"):
        more = draw(st.integers(-50, 50).filter(bool))
        return replace(one, **{field: max(0, getattr(one, field) + more)})
    if draw(st.booleans()) and len(one.proof):
        return replace(one, proof=one.proof[: draw(st.integers(0, len(one.proof) - 1))])
    flat = altered_bytes(one.proof.tobytes() + bytes(32), draw)
    return replace(one, proof=np.frombuffer(flat, dtype=np.uint8).reshape(-1, 32))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_every_altered_field_of_a_statement_is_noticed(session_of_statements, data) -> None:
    """Whatever a relay alters, the receiver says that it is not signed, and keeps nothing."""
    session, heads = session_of_statements
    field = data.draw(st.sampled_from(["head", "lines", "signature", "since", "proof"]))
    altered = altered_head(heads["rental"], field, data.draw)
    if altered.lines == heads["rental"].lines and altered.since == heads["rental"].since:
        same = np.array_equal(altered.proof, heads["rental"].proof)
        if same and (altered.head, altered.signature) == (
            heads["rental"].head,
            heads["rental"].signature,
        ):
            return
    before = session.ledgers["bank"].head

    with pytest.raises(AuthenticationError, match="head at epoch 1 that came for 'rental'"):
        session.signers["bank"].keep("epoch 1", {**heads, "rental": altered})
    assert session.ledgers["bank"].head == before


@pytest.fixture
def session_of_statements(table: Table):
    run(table)
    with table.open() as session:
        session.start()
        session.charge(4)
        yield session, session.heads("epoch 1")


@pytest.mark.parametrize("field", ["federation", "digest", "run"])
def test_a_statement_of_another_run_is_refused(table: Table, field: str) -> None:
    """Federation, file and run are in what is signed."""
    with table.open() as session:
        session.start()
        other = replace(OCCASION, **{field: "x"})
        signer = session.signers["rental"]
        signer.occasion = other
        heads = session.heads("epoch 1")

        with pytest.raises(AuthenticationError, match="not signed for this run"):
            session.signers["bank"].keep("epoch 1", heads)


def test_a_statement_serves_one_point_of_one_meeting(table: Table) -> None:
    """An old statement, replayed at another point or in another session of the same id, is none."""
    with table.open() as session:
        session.start()
        old = session.heads("epoch 1")
        with pytest.raises(AuthenticationError, match="head at epoch 2 that came for"):
            session.signers["bank"].keep("epoch 2", old)
    with table.open() as session:
        memories = session.memories()
        for signer in session.signers.values():
            signer.open(memories)
        with pytest.raises(AuthenticationError, match="head at epoch 1 that came for"):
            session.signers["bank"].keep("epoch 1", old)


def test_a_party_cannot_speak_for_another_one(table: Table) -> None:
    """The relay puts one party's signed head in another one's place."""
    with table.open() as session:
        session.start()
        heads = session.heads("end")

        with pytest.raises(AuthenticationError, match="came for 'rental'"):
            session.signers["bank"].keep("end", {**heads, "rental": heads["agency"]})


@pytest.mark.parametrize("field", ["nonce", "signature", "head", "lines", "left out"])
def test_an_altered_memory_is_noticed(table: Table, field: str) -> None:
    """The relay cannot make a party forget, and so hide another one's rollback."""
    run(table)
    with table.open() as session:
        memories = session.memories()
        true = memories["agency"]
        (head, lines), rest = true.heads["rental"], {"bank": true.heads["bank"]}
        memories["agency"] = {
            "nonce": replace(true, nonce=bytes(16)),
            "signature": replace(true, signature=bytes(64)),
            "head": replace(true, heads={**rest, "rental": (bytes(32), lines)}),
            "lines": replace(true, heads={**rest, "rental": (head, lines + 1)}),
            "left out": replace(true, heads=rest),
        }[field]

        with pytest.raises(
            AuthenticationError, match="list of ledger heads that came for 'agency'"
        ):
            session.signers["bank"].open(memories)
        with pytest.raises(ProtocolError, match="other ledger heads than this party sent"):
            session.signers["agency"].open(memories)


def test_all_must_have_heard_the_same(table: Table) -> None:
    """A relay that tells parties different lists: their statements do not fit one another."""
    with table.open() as session:
        first = session.memories()
        second = {**first, "agency": session.signers["agency"].memory()}
        session.signers["bank"].open(first)
        session.signers["agency"].open(second)
        session.signers["rental"].open(second)
        heads = session.heads("start")

        with pytest.raises(AuthenticationError, match="not signed for this run"):
            session.signers["bank"].keep("start", heads)


def test_malformed_messages_are_refused() -> None:
    """Sizes are checked before anything is believed."""
    one = SignedHead(
        head=bytes(32),
        lines=3,
        signature=bytes(64),
        since=1,
        proof=np.zeros((2, 32), dtype=np.uint8),
    )
    for wrong in (
        replace(one, head=bytes(31)),
        replace(one, signature=bytes(63)),
        replace(one, since=4),
        replace(one, since=-1),
        replace(one, lines=1 << 40),
        replace(one, proof=np.zeros((1, 32), dtype=np.uint8)),
    ):
        message = Heads(heads={"bank": wrong}).to_message()
        with pytest.raises(ProtocolError):
            Heads.from_message(message, senders=["bank"])
    message = Heads(heads={"bank": one}).to_message()
    assert Heads.from_message(message, senders=["bank"]).heads["bank"].lines == 3
    with pytest.raises(ProtocolError, match="has 'head:bank', which is none of its fields"):
        Heads.from_message(message, senders=["rental"])
    heads = {"heads:bank": np.zeros((3, 32), dtype=np.uint8)}
    with pytest.raises(ProtocolError, match="must have shape"):
        Memories.from_message(
            Message(kind=Memories.KIND, tensors=heads), senders=["bank"], parties=("a", "b")
        )


def test_malformed_lines_about_others_are_refused() -> None:
    """A ledger's own lines are checked as well."""
    line = {"kind": "countersigned", "federation": "test", "time": "now", "statements": [{}]}
    with pytest.raises(PrivacyError, match="is malformed"):
        remembered([line], "test")


def signer_of(star, name: str, folder: Path) -> tuple[Countersigner, ChainedFile]:
    ledger = ChainedFile(folder / f"{name}.jsonl")
    ledger.append({"kind": "open"})
    return Countersigner(
        ledger, star.identity(name), star.pinned, OCCASION, session=b"s" * 16, known={}
    ), ledger


def test_over_the_star_everybody_keeps_everybodys_head(tmp_path: Path) -> None:
    """Start, an epoch and the end between three real ends of the star."""
    star = make_star(tmp_path)
    with star.joined() as (primary, ends):
        signers = {name: signer_of(star, name, tmp_path) for name in star.ranks}

        def lead() -> None:
            signing = Countersigning(
                signers["agency"][0], primary, deadline_s=30, log=lambda *_, **__: None
            )
            signing.start()
            signing.meet("epoch 1")
            signing.request("end")

        def follow(name: str):
            def life() -> bool:
                signing = Countersigning(
                    signers[name][0],
                    ends[name],
                    releases_once=False,
                    deadline_s=30,
                    log=lambda *_, **__: None,
                )
                signing.start()
                signing.meet("epoch 1")
                asked = ends[name].receive(LedgerKind.COUNTERSIGN, round_number=0, deadline_s=30)
                return signing.answer(CountersignRequest.from_message(asked))

            return life

        results = together([lead, *(follow(name) for name in ends)])
    assert results == [None, True, True]
    for _, ledger in signers.values():
        ledger.close()
    again = {name: ChainedFile(tmp_path / f"{name}.jsonl") for name in star.ranks}
    for file in again.values():
        file.close()
    for name, file in again.items():
        known = remembered(file.entries, "test")
        assert set(known) == set(star.ranks) - {name}
        for other, one in known.items():
            assert again[other].chain.head_at(one.lines) == one.head


@pytest.mark.parametrize("frozen", [False, True])
def test_heads_are_stated_where_they_are_due_and_nowhere_else(tmp_path: Path, frozen: bool) -> None:
    """A primary that asks again and again gets no statement, and fills nobody's ledger."""
    table = Table(tmp_path)
    star = make_star(tmp_path / "star")
    with table.open() as session, star.joined() as (primary, ends):
        memories = session.memories()
        for signer in session.signers.values():
            signer.open(memories)
        signing = Countersigning(
            session.signers["bank"],
            ends["bank"],
            releases_once=frozen,
            deadline_s=30,
            log=lambda *_, **__: None,
        )
        asked = CountersignRequest(point="released")
        if frozen:
            told = Heads(heads=session.heads("released")).to_message()
            primary.send("bank", told)
            assert signing.answer(asked) is False

        with pytest.raises(ProtocolError, match="where none are due; nothing is signed"):
            signing.answer(asked)


class Clock:
    """Seconds, as a test sets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_served_model_is_countersigned_by_the_hour_and_by_the_thousand_rows(
    tmp_path: Path,
) -> None:
    """The primary asks where something was predicted; a secondary signs about then, no sooner."""
    table, clock = Table(tmp_path), Clock()
    star = make_star(tmp_path / "star")
    with table.open() as session, star.joined() as (primary, ends):
        session.start()

        def signing_of(name: str, end, **more) -> Countersigning:
            return Countersigning(
                session.signers[name],
                end,
                deadline_s=30,
                log=lambda *_, **__: None,
                clock=clock,
                **more,
            )

        lead = signing_of("agency", primary)
        others = {name: signing_of(name, ends[name], releases_once=False) for name in ends}

        def serve(rows: int, *, seconds: float) -> None:
            clock.now += seconds
            for one in (lead, *others.values()):
                one.count_rows(rows)

        def follow(name: str):
            def life() -> bool:
                asked = ends[name].receive(LedgerKind.COUNTERSIGN, round_number=0, deadline_s=30)
                return others[name].answer(CountersignRequest.from_message(asked))

            return life

        def signed() -> None:
            assert lead.long_served()
            lives = [lambda: lead.request("served"), *map(follow, ends)]
            assert together(lives) == [None, False, False]
            assert not lead.long_served()

        serve(0, seconds=10 * SERVED_S)
        assert not lead.long_served(), "nothing was predicted, so nothing is new"
        serve(1, seconds=0)
        signed()
        serve(SERVED_ROWS - 1, seconds=SERVED_S - 1)
        assert not lead.long_served()
        serve(1, seconds=0)
        signed()
        serve(1, seconds=SERVED_S)
        signed()
        # Not by the primary's wish alone: it would fill everybody's ledger.
        serve(SERVED_ROWS - 1, seconds=SERVED_S / 2 - 1)
        for one in others.values():
            with pytest.raises(ProtocolError, match=r"ledger heads \(served\) where none are due"):
                one.answer(CountersignRequest(point="served"))
    for name in NAMES:
        file = ChainedFile(table.path(name))
        file.close()
        points = [entry["point"] for entry in file.entries if entry["kind"] == "countersigned"]
        assert points == ["start", "served", "served", "served"]
