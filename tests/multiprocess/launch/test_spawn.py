import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.patience import PATIENCE_S, SOON_S

from securevfl import SecureVflError
from securevfl.core.errors import ConfigError, PartyFailedError, PrivacyError
from securevfl.launch import fork_server, spawn
from securevfl.launch.process import PartyCommand
from securevfl.launch.spawn import run_party_processes

pytestmark = pytest.mark.multiprocess

BEGIN = (
    "import os, signal, sys, time\nfrom securevfl.launch import child\nchild.end_with_launcher()\n"
)
# Longer than any test may take: who is still there then was not ended by the launcher.
LONG_S = 2 * PATIENCE_S
# Failing only once the other party has come to the point that is tested.
FAIL_WHEN_READY = "while not os.path.exists('ready'): time.sleep(0.01)\nsys.exit(2)\n"
READY = "open('ready', 'w').close()\n"
FOREVER = f"time.sleep({LONG_S})\n"
DEADLINE_S = PATIENCE_S


def command(folder: Path, name: str, script: str, **environment: str) -> PartyCommand:
    return PartyCommand(
        name=name,
        arguments=[sys.executable, "-c", f"{BEGIN}os.chdir({str(folder)!r})\n{script}"],
        log_path=folder / name / "log.txt",
        environment=environment,
    )


def launch(folder, scripts, *, on_event=None, deadline_s=DEADLINE_S, grace_s=0.3):
    commands = [command(folder, name, script) for name, script in scripts.items()]
    return run_party_processes(commands, deadline_s=deadline_s, on_event=on_event, grace_s=grace_s)


def log(folder: Path, name: str) -> str:
    return (folder / name / "log.txt").read_text()


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie, which only its parent has yet to reap, does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_parties_run_side_by_side_and_report(tmp_path):
    """Each gets its own log; reports arrive in order, with the party's name; exits are told."""
    events = []
    script = "child.report('epoch', loss=0.5)\nprint('hello from', NAME)\nchild.report('end')\n"
    script += "child.report_memory()\n"
    exits = launch(
        tmp_path,
        {name: f"NAME = {name!r}\n{script}" for name in ("agency", "rental", "bank")},
        on_event=lambda name, event: events.append((name, event)),
    )
    for name in ("agency", "rental", "bank"):
        assert [event for who, event in events if who == name] == [
            {"event": "epoch", "loss": 0.5},
            {"event": "end"},
        ]
        assert log(tmp_path, name) == f"hello from {name}\n"
        assert exits[name].exit_code == 0
        assert 1e6 < exits[name].peak_memory_bytes < 1e10
        assert 0 < exits[name].seconds < DEADLINE_S


@pytest.mark.parametrize(
    ("code", "error"),
    [(1, SecureVflError), (2, ConfigError), (3, PartyFailedError), (4, PrivacyError)],
)
def test_the_first_failure_comes_home(tmp_path, code, error):
    """Party, last words and exit code arrive as the error of that code; the others are ended."""
    started = time.monotonic()
    with pytest.raises(error, match=rf"^rental: exited with {code}: no such column") as caught:
        launch(
            tmp_path,
            {
                "agency": FOREVER,
                "rental": f"print('no such column', file=sys.stderr)\nsys.exit({code})\n",
            },
        )
    assert type(caught.value) is error
    assert caught.value.exit_code == code
    assert str(tmp_path / "rental" / "log.txt") in str(caught.value)
    assert time.monotonic() - started < SOON_S


def test_a_killed_party_is_named_with_its_signal(tmp_path):
    """A party that the system kills, for want of memory for example, says nothing itself."""
    with pytest.raises(PartyFailedError, match=r"^bank: was ended by SIGKILL"):
        launch(tmp_path, {"agency": FOREVER, "bank": "os.kill(os.getpid(), signal.SIGKILL)\n"})


