"""Where chance comes from: the system's generator, but for what is listed here with its reason.

Noise, masks, secrets, samples and drawn labels protect nobody if a partner can draw them again. So
in the rooms that make them every mention of another generator is listed, and why it may be used.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "securevfl"
ROOMS = ("dp", "federation", "ledger", "linkage", "mpc", "runtime", "stages", "transport")

# The only sources of what is secret; streams of AES are keyed by these, or by what comes of them.
SYSTEM = re.compile(
    r"os\.urandom|secrets\.(SystemRandom\(\)\.shuffle|randbelow|randbits|token_bytes|token_hex)"
)

# What draws otherwise, by its dotted name.
OTHER = re.compile(
    r"random\.\w+|numpy\.random\.\w+|uuid\.\w+|scipy\.stats\.\w+\.rvs|torch\.nn\.init\.\w+"
    r"|torch\.(Generator|bernoulli|binomial|default_generator|initial_seed|manual_seed|multinomial"
    r"|normal|poisson|random\.\w+|rand(int|n|perm)?(_like)?|seed|[gs]et_rng_state|(cuda|mps)\.\w*(seed|rng)\w*)"
    r"|torch\.nn\.functional\.\w*dropout\w*|securevfl\.core\.conventions\.(derive_seed|stream)"
)
# Methods that draw or seed, of whatever object.
METHODS = frozenset(
    {
        *("bernoulli_", "cauchy_", "choice", "exponential_", "fork_rng", "geometric_", "integers"),
        *("log_normal_", "manual_seed", "normal_", "permutation", "permuted", "random_", "rvs"),
        *("shuffle", "standard_normal", "uniform_"),
    }
)
# Arguments that hand over a seed.
SEEDS = frozenset({"insecure_seed", "random_state"})

RUN_SEED = "securevfl.core.conventions.derive_seed"
RUN_STREAM = "securevfl.core.conventions.stream"

STREAM_ORDER = (RUN_STREAM, ".permutation")
# What of it may be drawn again by whoever knows the run's seed, which all parties do; or by a test.
LISTED = {
    "federation/build.py _initialise_model": ("first weights", RUN_SEED, "torch.random.fork_rng"),
    "stages/pretraining/augment.py CorruptedFeatures.__call__": ("views", "torch.randint"),
    "stages/pretraining/augment.py CorruptedFeatures._replace_words": ("views", "torch.rand"),
    "stages/pretraining/augment.py _choose": ("views", "torch.rand"),
    "stages/pretraining/learner.py NegativeQueue.__init__": ("first negatives", "torch.randn"),
    "stages/pretraining/learner.py PartyLearner.__init__": (
        "views and first weights",
        RUN_SEED,
        "torch.Generator",
        "torch.random.fork_rng",
        ".manual_seed",
    ),
    "stages/pretraining/learner.py PartyLearner._objective": (
        "first negatives",
        "torch.Generator",
        ".manual_seed",
    ),
    "stages/pretraining/learning.py LearnerWithRecords.learn_local": (
        "order of batches",
        *STREAM_ORDER,
    ),
    "stages/pretraining/learning.py pretraining_rows": (
        "rows that are held out, which all parties know",
        *STREAM_ORDER,
    ),
    "stages/pretraining/parties.py PretrainingRun._cross": (
        "order of batches, which secondaries are told",
        *STREAM_ORDER,
    ),
    "federation/rounds/network_primary.py NetworkPrimary._draw_active": (
        "who sits a round out, which all are told",
        ".choice",
    ),
    "federation/rounds/network_primary.py NetworkPrimary._train_epoch": ("batches", RUN_STREAM),
    "federation/rounds/fitted_primary.py CorrectionFit.__call__": ("folds", *STREAM_ORDER),
    "federation/rounds/updates.py DropoutStream.__init__": (
        "dropout",
        RUN_SEED,
        "torch.Generator",
        ".manual_seed",
    ),
    "federation/rounds/updates.py DropoutStream._get": (
        "dropout",
        "torch.cuda.get_rng_state",
        "torch.get_rng_state",
    ),
    "federation/rounds/updates.py DropoutStream._set": (
        "dropout",
        "torch.cuda.set_rng_state",
        "torch.set_rng_state",
    ),
    "dp/laplace_noise.py LaplaceShare.__init__": ("a test's insecure_seed", "insecure_seed="),
    "dp/ring_noise.py ExactDiscreteGaussian.__init__": (
        "a test's insecure_seed",
        "insecure_seed=",
    ),
    "federation/rounds/updates.py DropoutStream.generator": ("dropout", "torch.Generator"),
    "linkage/links.py noised_similarities": (
        "a test's insecure_seed",
        "numpy.random.default_rng",
        ".standard_normal",
    ),
    "linkage/sampling.py PoissonSampler.__init__": (
        "a test's insecure_seed",
        "numpy.random.default_rng",
    ),
    "mpc/on_shares.py _zero_generators": (
        "CrypTen's sharings of zero, which hide nothing that leaves a party",
        "torch.Generator",
        ".manual_seed",
    ),
    "runtime/simulation.py _Simulation.placebo": ("a placebo's order of records", *STREAM_ORDER),
}


def found() -> set[tuple[str, str]]:
    """Return every place that draws by another generator than the system's, and by which."""
    return {
        (f"{path.relative_to(PACKAGE)} {place}", what)
        for room in ROOMS
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for place, what in other_sources(path.read_text(encoding="utf-8"))
    }


