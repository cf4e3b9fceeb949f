"""The kit of a party's IT, certificates that meet, and what ``check --peers`` finds."""

import datetime
import json
import re
import shutil
import socket
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.command_line import securevfl

from securevfl import read_federation
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.desk.setup import kit
from securevfl.desk.setup.kit import PeerFinding
from securevfl.desk.setup.spelling import forms_of_party
from securevfl.testing import write_federation
from securevfl.transport.identity import Identity, expiring
from securevfl.transport.star import PrimaryTransport, SecondaryTransport, new_session

Capture = pytest.CaptureFixture[str]
NAMES = ("agency", "bank-1", "bank-2")


@pytest.fixture(scope="module")
def joined_kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit for each of three parties, which have taken in one another's certificates."""
    folder = tmp_path_factory.mktemp("kits")
    path = write_federation(folder, rows=30)
    for name in NAMES:
        kit.provision(path, name, folder / name, days=365)
    sent = [folder / name / "identity" / "identity.pem" for name in NAMES]
    for name in NAMES:
        own = folder / name
        kit.join(own / kit.FEDERATION, name, own / kit.IDENTITY, sent)
    return folder


@pytest.fixture
def kits(joined_kits: Path, tmp_path: Path, port: int) -> Path:
    """A copy of the kits, with a port of its own."""
    shutil.copytree(joined_kits, tmp_path / "kits")
    for name in NAMES:
        path = tmp_path / "kits" / name / kit.FEDERATION
        path.write_text(path.read_text().replace("127.0.0.1:0", f"127.0.0.1:{port}"))
    return tmp_path / "kits"


def look(kits: Path, name: str, *, wait_s: float = 1.0) -> list[PeerFinding]:
    config = read_federation(kits / name / kit.FEDERATION)
    folder = kits / name / kit.IDENTITY
    return list(kit.run_peer_checks(config, name, folder, runs=kits, wait_s=wait_s))


def look_at_once(kits: Path, *, wait_s: float = 5.0) -> dict[str, list[PeerFinding]]:
    """Let all parties look at the same time."""
    found: dict[str, list[PeerFinding]] = {}
    looking = [
        threading.Thread(
            target=lambda name=name: found.update({name: look(kits, name, wait_s=wait_s)})
        )
        for name in NAMES
    ]
    for one in looking:
        one.start()
    for one in looking:
        one.join(60)
    return found


def wrong(found: list[PeerFinding]) -> str:
    return " | ".join(f"{one.exit_code} {one.text}" for one in found if one.exit_code)


def test_a_kit_holds_all_that_one_organisation_needs(kits: Path, capfd: Capture) -> None:
    """Its key is its own alone, and every file names the party and nothing that is to be filled."""
    folder = kits / "agency"
    assert stat.S_IMODE((folder / "identity" / "identity.key").stat().st_mode) == 0o600
    readme = (folder / "README.md").read_text()
    assert readme.count("\n       securevfl ") == 3
    for file in ("README.md", "compose.yaml", "securevfl-agency.service"):
        text = (folder / file).read_text()
        assert "agency" in text
        assert "$name" not in text
    assert f'ExecStart="{sys.executable}" -m securevfl party' in text
    asked = ("--name", "agency", "--out", folder)
    ended = securevfl(capfd, "identity", "provision", folder / kit.FEDERATION, *asked)
    assert "a key is never overwritten" in ended.complaint


def test_all_read_out_one_code(kits: Path, capfd: Capture) -> None:
    """An altered certificate or file changes it; lines and comments of the file stay."""
    codes = {kit.spoken(read_federation(kits / name / kit.FEDERATION).digest) for name in NAMES}
    (code,) = codes
    assert len(code) == 35
    path = kits / "bank-1" / kit.FEDERATION
    path.write_text("# Agreed on 3 May.\n" + path.read_text())
    asked = ("--name", "bank-1", "--identity", kits / "bank-1" / "identity", "--json")
    sent = kits / "agency" / "identity" / "identity.pem"
    told = json.loads(securevfl(capfd, "identity", "join", path, sent, *asked).out)
    assert told["code"] == code
    assert told["missing"] == []
    assert path.read_text().startswith("# Agreed on 3 May.\n")