def test_the_failure_is_told_where_it_began(tmp_path):
    """A party that was told of another's failure may end first; the origin is named anyway."""
    told = "child.report_failure(party='rental', reason='heard of it', exit_code=3)\nsys.exit(3)\n"
    began = (
        "try:\n    time.sleep(1)\nfinally:\n"
        "    child.report_failure(party='rental', reason='privacy is spent', exit_code=4)\n"
        "    sys.exit(4)\n"
    )
    with pytest.raises(PrivacyError, match=r"^rental: privacy is spent$"):
        launch(tmp_path, {"agency": told, "bank": told, "rental": began}, grace_s=30.0)


def test_others_may_end_by_themselves_before_they_are_told_to(tmp_path):
    """Within the grace a party finishes what it writes; nobody interrupts it."""
    finish = "time.sleep(0.7)\nprint('ledger closed')\nsys.exit(3)\n"
    with pytest.raises(ConfigError, match=r"^rental: "):
        launch(tmp_path, {"agency": finish, "rental": "sys.exit(2)\n"}, grace_s=30.0)
    assert log(tmp_path, "agency") == "ledger closed\n"


def test_who_does_not_end_is_interrupted_and_may_say_farewell(tmp_path, monkeypatch):
    """After the grace a party is interrupted as by Ctrl-C: its cleaning up still runs."""
    polite = (
        f"try:\n    print('busy')\n    {READY}    {FOREVER}"
        "except KeyboardInterrupt:\n    print('farewell')\n"
    )
    # However long a crowded machine takes to let it speak.
    monkeypatch.setattr(spawn, "_TERMINATE_S", SOON_S)
    with pytest.raises(ConfigError, match=r"^rental: "):
        launch(tmp_path, {"agency": polite, "rental": FAIL_WHEN_READY})
    assert log(tmp_path, "agency") == "busy\nfarewell\n"


@pytest.mark.parametrize(
    "stubborn",
    [
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{READY}{FOREVER}",
        f"{READY}os.kill(os.getpid(), signal.SIGSTOP)\n",
    ],
)
def test_who_cannot_be_interrupted_is_killed(tmp_path, stubborn):
    """Neither a party that ignores signals nor a stopped one outlives the launch."""
    report = "child.report('pid', pid=os.getpid())\n"
    pids = []
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"^rental: "):
        launch(
            tmp_path,
            {"agency": report + stubborn, "rental": FAIL_WHEN_READY},
            on_event=lambda _name, event: pids.append(event["pid"]),
        )
    assert time.monotonic() - started < SOON_S
    assert len(pids) == 1
    assert not is_alive(pids[0])


def test_the_deadline_ends_all(tmp_path):
    """Parties that are still running at the deadline are named and ended."""
    with pytest.raises(PartyFailedError, match=r"^agency, bank: did not end within 8 s$"):
        launch(tmp_path, {"agency": FOREVER, "rental": "", "bank": FOREVER}, deadline_s=8.0,
               grace_s=0.2)  # fmt: skip


def test_a_bug_in_the_display_leaves_no_process(tmp_path):
    """When the receiver of reports raises, its error comes through and the parties are ended."""
    pids = []

    def broken(_name, event):
        pids.append(event["pid"])
        raise RuntimeError("display")

    with pytest.raises(RuntimeError, match="display"):
        launch(
            tmp_path,
            {"agency": "child.report('pid', pid=os.getpid())\n" + FOREVER},
            on_event=broken,
        )
    assert not is_alive(pids[0])


def test_a_program_that_cannot_be_started_is_named(tmp_path):
    """The parties that had started before it are ended."""
    commands = [
        command(tmp_path, "agency", FOREVER),
        PartyCommand(name="rental", arguments=["/no/such/program"], log_path=tmp_path / "log"),
    ]
    with pytest.raises(ConfigError, match=r"rental: cannot be started .*: /no/such/program"):
        run_party_processes(commands, deadline_s=DEADLINE_S)


def test_names_must_differ(tmp_path):
    """Two parties of one name would share a log; nothing is started."""
    twice = [command(tmp_path, "bank", ""), command(tmp_path, "bank", "")]
    with pytest.raises(ConfigError, match="two parties of one name"):
        run_party_processes(twice, deadline_s=DEADLINE_S)


