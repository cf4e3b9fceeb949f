"""What ``ledger verify`` finds in a run folder: good, rolled back, emptied, forged, altered."""

import contextlib
import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import securevfl
from helpers.countersigners import Session, rewrite

from securevfl import read_federation
from securevfl.desk.report.verify import verify_run
from securevfl.dp import Privacy
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.checkpoint import write_state
from securevfl.ledger.book import ProgramUse
from securevfl.ledger.countersigning import Countersigner, Occasion, forget_party
from securevfl.ledger.ledger import Ledger
from securevfl.ledger.ledger_file import LedgerFile, book_restored
from securevfl.testing import save_federation, write_federation
from securevfl.transport.identity import Identity

NAMES = ("agency", "bank-1", "bank-2")
PLAN = ReleasePlan(
    privacy=Privacy(noise_multiplier=3.0, encoder="frozen", links_per_record=2),
    parties=2,
    min_active=2,
    rounds=8,
    rows_per_round=100,
    row_releases=800,
    releases_per_row=1,
    links=5,
)


class Run:
    """A finished run of three parties: ledgers beside their tables, signed to the end."""

    def __init__(self, folder: Path) -> None:
        self.tables, self.folder = folder, folder / "run"
        self.people = {name: Identity.create(name, valid_days=1) for name in NAMES}
        path = write_federation(folder)
        source = tomllib.loads(path.read_text(encoding="utf-8"))
        for party in source["party"]:
            party["identity"] = self.people[party["name"]].public_text
        self.config = read_federation(save_federation(folder, source))
        self.pinned = {name: one.public_text for name, one in self.people.items()}
        for name in NAMES:
            (self.folder / "parties" / name).mkdir(parents=True)
        shutil.copy(folder / "fed.toml", self.folder / "federation.toml")
        self.write("identities.json", {self.config.digest: self.pinned})

    def ledger(self, name: str) -> Path:
        return self.tables / f"{name}.csv.ledger.jsonl"

    def write(self, name: str, content: object) -> None:
        (self.folder / name).write_text(json.dumps(content))

    def release(self, run: str, *, finish: bool = True) -> None:
        """Let everybody charge four rounds, in the run of that id."""
        ledgers = {
            name: Ledger(
                self.ledger(name),
                party=name,
                plan=PLAN,
                noise_share_std=PLAN.noise_share_std(),
                run=run,
                federation="test",
                settings=self.config.settings_digest,
            )
            for name in NAMES
        }
        occasion = Occasion(federation="test", digest=self.config.digest, run=run)
        signers = {
            name: Countersigner(
                ledgers[name].file,
                self.people[name],
                self.pinned,
                occasion,
                session=b"s" * 16,
                known=ledgers[name].others.of("test"),
            )
            for name in NAMES
        }
        with Session(ledgers, signers) as session:
            session.start()
            for number in range(1, 5):
                for ledger in ledgers.values():
                    ledger.charge(
                        round_number=number, rows=np.arange(100) + 100 * number, purpose="release"
                    )
                if number == 2:
                    for name, ledger in ledgers.items():
                        path = self.folder / "parties" / name / f"epoch-{run}.pt"
                        write_state(path, {"ledger_head": ledger.head})
            if finish:
                session.meet("end")
            agency = ledgers["agency"]
            privacy = {
                "epsilon": agency.epsilon_spent,
                "total_epsilon": agency.total,
                "releases": agency.rounds,
                "row_releases": agency.row_releases,
            }
        for name in NAMES:
            told = {"ledger": str(self.ledger(name)), "run": run}
            self.write(f"parties/{name}/ledger.json", told)
        self.write("metrics.json", {"run": run, "privacy": privacy})

    def bad(self) -> dict[str, str]:
        """Return what is found false, by check and party."""
        found = [one for one in verify_run(self.folder) if one.good is False]
        return {f"{one.check} {one.party}": one.text for one in found}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    made.release("a" * 32)
    return made


def test_a_good_run_is_good(run: Run, capfd) -> None:
    """A line a check, a verdict, exit code 0; the same as JSON."""
    ended = securevfl(capfd, "ledger", "verify", run.folder)

    assert ended.code == 0, ended.err
    *lines, verdict = ended.out.splitlines()
    assert verdict.startswith("verdict: good")
    kinds = ["chain", "signatures", "heads", "end", "checkpoints"]
    assert [line.split()[0] for line in lines] == [k for k in kinds for _ in NAMES] + ["figures"]
    assert all(line.split()[2] == "good" for line in lines), ended.out
    told = json.loads(securevfl(capfd, "ledger", "verify", run.folder, "--json").out)
    assert told["good"] is True
    assert len(told["checks"]) == len(lines)


def test_a_later_run_on_the_same_tables_leaves_it_good(run: Run) -> None:
    """Its figures are those of its own end, whatever was charged afterwards."""
    kept = {path: path.read_bytes() for path in run.folder.rglob("*.json")}
    run.release("b" * 32)
    for path, content in kept.items():
        path.write_bytes(content)

    assert run.bad() == {}