def test_another_certificate_is_taken_only_if_asked_for(kits: Path, tmp_path: Path) -> None:
    path, folder = kits / "agency" / kit.FEDERATION, kits / "agency" / kit.IDENTITY
    old = read_federation(path).party("bank-1").identity
    new = kit.provision(
        kits / "bank-1" / kit.FEDERATION, "bank-1", kits / "bank-1", days=9, renew=True
    )
    sent = [kits / "bank-1" / "identity" / "identity.pem"]
    with pytest.raises(ConfigError, match="--replace"):
        kit.join(path, "agency", folder, sent)
    assert read_federation(path).party("bank-1").identity == old != new
    kit.join(path, "agency", folder, sent, replace=True)
    assert read_federation(path).party("bank-1").identity == new
    assert list((kits / "bank-1").glob("identity-until-*/identity.key"))


def test_a_file_of_another_form_gets_its_lines_by_hand() -> None:
    with pytest.raises(ConfigError, match=r"by hand: bank: identity = \"ed25519:x\""):
        kit.with_identities("party = [{name = 'bank'}]\n", {"bank": "ed25519:x"}, file="fed.toml")


def test_a_certificate_is_warned_of_thirty_days_ahead() -> None:
    made = Identity.create("bank", valid_days=100)
    now = datetime.datetime.now(datetime.UTC)
    assert expiring(made, [], now=now + datetime.timedelta(days=69)) == []
    (text,) = expiring(made, [], now=now + datetime.timedelta(days=71))
    assert text.startswith("bank: its certificate expires at ")
    # Those of a run on one machine are made for it, and are no news.
    assert expiring(Identity.create("bank", valid_days=2), []) == []


def test_all_is_fine_where_it_is(kits: Path) -> None:
    found = look_at_once(kits)
    assert {name: wrong(of_one) for name, of_one in found.items()} == dict.fromkeys(NAMES, "")
    met = [one.text for one in found["agency"] if one.what in NAMES]
    assert [text.split(":")[0] for text in met] == ["bank-1", "bank-2"]
    assert "same file, same version, clocks 0 s apart" in met[0]


def _no_identity(kits: Path) -> None:
    shutil.rmtree(kits / "bank-1" / "identity")


def _open_key(kits: Path) -> None:
    (kits / "bank-1" / "identity" / "identity.key").chmod(0o644)


def _expired(kits: Path) -> None:
    folder = kits / "bank-1"
    made = Identity.create("bank-1", valid_days=1e-9)
    trusted = Identity.load(folder / "identity", "bank-1").trusted
    shutil.rmtree(folder / "identity")
    made.trusting({**trusted, "bank-1": made.certificate}).save(folder / "identity")
    text = (folder / kit.FEDERATION).read_text()
    named = kit.with_identities(text, {"bank-1": made.public_text}, file="")
    (folder / kit.FEDERATION).write_text(named)


def _other_pin(kits: Path) -> None:
    path = kits / "bank-1" / kit.FEDERATION
    other = Identity.create("agency", valid_days=1).public_text
    path.write_text(kit.with_identities(path.read_text(), {"agency": other}, file=""))


def _no_certificate(kits: Path) -> None:
    (kits / "bank-1" / "identity" / "trust" / "agency.pem").unlink()


def _no_such_host(kits: Path) -> None:
    path = kits / "bank-1" / kit.FEDERATION
    path.write_text(path.read_text().replace("127.0.0.1", "no-such-host.invalid"))


ALONE = {
    "no identity": (_no_identity, "2 .*identity.key: No such file"),
    "a key that others may read": (_open_key, "2 .*chmod 600"),
    "an expired certificate": (_expired, "2 bank-1: its certificate expired"),
    "another key pinned": (_other_pin, "2 agency: its certificate in bank-1's trust folder holds"),
    "no certificate of a peer": (_no_certificate, "2 agency: bank-1 has no certificate"),
    "a name that is not known": (_no_such_host, "3 agency.*no-such-host.invalid"),
    "a closed port": (lambda _kits: None, "3 agency.*[Cc]onnection refused"),
}


