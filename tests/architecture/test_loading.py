"""What a process loads: of what takes seconds or tens of megabytes, only what it uses.

A party is a process, so what it loads is paid once a party; benchmarks/party_memory.py measures it.
"""

import subprocess
import sys

import pytest
from helpers.patience import PATIENCE_S

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
        "onnxruntime",
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
PARTY = "import securevfl.cli.main, securevfl.cli.results, securevfl.runtime.party"
# A step of a bottom model, as a secondary makes it in a training round.
STEP = """
import torch
from securevfl.federation.rounds.updates import DropoutStream
from securevfl.federation.rounds.updates import PlainBackwardStep
from securevfl.models.optimisers import build_optimizer

layer = torch.nn.Linear(1, 1)
optimizer = build_optimizer("adamw", layer.parameters(), learning_rate=0.1)
stream = DropoutStream(0, "bank", device=torch.device("cpu"))
PlainBackwardStep(layer(torch.ones(2, 1)), stream).gradients_from(torch.ones(2, 1))
assert layer.bias.grad == 2
optimizer.step()
optimizer.zero_grad()
"""


def loaded_by(program: str) -> set[str]:
    """Return the names of all modules that a fresh interpreter has after a program."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


def test_a_simulation_needs_no_crypten() -> None:
    """The simulator, and the command around it, run where CrypTen is not installed.

    All of it, and a step of a bottom model and its optimizer, load nothing that is seldom used.
    """
    without = "import sys; sys.modules['crypten'] = None; sys.modules['grpc'] = None"
    simulated = "import securevfl.cli.main, securevfl.cli.results, securevfl.runtime.entry"
    loaded = loaded_by(f"{without}; {simulated}\n{STEP}")
    assert "securevfl.federation.rounds.secondary" in loaded
    assert loaded & SELDOM_USED == set()


@pytest.mark.parametrize(
    ("program", "needed", "refused"),
    [
        (
            PARTY,
            "securevfl.runtime.party",
            {"crypten", *ROLES},
        ),
        (
            f"{PARTY}, securevfl.runtime.secondary_party, securevfl.runtime.primary_party\n{STEP}",
            "crypten",
            set[str](),
        ),
    ],
    ids=["helper", "with a table"],
)
def test_a_party_loads_what_its_role_uses(program: str, needed: str, refused: set[str]) -> None:
    """A party's start, to where it reads its table, loads nothing that only a table needs.

    Nor what another role alone needs. Fifty secondaries have to fit one machine.
    """
    loaded = loaded_by(program)
    assert needed in loaded
    assert loaded & (SELDOM_USED | USED_WITH_A_TABLE | refused) == set()


def test_parties_are_forked_from_what_has_loaded_their_libraries() -> None:
    """The process that forks them has torch and tables: seconds of CPU that no party pays again."""
    program = "import securevfl.cli.fork_server_program as it; it.fork_children = repr; it.main()"
    loaded = loaded_by(program)
    assert loaded >= {"crypten", "pandas", "torch", "securevfl.runtime.secondary_party"}
    assert loaded & SELDOM_USED == set()