def test_many_reports_do_not_block_a_party(tmp_path):
    """More reports than a pipe holds, sent while nobody listens closely, all arrive."""
    events = []
    launch(
        tmp_path,
        {"agency": "for i in range(5000): child.report('step', number=i, text='x' * 50)\n"},
        on_event=lambda _name, event: events.append(event["number"]),
    )
    assert events == list(range(5000))


# A shell that runs the tests in the background may have told them to ignore two of the signals.
LAUNCHER = """
import signal
import sys
from pathlib import Path
from securevfl.launch import spawn
from securevfl.launch.process import PartyCommand
from securevfl.launch.spawn import run_party_processes
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
script = sys.argv[2]
folder = Path(sys.argv[1])
arguments = [sys.executable, "-c", script]
commands = [
    PartyCommand(name=name, arguments=arguments, log_path=folder / name)
    for name in ("agency", "rental")
]
tell = lambda name, event: print(event["pid"], flush=True)
try:
    run_party_processes(commands, deadline_s=600, on_event=tell)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_no_party_outlives_its_launcher(tmp_path, number):
    """However the launcher ends, by Ctrl-C or by SIGKILL, its parties end within seconds."""
    script = BEGIN + "child.report('pid', pid=os.getpid())\n" + FOREVER
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), script], stdout=subprocess.PIPE, text=True
    )
    try:
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        assert all(is_alive(pid) for pid in pids)
        launcher.send_signal(number)
        said, _ = launcher.communicate(timeout=PATIENCE_S)
        deadline = time.monotonic() + SOON_S
        while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)  # another process's child can only be asked, not waited for
        assert not any(is_alive(pid) for pid in pids)
        assert said == ("interrupted\n" if number is signal.SIGINT else "")
        assert launcher.returncode == (130 if number is signal.SIGINT else -number)
    finally:
        launcher.kill()
        launcher.communicate()
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_reports_without_a_launcher_go_nowhere():
    """A party started by hand reports to nobody, and its standard input is its own."""
    script = BEGIN + "child.report('epoch', loss=1.0)\nprint(sys.stdin.read())\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        input="typed",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout == "typed\n"


def test_data_cannot_be_reported():
    """Only figures and words go to the launcher; an array is refused."""
    script = BEGIN + "child.report('epoch', keys=[[0.1] * 100])\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "may not be logged" in done.stderr


def test_each_party_reports_its_own_peak_of_memory(tmp_path):
    """Neither the other's nor the launcher's, which the system counts to a program it starts."""
    ballast = bytearray(os.urandom(1)) * (300 << 20)  # this process holds more than its parties
    held = "ballast = bytearray(b'x') * ({size} << 20)\ndel ballast\nchild.report_memory()\n"
    exits = launch(
        tmp_path,
        {"agency": held.format(size=100), "bank": held.format(size=10)},
        on_event=lambda name, event: pytest.fail(f"{name} told {event}"),
    )
    del ballast
    agency, bank = (exits[name].peak_memory_bytes for name in ("agency", "bank"))
    assert 100 << 20 < agency < 250 << 20
    assert 10 << 20 < bank < 100 << 20
    assert 80 << 20 < agency - bank < 100 << 20


def test_what_is_handed_over_has_no_name(tmp_path):
    """A party reads it under the path that it is given; nobody finds it in a folder."""
    script = (
        f"{BEGIN}path = sys.argv[2]\nprint(open(path).read(), sys.argv[1])\n"
        "print(oct(os.stat(path).st_mode & 0o777), os.stat(path).st_nlink)\n"
    )
    command = PartyCommand(
        name="agency",
        arguments=[sys.executable, "-c", script, "plain", "SECRET"],
        log_path=tmp_path / "log.txt",
        handed={"SECRET": b"only for you"},
    )
    run_party_processes([command], deadline_s=DEADLINE_S)
    assert (tmp_path / "log.txt").read_text() == "only for you plain\n0o600 0\n"


MODULE = """
import os
import sys
import time
from pathlib import Path