@pytest.mark.parametrize(("plant", "told"), ALONE.values(), ids=ALONE)
def test_a_mistake_is_found_with_nobody_else_there(
    plant: Callable[[Path], None], told: str, kits: Path
) -> None:
    plant(kits)
    assert re.search(told, wrong(look(kits, "bank-1")))


def test_a_full_disk_is_found(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=2**20))
    assert "make 1 GiB free" in wrong(look(kits, "bank-1"))


def test_a_port_in_use_and_one_where_another_service_is_are_found(kits: Path, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        assert "cannot be listened on (Address already in use)" in wrong(look(kits, "agency"))
        assert "does another service answer there?" in wrong(look(kits, "bank-1"))


def test_other_files_are_found_at_both_ends(kits: Path) -> None:
    path = kits / "bank-1" / kit.FEDERATION
    path.write_text(path.read_text().replace("epochs = 2", "epochs = 3"))
    found = look_at_once(kits)
    for name, peer in (("agency", "bank-1"), ("bank-1", "agency")):
        assert wrong(found[name]) == (
            f"3 {peer}: has another federation file; give every party the same one"
        )
    assert wrong(found["bank-2"]) == ""


def test_a_party_that_does_not_come_is_named(kits: Path) -> None:
    assert wrong(look(kits, "agency")).count("did not call within 1 s") == 2


def test_versions_and_clocks_are_compared(kits: Path) -> None:
    config = read_federation(kits / "agency" / kit.FEDERATION)
    own = kit.own_facts(config, [])
    facts = replace(own, version="0.1\x1b[2J", clock_s=0.0).to_message()
    facts = replace(facts, sender="bank-1")
    told = wrong(list(kit.compare_peer(config, own, facts)))
    assert "has securevfl 0.1 [2J, and this party" in told
    assert "s behind this one; set both by NTP" in told


SPELLED = """
federation = {name = "loans", task = "binary"}
encoder = {method = "auto"}
privacy = {epsilon = 8.0, delta = 1e-6}
linkage = {metric = "exact", protection = "none"}
[[party]]
name = "bank"
role = "primary"
data = "bank.csv"
key = ["id"]
label = "y"
address = "127.0.0.1:0"
[[party]]
name = "bureau"
role = "secondary"
data = "bureau.csv"
key = ["id"]
scaling = "bounds"
bounds = [0, 1]
"""


@pytest.mark.parametrize(
    ("spell", "says", "few"),
    [
        (lambda number: f"{number:08d}", "with linkage.strip_zeros = true", True),
        (
            lambda number: f"{number}/{number}",
            "like 999999, those of bureau like 999999-99",
            True,
        ),
        (str, "keys have a form in common", False),
    ],
    ids=["zeros", "no setting", "alike"],
)
def test_the_likeliest_cause_of_few_links_is_named_before_a_run(
    spell: Callable[[int], str], says: str, few: bool, tmp_path: Path
) -> None:
    """By the forms of both parties' keys, which hold no value; both ends say the same."""
    (tmp_path / "fed.toml").write_text(SPELLED)
    keys = range(100_000, 100_400)
    rows = {"bank": [f"{key},{key % 2}" for key in keys]}
    rows["bureau"] = [f"{spell(key)},0.5" for key in keys]
    for name, column in (("bank", "y"), ("bureau", "x")):
        (tmp_path / f"{name}.csv").write_text("\n".join([f"id,{column}", *rows[name]]) + "\n")
    config = read_federation(tmp_path / "fed.toml")
    facts = {
        name: kit.own_facts(config, forms_of_party(config, name, tmp_path))
        for name in ("bank", "bureau")
    }
    assert "1002" not in facts["bank"].forms + facts["bureau"].forms

    for own, peer in (("bank", "bureau"), ("bureau", "bank")):
        message = replace(facts[peer].to_message(), sender=peer)
        _, finding = kit.compare_peer(config, facts[own], message)
        assert says.replace("of bureau", "of this party" if own == "bureau" else "of bureau") in (
            finding.text
        )
        assert finding.warns == few
        assert not finding.exit_code


def test_forms_that_are_none_are_refused(kits: Path) -> None:
    config = read_federation(kits / "agency" / kit.FEDERATION)
    own = kit.own_facts(config, [])
    for forms in ("{", "{}", "[7]", '[{"texts": 3}]', "[" * 9_000, '["a"]' + " " * 20_000):
        message = replace(replace(own, forms=forms).to_message(), sender="bank-1")
        with pytest.raises(SecureVflError, match="bank-1: sent forms of keys that are none"):
            list(kit.compare_peer(config, own, message))


def test_the_command_ends_with_the_code_of_what_it_found(
    kits: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kits / "bank-1")
    asked = ("check", kit.FEDERATION, "--name", "bank-1", "--peers", "--wait", "0.5")
    ended = securevfl(capfd, *asked, "--identity", "identity", "--json")
    assert ended.code == 3
    assert [one["what"] for one in json.loads(ended.out)] == [
        "identity",
        "disk",
        "file",
        "wait",
        "agency",
    ]
    assert securevfl(capfd, *asked, "--identity", "nowhere").code == 2
    assert "needs --name and --identity" in securevfl(capfd, *asked).complaint


def test_a_run_waits_for_a_party_that_is_still_in_check_peers(kits: Path, port: int) -> None:
    """The probe is refused and named, the run goes on, and the same party joins it later."""
    config = read_federation(kits / "agency" / kit.FEDERATION)
    pinned = kit.pinned_by(config)
    own = {name: Identity.load(kits / name / kit.IDENTITY, name) for name in ("agency", "bank-1")}
    place = ("127.0.0.1", port)
    probe: list[PeerFinding] = []
    with PrimaryTransport(place, own["agency"], pinned, new_session(), config.ranks) as star:
        star.listen()
        looking = threading.Thread(target=lambda: probe.extend(look(kits, "bank-1", wait_s=2.0)))
        looking.start()
        star.wait_for_parties(20.0, stop=lambda _waited_s: "bank-1" in star.busy)
        looking.join(60)
        assert star.busy["bank-1"].startswith("bank-1 is still in securevfl check --peers")
    assert "3 agency" in wrong(probe)
    assert "it is in a run, and this party in securevfl check --peers" in wrong(probe)
    assert any("waiting for agency, up to 2 s" in finding.text for finding in probe)


def test_a_party_that_was_in_check_peers_may_join_the_run(kits: Path, port: int) -> None:
    config = read_federation(kits / "agency" / kit.FEDERATION)
    pinned = kit.pinned_by(config)
    own = {name: Identity.load(kits / name / kit.IDENTITY, name) for name in ("agency", "bank-1")}
    place = ("127.0.0.1", port)
    with PrimaryTransport(place, own["agency"], pinned, new_session(), config.ranks) as star:
        star.listen()
        assert "in a run" in wrong(look(kits, "bank-1", wait_s=0.5))
        with SecondaryTransport(place, own["bank-1"], pinned, config.ranks) as party:
            party.connect(20.0)
            joined: list[str] = []
            star.wait_for_parties(20.0, joined.append, lambda _waited_s: bool(joined))
            assert joined == ["bank-1"]
            assert not star.busy
            assert star.failure is None


def test_a_party_says_that_the_primary_is_still_in_check_peers(kits: Path, port: int) -> None:
    """Once, and not at every call."""
    config = read_federation(kits / "agency" / kit.FEDERATION)
    own = Identity.load(kits / "bank-1" / kit.IDENTITY, "bank-1")
    notes: list[str] = []
    looking = threading.Thread(target=lambda: look(kits, "agency", wait_s=4.0))
    looking.start()
    with (
        SecondaryTransport(("127.0.0.1", port), own, kit.pinned_by(config), config.ranks) as party,
        pytest.raises(SecureVflError),
    ):
        party.connect(4.0, on_busy=notes.append)
    looking.join(60)
    (note,) = notes
    assert "it is still in securevfl check --peers" in note


def test_a_primary_that_no_other_machine_reaches_is_objected_to(
    tmp_path: Path, capfd: Capture
) -> None:
    path = write_federation(tmp_path, rows=30)
    asked = ("identity", "provision", path, "--name", "bank-1", "--out")
    assert "address is 127.0.0.1" in securevfl(capfd, *asked, tmp_path / "one").err
    path.write_text(path.read_text().replace("127.0.0.1", "agency.example"))
    assert "warning" not in securevfl(capfd, *asked, tmp_path / "two").err
