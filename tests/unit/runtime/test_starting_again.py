"""Who is started again when a party of a run on this machine was killed."""

from pathlib import Path

from securevfl import read_federation
from securevfl.core.progress import Listening, SpendingPlanned, Warned
from securevfl.launch.process import PartyCommand, PartyFailure
from securevfl.runtime.launching import StartAgain, going_on
from securevfl.testing import write_federation


def command(name: str) -> PartyCommand:
    return PartyCommand(name=name, arguments=["party"], log_path=Path("log"))


def failure(name: str) -> PartyFailure:
    return PartyFailure(party=name, reason="was ended by SIGKILL", exit_code=3)


def joined(name: str) -> SpendingPlanned:
    return SpendingPlanned(party=name, unit="secondary-record", delta=1e-5, runs_before=0)


def start_again(folder: Path, said: list, **runtime) -> StartAgain:
    path = write_federation(folder, secondaries=3, rows=20, runtime=runtime)
    return StartAgain(read_federation(path), folder, said.append)


def test_those_who_are_through_are_needed_until_who_was_killed_is_back(tmp_path):
    """Not before it was killed, and not once it is in a session with them."""
    said = []
    again = start_again(tmp_path, said, on_loss="wait", most_losses=3)
    assert again(command("bank-1"), None) is None
    assert again(command("agency"), failure("agency")) == command("agency")
    assert said == [Warned(text="agency: was ended by SIGKILL; it is started again")]
    assert again(command("bank-1"), None) == command("bank-1")
    again.note_event("agency", Listening(host="127.0.0.1", port=1))
    assert again(command("bank-1"), None) is None  # once for each that was killed
    assert again(command("bank-3"), None) == command("bank-3")
    again.note_event("agency", joined("agency"))
    assert again(command("bank-1"), None) is None
    assert again(command("bank-2"), failure("bank-2")) is not None
    assert again(command("bank-2"), failure("bank-2")) is None  # the third time


def test_who_was_lost_before_it_knew_of_the_run_begins(tmp_path):
    """Nothing is in its folder that it could go on with; the others go on."""
    (tmp_path / "parties" / "bank-1").mkdir(parents=True)
    (tmp_path / "parties" / "bank-1" / "run.pt").touch()
    assert going_on(command("bank-2"), tmp_path).arguments == ["party"]
    again = going_on(command("bank-1"), tmp_path)
    assert again.arguments == ["party", "--resume"]
    assert going_on(again, tmp_path).arguments == ["party", "--resume"]
