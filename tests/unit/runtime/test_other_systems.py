"""What Windows and macOS lack is missed by nothing but ``train``."""

import subprocess
import sys
from pathlib import Path

from helpers.patience import PATIENCE_S

WITHOUT = """
import os, signal, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in (
    "O_CLOEXEC", "O_DIRECTORY", "memfd_create", "fchmod", "sched_getaffinity", "getuid", "geteuid",
    "wait4", "fork", "mkfifo", "killpg", "chown",
):
    delattr(os, name)
for name in ("SIGKILL", "SIGCONT"):
    delattr(signal, name)
"""

RUN = """
from pathlib import Path

import securevfl as sv
from securevfl.cli.main import main
from securevfl.core.errors import ConfigError
from securevfl.core.memory import peak_memory_bytes
from securevfl.ledger.chain import ChainedFile

folder = Path(sys.argv[1])
budget = sv.dp.Budget(steps=10, sampling_rate=0.1, delta=1e-5, links_per_record=1)
print(budget.epsilon(noise_multiplier=1.0))

digits = sv.datasets.load_builtin("digits")
parties = sv.datasets.split_table(
    digits.X[:120], digits.y[:120], parties=2, key_dim=2, key_noise=0.05, seed=0
)
sv.simulate(
    parties,
    sv.models.AvgSim(neighbours=2, hidden=4),
    privacy=sv.dp.Privacy(mechanism="none", encoder="frozen"),
    training=sv.TrainingSettings(epochs=1),
    base="none",
    out=folder / "run",
)
sys.argv = ["securevfl", "report", str(folder / "run")]
try:
    main()
except SystemExit as ended:
    print("report", ended.code)

one = ChainedFile(folder / "ledger.jsonl")
one.append({"number": 1})
try:
    ChainedFile(folder / "ledger.jsonl")
except ConfigError as error:
    print(error)
one.close()
empty = ChainedFile(folder / "empty.jsonl")
empty.close()
again = ChainedFile(folder / "ledger.jsonl")
print("again", len(again.entries), (folder / "empty.jsonl").exists())
again.close()

from securevfl.launch.process import PartyCommand, PartyProcess

try:
    PartyProcess(PartyCommand(name="bank", arguments=["true"], log_path=folder / "output.log"))
except ConfigError as error:
    print(error)
real = Path.read_text
Path.read_text = lambda path, **how: "" if str(path).startswith("/proc") else real(path, **how)
print("peak", peak_memory_bytes())
"""


def test_simulate_budget_and_report_need_nothing_of_linux(tmp_path: Path) -> None:
    """Neither do the locks of ledgers; ``train`` says in one line what it needs."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT + RUN, tmp_path],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    epsilon, *said = ended.stdout.splitlines()
    assert 0 < float(epsilon) < 10
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000
    assert said[1:] == [
        "report 0",
        f"ledger {tmp_path / 'ledger.jsonl'}: is in use by another run; wait for it, since two "
        f"runs at a time could spend the same budget twice",
        "again 1 False",
        "processes of parties need Linux or macOS; this system simulates: securevfl simulate, or "
        "securevfl.simulate in Python",
        "peak None",
    ]