from securevfl.launch import child
from securevfl.launch.fork_server import fork_children

LOADED_BY = os.getpid()


def main():
    child.end_with_launcher()
    child.report("pid", pid=os.getpid())
    own = {"loaded_by": LOADED_BY, "name": Path("/proc/self/comm").read_text().strip()}
    own |= {"open": sorted(map(int, os.listdir("/dev/fd"))), "group": os.getpgid(0)}
    child.report("own", **own)
    child.report_memory()
    print(Path(sys.argv[2]).read_text())
    match sys.argv[1]:
        case "exit":
            sys.exit(4)
        case "words":
            sys.exit("no such column")
        case "bug":
            raise RuntimeError("of ours")
    while sys.argv[1] == "stay":
        time.sleep(0.05)


fork_children(main) if len(sys.argv) == 2 else main()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that says of itself how it was started."""
    (tmp_path / "started_party.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return "started_party"


def forked(folder, module, name, what):
    return PartyCommand(
        name=name,
        program=(sys.executable, "-m", module),
        fork_server=module,
        arguments=[what, "SECRET"],
        handed={"SECRET": f"for {name}".encode()},
        log_path=folder / name / "log.txt",
    )


def test_parties_of_a_module_are_forked_from_one_that_has_loaded_it(tmp_path, module):
    """Each has its own files, name and process group, and nothing of the others'."""
    own = {}

    def on_event(name, event):
        own.setdefault(name, {}).update(event)

    names = ("agency", "bank-1", "a-name-of-more-than-fifteen-letters")
    commands = [forked(tmp_path, module, name, "end") for name in names]
    exits = run_party_processes(commands, deadline_s=DEADLINE_S, on_event=on_event)
    assert len({own[name]["loaded_by"] for name in names}) == 1
    assert len({own[name]["pid"] for name in names} | {own["agency"]["loaded_by"]}) == 4
    for name in names:
        assert own[name]["group"] == own[name]["pid"]
        assert own[name]["name"] == name[:15]
        # Three streams, the reports, what was handed over, and the folder that is being read.
        assert len(own[name]["open"]) == 6
        assert log(tmp_path, name) == f"for {name}\n"
        assert exits[name].exit_code == 0
        assert 1e6 < exits[name].peak_memory_bytes < 1e10


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("exit", PrivacyError, "exited with 4: for rental"),
        ("words", SecureVflError, "exited with 1: no such column"),
        ("bug", SecureVflError, "exited with 1: RuntimeError: of ours"),
    ],
)
def test_how_a_forked_party_ends_comes_home(tmp_path, module, how, error, words):
    """Exit code and last words, as a program's; the others are ended."""
    pids = []
    with pytest.raises(PrivacyError, match=r"^rental: exited with 4: for rental"):
        run_party_processes(
            [
                forked(tmp_path, module, "agency", "stay"),
                forked(tmp_path, module, "rental", "exit"),
            ],
            deadline_s=DEADLINE_S,
            grace_s=0.2,
            on_event=lambda _, event: pids.append(event["pid"]) if "pid" in event else None,
        )
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_without_their_fork_server_parties_count_as_killed_and_can_be_started_again(
    tmp_path, module
):
    """Nobody would hear how they end; a new one forks those that are started again."""
    loaded_by = set()
    again = []

    def on_event(_name, event):
        if "loaded_by" in event:
            loaded_by.add(event["loaded_by"])
            if len(loaded_by) == 1:
                os.kill(event["loaded_by"], signal.SIGKILL)

    def start_again(command, failure):
        if failure is None:
            return None
        again.append(failure.reason)
        return forked(tmp_path, module, command.name, "end")

    run_party_processes(
        [forked(tmp_path, module, "agency", "stay")],
        deadline_s=DEADLINE_S,
        on_event=on_event,
        again=start_again,
    )
    assert len(loaded_by) == 2
    assert len(again) == 1
    assert again[0].startswith("was ended by SIGKILL")


