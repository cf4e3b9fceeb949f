"""What a process loads: of what takes seconds or tens of megabytes, only what it uses.

A party is a process, so what it loads is paid once a party;
research/memory/party_memory.py measures it.
"""

import subprocess
import sys
from pathlib import Path

from helpers.patience import PATIENCE_S
from helpers.warm import printed

# It serves sampled releases, metrics, plots, data bases, a server or torch's compiler: no process
# loads it before it is used, and most never use it.
SELDOM_USED = frozenset(
    {
        "PIL",
        "dp_accounting",
        "duckdb",
        "fastapi",
        "jinja2",
        "matplotlib",
        "mlflow",
        "pytorch_optimizer",
        "rapidfuzz",
        "scipy.optimize",
        "scipy.stats",
        "skops",
        "sklearn",
        "sqlalchemy",
        "sympy",
        "tensorboard",
        "textual",
        "torch._dynamo",
        "torch._inductor",
        "torch.utils.tensorboard",
        "uvicorn",
    }
)
# Whoever has a table uses these: from the moment it reads it, links it, or looks for its noise.
USED_WITH_A_TABLE = frozenset(
    {
        "charset_normalizer",
        "pandas",
        "pyarrow",
        "scipy.linalg",
        "scipy.sparse",
        "scipy.spatial",
        "scipy.special",
    }
)
ROLES = frozenset(
    {
        "securevfl.runtime.primary_party",
        "securevfl.runtime.secondary_party",
    }
)

# What securevfl/runtime/launching.py starts for a party, up to where its role is known.
PARTY = "import securevfl.cli.main, securevfl.desk.command_results, securevfl.runtime.party"
# A step of a bottom model, as a secondary makes it in a training round.
STEP = """
import torch
from securevfl.federation.rounds.updates import DropoutStream
from securevfl.federation.rounds.updates import PlainBackwardStep
from securevfl.models.optimisers import build_optimizer

layer = torch.nn.Linear(1, 1)
optimizer = build_optimizer("adamw", layer.parameters(), learning_rate=0.1)
stream = DropoutStream(0, "bank", device=torch.device("cpu"))
lesson = PlainBackwardStep(layer(torch.ones(2, 1)), stream, list(layer.parameters()))
lesson.gradients_from(torch.ones(2, 1))
assert layer.bias.grad == 2
optimizer.step()
optimizer.zero_grad()
"""


def loaded_by(*programs: str) -> list[set[str]]:
    """Return the names of all modules that a fresh interpreter has after each of some programs."""
    shown = [f"{one}\nimport sys; print(*sys.modules)" for one in programs]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(shown)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_a_simulation_needs_no_crypten() -> None:
    """The simulator, and the command around it, run where CrypTen is not installed.

    All of it, and a step of a bottom model and its optimizer, load nothing that is seldom used.
    """
    without = "import sys; sys.modules['crypten'] = None; sys.modules['grpc'] = None"
    simulated = "import securevfl.cli.main, securevfl.desk.command_results, securevfl.runtime.entry"
    (loaded,) = loaded_by(f"{without}; {simulated}\n{STEP}")
    assert "securevfl.federation.rounds.secondary" in loaded
    assert loaded & SELDOM_USED == set()


def test_a_party_loads_what_its_role_uses() -> None:
    """A party's start, to where it reads its table, loads nothing that only a table needs.

    Nor what another role alone needs. Fifty secondaries have to fit one machine.
    """
    roles = "import securevfl.runtime.secondary_party, securevfl.runtime.primary_party"
    helper, with_a_table = loaded_by(PARTY, f"{roles}\n{STEP}")
    assert "securevfl.runtime.party" in helper
    assert helper & (SELDOM_USED | USED_WITH_A_TABLE | {"crypten", *ROLES}) == set()
    assert "crypten" in with_a_table
    assert with_a_table & (SELDOM_USED | USED_WITH_A_TABLE) == set()


def test_parties_are_forked_from_what_has_loaded_their_libraries() -> None:
    """The process that forks them has torch and tables: seconds of CPU that no party pays again."""
    program = "import securevfl.cli.fork_server_program as it; it.fork_children = repr; it.main()"
    (loaded,) = loaded_by(program)
    assert loaded >= {"crypten", "pandas", "torch", "securevfl.runtime.secondary_party"}
    assert loaded & SELDOM_USED == set()


def test_programs_of_tests_are_forked_from_what_has_loaded_all(tmp_path: Path) -> None:
    """Python says nothing if the process that forks them finds none of it: each loads it anew."""
    program = tmp_path / "program.py"
    program.write_text("import sys; print(*sys.modules)")
    loaded = set(printed(program).split())
    assert loaded >= {"helpers.loaded", "matplotlib", "sklearn", "torch._dynamo"}
