"""The tutorial's blocks work in the order in which a reader meets them."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command_line import Ended, securevfl
from helpers.warm import printed

from securevfl import read_federation

PAGE = (Path(__file__).parents[2] / "docs/tutorial.md").read_text(encoding="utf-8")
Capture = pytest.CaptureFixture[str]


def blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    return [text for named, text in fences if named == language]


def commands(name: str) -> Iterator[list[str]]:
    """Yield the arguments of each ``securevfl NAME`` line, without the comment behind it."""
    for block in blocks(""):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if " ".join(words).startswith(f"securevfl {name}"):
                yield words[1:]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> Path:
    """A folder after steps 1 and 2; the address is free, since tests may run side by side."""
    monkeypatch.chdir(tmp_path)
    (script,) = blocks("python")
    exec(compile(script, "make_tables.py", "exec"), {})
    proposed = only("init", capfd)
    assert proposed.code == 0, proposed.err
    path = tmp_path / "loans.toml"
    federation = path.read_text(encoding="utf-8").replace("127.0.0.1:7431", "127.0.0.1:0")
    path.write_text(federation, encoding="utf-8")
    return tmp_path


def only(name: str, capfd: Capture) -> Ended:
    (arguments,) = commands(name)
    return securevfl(capfd, *arguments)


def test_a_file_is_proposed_and_nothing_is_wrong_with_it(folder: Path, capfd: Capture) -> None:
    """The settings that the page explains, and the bounds that its command declares."""
    path = folder / "loans.toml"

    checked = only("check", capfd)

    assert checked.code == 0, checked.err
    text = path.read_text(encoding="utf-8")
    explained = re.findall(r"`(\w+ = [\w\"]+)`", PAGE.split("## 3.")[0])
    assert len(explained) == 4
    assert [line for line in explained if f"\n{line}" not in text] == []
    written = read_federation(path)
    assert written.federation.task == "binary"
    assert (written.privacy.epsilon, written.privacy.delta) == (2.0, 1e-5)
    assert written.privacy.unit == "secondary-record"
    assert written.linkage.truth == "person"
    assert {party.name: (party.key, party.bounds) for party in written.parties} == {
        "bank": (("lon", "lat"), None),
        "telecom": (("lon", "lat"), {"late_bills": (0, 12), "contract_years": (0, 20)}),
        "retailer": (("lon", "lat"), {"spending": (0, 700), "returns": (0, 15)}),
    }


def test_the_links_are_as_good_as_it_says(folder: Path, capfd: Capture) -> None:
    ended = only("link", capfd)

    assert ended.code == 0, ended.err
    found = [float(value) for value in re.findall(r"recall@1[ │]*([\d.]+)", ended.out)]
    assert len(found) == 2
    assert min(found) >= 0.999


def test_the_cost_is_printed_with_the_sentence_to_sign() -> None:
    (arguments,) = commands("budget")

    shown = printed("securevfl.cli.main", *arguments)

    assert "noise per party" in shown
    assert "a factor of 7.4 (epsilon = 2), except with a probability of 1 in 100,000" in " ".join(
        shown.split()
    )


def test_the_simulation_gains_what_the_table_says(folder: Path, capfd: Capture) -> None:
    """Alone is 0.67, and the joint model lies above it.

    With fresh noise the joint AUC had mean 0.780 and deviation 0.026 over 5 runs.
    """
    ended = only("simulate", capfd)

    assert ended.code == 0, ended.err
    (cells,) = re.findall(r"│ auc +│(.*)│", ended.out)
    joint, _, _, alone = (float(cell.split()[0]) for cell in cells.split("│"))
    assert alone == pytest.approx(0.67, abs=0.01)
    assert "verdict: " in ended.out
    assert 0.69 < joint < 0.86
    assert re.search(r"cost: epsilon [\d.]+, delta 1e-05; of labels: epsilon 2;", ended.out)


def test_the_comparison_has_its_three_methods(folder: Path, capfd: Capture) -> None:
    (arguments,) = commands("lab compare")
    arguments[arguments.index("--seeds") + 1] = "1"

    ended = securevfl(capfd, *arguments)

    assert ended.code == 0, ended.err
    auc = {name: float(found) for name, found in re.findall(r"│ ([\w-]+) +│ ([\d.]+)", ended.out)}
    assert set(auc) == {"alone", "combine", "class-means"}
    assert auc["alone"] < auc["combine"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_parties_train_and_leave_what_the_reader_is_told_to_open(
    folder: Path, capfd: Capture
) -> None:
    ended = only("train", capfd)

    assert ended.code == 0, ended.err
    assert (folder / "runs/train/report.html").is_file()
    for name in ("bank", "telecom", "retailer"):
        assert (folder / "runs/train/parties" / name / "ledger.jsonl").read_text(encoding="utf-8")


def test_keys_can_be_hidden_as_shown(folder: Path, capfd: Capture) -> None:
    (hidden,) = blocks("toml")
    linkage, helpers = hidden.split("\n\n", 1)
    path = folder / "loans.toml"
    first = path.read_text(encoding="utf-8")
    path.write_text(
        re.sub(r"\[linkage\]\n.*?\n\n", f"{linkage}\n\n", first, flags=re.DOTALL) + f"\n{helpers}",
        encoding="utf-8",
    )

    ended = only("link", capfd)

    assert ended.code == 0, ended.err
    assert "a dealer learns: how many rows and records there are" in " ".join(ended.out.split())


def test_kits_are_made_and_certificates_exchanged(folder: Path, capfd: Capture) -> None:
    """Every party in its own folder; all read out one code, and each can start."""
    for arguments in commands("identity provision"):
        ended = securevfl(capfd, *arguments)
        assert ended.code == 0, ended.err
        name = arguments[arguments.index("--name") + 1]
        certificate = folder / name / "identity" / "identity.pem"
        (folder / f"{name}.pem").write_bytes(certificate.read_bytes())

    codes = set()
    for arguments in commands("identity join"):
        ended = securevfl(capfd, *arguments)
        assert ended.code == 0, ended.err
        codes |= set(re.findall("^code: (.*)$", ended.out, flags=re.MULTILINE))
    assert len(codes) == 1

    started = {arguments[arguments.index("--name") + 1] for arguments in commands("party")}
    for name in started:
        path = folder / name / "federation.toml"
        parties = tomllib.loads(path.read_text(encoding="utf-8"))["party"]
        assert {party["name"] for party in parties if party["identity"]} == started