def test_a_fork_server_that_was_stopped_is_woken(tmp_path, module, monkeypatch):
    """Its party has ended, and nobody would ever hear how."""
    monkeypatch.setattr(fork_server, "SILENT_S", 5.0)
    own = {}

    def on_event(_name, event):
        own.update(event)
        if {"loaded_by", "pid"} <= own.keys() and "stopped" not in own:
            own["stopped"] = True
            os.kill(own["loaded_by"], signal.SIGSTOP)
            os.kill(own["pid"], signal.SIGUSR1)

    with pytest.raises(PartyFailedError, match=r"^agency: was ended by SIGUSR1; its log is"):
        run_party_processes(
            [forked(tmp_path, module, "agency", "stay")], deadline_s=DEADLINE_S, on_event=on_event
        )
    assert own["stopped"]


def test_a_fork_server_that_stays_silent_is_given_up_in_one_line(tmp_path, module, monkeypatch):
    """It cannot be woken: the run ends, nobody is left, and the reason is said."""
    monkeypatch.setattr(fork_server, "SILENT_S", 1.0)
    hangs = f"import securevfl.launch.fork_server as f, time\nf._report_end = lambda *_: {FOREVER}"
    path = tmp_path / f"{module}.py"
    path.write_text(hangs + path.read_text())
    own = {}
    with pytest.raises(
        PartyFailedError,
        match=r"^agency: was ended with the process that starts parties, which gave no sign of "
        r"life for 1 s; its log is [^\n]*$",
    ):
        run_party_processes(
            [forked(tmp_path, module, "agency", "end")],
            deadline_s=DEADLINE_S,
            on_event=lambda _name, event: own.update(event),
        )
    assert not is_alive(own["loaded_by"])
    assert not is_alive(own["pid"])


def test_who_is_through_is_started_again_for_one_that_was_killed(tmp_path):
    """The one that was killed could not end alone; nobody is asked for when all are through."""
    runs = {
        "agency": "open('second' if os.path.exists('ready') else 'ready', 'w').close()\n",
        "bank": "while not os.path.exists('ready'): time.sleep(0.01)\n"
        "if not os.path.exists('killed'):\n"
        "    open('killed', 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while not os.path.exists('second'): time.sleep(0.01)\n",
    }
    again = []

    def start_again(command, failure):
        if failure is None and again != ["bank"]:
            return None
        again.append(command.name)
        return command

    exits = run_party_processes(
        [command(tmp_path, name, script) for name, script in runs.items()],
        deadline_s=DEADLINE_S,
        again=start_again,
    )
    assert {name: end.exit_code for name, end in exits.items()} == {"agency": 0, "bank": 0}
    assert again == ["bank", "agency"]


def test_who_is_interrupted_alone_is_lost(tmp_path):
    """It has no error of its own: the run fails with it, or it is started again."""
    runs = {
        "agency": FOREVER,
        "bank": "try:\n"
        "    if not os.path.exists('twice'):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n",
    }
    commands = [command(tmp_path, name, script) for name, script in runs.items()]
    with pytest.raises(PartyFailedError, match=r"^bank: was interrupted by its operator; its log"):
        run_party_processes(commands, deadline_s=DEADLINE_S, grace_s=0.1)

    said = []

    def start_again(command, failure):
        if failure is None:
            return None
        said.append(failure.reason)
        (tmp_path / "twice").touch()
        return command

    run_party_processes(commands[1:], deadline_s=DEADLINE_S, again=start_again)
    assert [text.partition(";")[0] for text in said] == ["was interrupted by its operator"]


def test_what_cannot_be_loaded_is_said_by_the_party(tmp_path, module):
    """A fork server that fails as it loads leaves it to the program, whose log says why."""
    broken = tmp_path / f"{module}.py"
    broken.write_text("raise ImportError('no such library')\n")
    with pytest.raises(SecureVflError, match=r"^agency: exited with 1: ImportError: no such libr"):
        run_party_processes([forked(tmp_path, module, "agency", "end")], deadline_s=DEADLINE_S)
    assert "no such library" in log(tmp_path, "agency")