def other_sources(text: str) -> Iterator[tuple[str, str]]:
    """Yield what a module's source mentions of other generators and where, type hints left out."""
    tree = ast.parse(text)
    names = dict(imports(tree))
    for place, node in places(tree, ""):
        for what in drawn_by(node, names):
            if not SYSTEM.fullmatch(what):
                yield place, what


def drawn_by(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Name | ast.Attribute):
        dotted = dotted_name(node, names)
        if OTHER.fullmatch(dotted):
            yield dotted
    elif isinstance(node, ast.ImportFrom) and OTHER.fullmatch(node.module or ""):
        yield f"{node.module}"
    elif isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in METHODS:
            dotted = dotted_name(function, names)
            if not OTHER.fullmatch(dotted):
                yield dotted if SYSTEM.fullmatch(dotted) else f".{function.attr}"
        for keyword in node.keywords:
            value = keyword.value
            if keyword.arg in SEEDS and not (
                isinstance(value, ast.Constant) and value.value is None
            ):
                yield f"{keyword.arg}="


def places(node: ast.AST, place: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes of a tree with the function that they stand in, type hints left out."""
    hints = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    for child in ast.iter_child_nodes(node):
        if child in hints:
            continue
        inside = place
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inside = f"{place}.{child.name}" if place else child.name
        yield inside, child
        yield from places(child, inside)


def dotted_name(node: ast.Name | ast.Attribute, names: dict[str, str]) -> str:
    """Return what a name stands for, its first part looked up among the imports."""
    first, dot, rest = ast.unparse(node).partition(".")
    return names.get(first, first if dot else "") + dot + rest


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each imported name of a module, and what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (alias.asname or top, alias.name if alias.asname else top)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name, f"{node.module}.{alias.name}")


def test_chance_is_the_systems_but_for_what_is_listed() -> None:
    listed = {(place, what) for place, (_, *some) in LISTED.items() for what in some}
    assert found() == listed, "list a new one with its reason, or draw from the system"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("import numpy as np\nx = np.random.bytes(8)", "numpy.random.bytes"),
        ("import numpy as np\nx = np.random.default_rng().bytes(8)", "numpy.random.default_rng"),
        ("from numpy import random as chance\nchance.bytes(8)", "numpy.random.bytes"),
        ("from numpy.random import default_rng\ndefault_rng(3)", "numpy.random.default_rng"),
        ("import random\nrandom.random()", "random.random"),
        ("from random import Random\nRandom(1)", "random.Random"),
        ("import torch\ntorch.randn(3)", "torch.randn"),
        ("import torch\ndraw = torch.randint", "torch.randint"),
        ("import torch\nx = torch.empty(3)\nx.normal_()", ".normal_"),
        ("def f(g):\n    g.shuffle([1])", ".shuffle"),
        ("def f(gaussian):\n    gaussian(2.0, insecure_seed=1)", "insecure_seed="),
        ("from securevfl.core.conventions import stream\nstream(3, 'a')", RUN_STREAM),
        ("from securevfl.core import conventions\nconventions.stream(3, 'a')", RUN_STREAM),
    ],
)
def test_what_draws_otherwise_is_seen(line: str, what: str) -> None:
    assert what in {mentioned for _, mentioned in other_sources(line)}


@pytest.mark.parametrize(
    "line",
    [
        "import os\nos.urandom(8)",
        "import secrets\nsecrets.SystemRandom().shuffle([1])\nsecrets.token_bytes(8)",
        "import numpy as np\ndef f(chosen: np.random.Generator) -> np.random.Generator: ...",
    ],
)
def test_the_systems_generator_is_no_other_one(line: str) -> None:
    assert not list(other_sources(line))