def test_a_rolled_back_ledger_is_named(run: Run, capfd) -> None:
    """It looks whole alone; the others' signatures and its own checkpoints show that it is not."""
    path = run.ledger("bank-1")
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:3]))

    found = run.bad()
    assert set(found) == {"heads bank-1", "end bank-1", "checkpoints bank-1"}
    assert "has 3 lines, and 6 were countersigned by agency at end" in found["heads bank-1"]
    assert "rolled back, emptied or rewritten" in found["heads bank-1"]
    ended = securevfl(capfd, "ledger", "verify", run.folder)
    assert ended.code == 4
    assert ended.out.splitlines()[-1].startswith("verdict: BAD (bank-1)")
    told = json.loads(securevfl(capfd, "ledger", "verify", run.folder, "--json").out)
    assert told["good"] is False


def test_a_forged_ledger_is_named(run: Run) -> None:
    """Written anew with a whole chain, and the others' signatures copied into it."""
    rewrite(run.ledger("bank-2"))

    found = run.bad()
    assert set(found) == {"heads bank-2", "checkpoints bank-2"}
    assert "is not, at line 1, what was countersigned by agency at start" in found["heads bank-2"]


def test_a_forged_ledger_of_the_primary_is_named(run: Run) -> None:
    """Two rounds fewer, and figures to match: the secondaries know better."""
    path = run.ledger("agency")
    lines = path.read_text().splitlines()
    path.write_text("".join(line + "\n" for line in lines[:3] + lines[5:]))
    assert "does not follow from the line before it" in run.bad()["chain agency"]
    path.write_text("".join(line + "\n" for line in lines[:3] + lines[5:]))
    entries = [json.loads(line) for line in lines[:3] + lines[5:]]
    path.write_text("")
    chain_anew(path, entries)

    found = run.bad()
    assert set(found) == {"heads agency", "checkpoints agency", "figures agency"}
    assert "in metrics.json, and" in found["figures agency"]


def chain_anew(path: Path, entries) -> None:
    whole = path.with_name("whole.jsonl")
    whole.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    rewrite(whole)
    whole.rename(path)


@pytest.mark.parametrize("content", [None, ""])
def test_an_emptied_ledger_is_named(run: Run, content: str | None) -> None:
    """Removed, or there without a line."""
    run.ledger("bank-1").unlink()
    if content is not None:
        run.ledger("bank-1").write_text(content)

    assert set(run.bad()) == {"chain bank-1", "checkpoints bank-1"}


def test_an_altered_figure_is_named(run: Run) -> None:
    """Epsilon is computed again from the ledger's lines."""
    metrics = json.loads((run.folder / "metrics.json").read_text())
    told = metrics["privacy"]["epsilon"]
    for name, value in (("epsilon", told * 0.99), ("total_epsilon", None), ("releases", 3)):
        altered = {**metrics["privacy"], name: value}
        run.write("metrics.json", {**metrics, "privacy": altered})
        assert set(run.bad()) == {"figures agency"}
        assert f"{name} is {value} in metrics.json, and " in run.bad()["figures agency"]


def test_statements_of_a_stranger_are_named(run: Run) -> None:
    """Signatures fit the keys beside them; the keys must be those that the run pins."""
    stranger = Identity.create("agency", valid_days=1).public_text
    run.write("identities.json", {run.config.digest: {**run.pinned, "agency": stranger}})

    found = run.bad()
    assert set(found) == {"signatures agency", "signatures bank-1", "signatures bank-2"}
    assert "with an identity that this run does not pin" in found["signatures bank-1"]


@pytest.mark.parametrize("field", ["party", "head", "lines", "since", "proof", "signature"])
def test_every_altered_field_of_a_kept_statement_is_named(run: Run, field: str) -> None:
    """A party that rewrites what others have signed cannot sign for them."""
    path = run.ledger("bank-1")
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    one = entries[-1]["statements"][0]
    text = str(one[field])
    one[field] = (
        one[field] + 1 if field in ("lines", "since") else text[:-1] + "0123"[text[-1] == "0"]
    )
    path.unlink()
    chain_anew(path, entries)

    assert "signatures bank-1" in run.bad()


@pytest.mark.parametrize("field", ["federation", "digest", "run", "meeting", "point"])
def test_every_altered_field_of_an_occasion_is_named(run: Run, field: str) -> None:
    """What a line's statements share is signed as well."""
    path = run.ledger("bank-1")
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    entries[-1][field] += "x"
    path.unlink()
    chain_anew(path, entries)

    assert "signatures bank-1" in run.bad()


def test_a_checkpoint_of_another_ledger_is_named(run: Run) -> None:
    """And so is one that cannot be read."""
    path = run.folder / "parties" / "bank-2" / "epoch-1.pt"
    write_state(path, {"ledger_head": "ab" * 32})
    assert run.bad() == {
        "checkpoints bank-2": "epoch-1.pt: was made with releases that the ledger lacks"
    }
    path.write_bytes(b"no checkpoint")
    assert run.bad() == {"checkpoints bank-2": "epoch-1.pt: is damaged"}


def test_a_copy_that_the_run_kept_must_go_on_in_the_table_s_ledger(run: Run) -> None:
    """With a copy in the run folder, a table's ledger that fell behind it shows without others."""
    for name in ("agency", "bank-2"):
        shutil.rmtree(run.folder / "parties" / name)
    path = run.ledger("bank-1")
    shutil.copy(path, run.folder / "parties" / "bank-1" / "ledger.jsonl")
    assert run.bad() == {}
    (said,) = [one.text for one in verify_run(run.folder) if one.check == "chain"]
    assert said == f"7 lines hang together ({path}), and go on from the run's copy of 7"
    checks = [one.check for one in verify_run(run.folder)]
    assert len(checks) == len(set(checks)), "of a copy and its ledger, a check is said once"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:3]))

    assert "does not go on from the copy that the run kept (7 lines)" in run.bad()["chain bank-1"]


def test_one_party_alone_is_told_what_it_cannot_know(run: Run) -> None:
    """On its own machine a party has no other ledger: that check stays open, and fails nothing."""
    for name in ("agency", "bank-2"):
        shutil.rmtree(run.folder / "parties" / name)
    (run.folder / "metrics.json").unlink()

    found = {one.check: one.good for one in verify_run(run.folder)}

    assert found == {
        "chain": True,
        "signatures": True,
        "heads": None,
        "end": True,
        "checkpoints": True,
        "figures": None,
    }


def test_a_run_that_was_cut_is_not_called_bad(tmp_path: Path) -> None:
    """Nobody signed its end, and there are no figures."""
    run = Run(tmp_path)
    run.release("a" * 32, finish=False)
    (run.folder / "metrics.json").unlink()

    assert run.bad() == {}
    run.write("metrics.json", {"run": "a" * 32, "privacy": {}})
    assert "its end is not among them" in run.bad()["end agency"]


def test_what_was_forgotten_on_purpose_is_no_fault(run: Run) -> None:
    """A party that took a new table under its old name, and others that know of it."""
    run.ledger("bank-1").unlink()
    for name in ("agency", "bank-2"):
        forget_party(run.ledger(name), party="bank-1")
    for name in NAMES:
        shutil.rmtree(run.folder / "parties" / name)
        (run.folder / "parties" / name).mkdir()
    run.release("b" * 32)

    assert run.bad() == {}


def test_a_restored_ledger_that_has_booked_what_it_lacks_is_no_fault(run: Run) -> None:
    """Once the others have forgotten the old one: until then it is rolled back."""
    path = run.ledger("bank-1")
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:3]))
    assert len(book_restored(path)) == 2
    assert set(run.bad()) == {"heads bank-1"}
    for name in ("agency", "bank-2"):
        forget_party(run.ledger(name), party="bank-1")

    assert run.bad() == {}
    (found,) = [
        one for one in verify_run(run.folder) if (one.check, one.party) == ("checkpoints", "bank-1")
    ]
    assert found.good is None
    assert "lacks, and has booked since it was restored" in found.text


def test_a_program_that_came_later_leaves_a_run_good_and_is_named(run: Run) -> None:
    """Its line is counted; the run's figures are those of its own end."""
    use = ProgramUse(
        run="p" * 32, federation="test", party="agency", program="d", peers={}, time="now"
    )
    with contextlib.closing(LedgerFile(run.ledger("agency"))) as file:
        file.append(use.line())

    assert run.bad() == {}
    chain = next(one for one in verify_run(run.folder) if one.party == "agency")
    assert "1 of them of programs, which have no bound" in chain.text


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capfd) -> None:
    """Exit code 2, and one line."""
    ended = securevfl(capfd, "ledger", "verify", tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert "holds no run" in ended.err
    run = Run(tmp_path)
    ended = securevfl(capfd, "ledger", "verify", run.folder)
    assert ended.code == 2
    assert "no party's ledger is at hand" in ended.err


def test_the_help_says_what_verifying_cannot_show(capfd) -> None:
    """All parties together can write everything anew; a claim of noise is not proven."""
    text = " ".join(securevfl(capfd, "ledger", "verify", "--help").out.split())
    assert "What this cannot show" in text
    assert "all parties together" in text


def test_a_mixture_of_runs_is_not_good(run: Run) -> None:
    """Parties of another federation, figures of another run, or a file with other settings."""
    (run.folder / "parties" / "stranger").mkdir()
    assert "files of several runs" in run.bad()["folder stranger"]
    (run.folder / "parties" / "stranger").rmdir()
    metrics = json.loads((run.folder / "metrics.json").read_text())
    run.write("metrics.json", {**metrics, "federation": "others"})
    assert "metrics.json is of another federation" in run.bad()["folder agency"]
    run.write("metrics.json", {**metrics, "run": "f" * 16})
    assert set(run.bad()) >= {f"folder {name}" for name in NAMES}
    run.write("metrics.json", metrics)
    assert run.bad() == {}
    source = tomllib.loads((run.folder / "federation.toml").read_text(encoding="utf-8"))
    source["federation"]["seed"] = 99
    save_federation(run.folder, source).rename(run.folder / "federation.toml")
    assert "under other settings" in run.bad()["folder bank-1"]
