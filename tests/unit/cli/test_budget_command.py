"""``securevfl budget``: what users type, and what they get."""

import json
import subprocess
import sys
from functools import cache

import pytest
from helpers.patience import PATIENCE_S
from helpers.warm import printed

from securevfl.core import errors
from securevfl.dp.accountant import pld_epsilon
from securevfl.dp.budget import Budget
from securevfl.dp.events import GaussianRelease, SampledRelease

pytestmark = pytest.mark.pictures

ISSUE = ["--noise-multiplier", "1.0", "--sampling-rate", "0.1", "--steps", "1000"]

BAD_INPUT = [
    ([], "ConfigError", "give --noise-multiplier, --epsilon, or both"),
    (["--epsilon", "1", "--noise-multiplier", "1", "--steps", "5"], "ConfigError", "leave --steps"),
    (["--epsilon", "nan"], "ConfigError", "epsilon must be finite"),
    (["--noise-multiplier", "0"], "ConfigError", "noise_multiplier must be finite and > 0"),
    (["--epsilon", "1", "--delta", "1.5"], "ConfigError", "delta must lie"),
    (["--epsilon", "1", "--unit", "row"], "ConfigError", "unit must be one of"),
    (["--epsilon", "1", "--unit", "entity"], "PrivacyError", "links_per_record: must be given"),
    (["--epsilon", "1", "--encoder", "frozen"], "PrivacyError", "links_per_record"),
    (
        ["--epsilon", "1", "--encoder", "trained", "--sampling-rate", "0.1"],
        "PrivacyError",
        "remember",
    ),
    (["--epsilon", "1", "--colluding", "1"], "PrivacyError", "leaves no secondary"),
    (["--epsilon", "1", "--gradient-clip-norm", "1"], "ConfigError", "goes with encoder"),
]


def run_all(*commands: list[str]) -> list[tuple[int, str, str, str]]:
    """Return exit code, output, error class and error text of each command.

    Typer hands its callback a context of a private class, which the run-time type checks of the
    tests refuse; so the commands run in one process of their own, without those checks.
    """
    lines = printed("helpers.budget_commands", json.dumps(commands)).splitlines()
    return [tuple(json.loads(line)) for line in lines]


UPDATES = [
    *("--noise-multiplier", "2", "--encoder", "dp-trained", "--links-per-record", "3"),
    *("--gradient-noise-multiplier", "1.5", "--gradient-clip-norm", "0.5"),
]
GOOD = {
    "updates": [*UPDATES, "--json"],
    "updates in text": UPDATES,
    "epsilon": [*ISSUE, "--delta", "1e-5", "--json"],
    "noise": ["--epsilon", "2", "--sampling-rate", "0.1", "--steps", "500", "--json"],
    "steps": ["--epsilon", "2", "--noise-multiplier", "4.7", "--sampling-rate", "0.1", "--json"],
    "text": ["--epsilon", "3", "--secondaries", "4", "--colluding", "1"],
    "compare": [*ISSUE, "--secondaries", "4", "--compare", "--json"],
    "compare in text": [*ISSUE, "--secondaries", "4", "--compare"],
}


@cache
def outcomes() -> dict[str, tuple[int, str, str, str]]:
    """Run every command of this file once; return outcomes by name, or by words if bad."""
    named = GOOD | {" ".join(arguments): arguments for arguments, _, _ in BAD_INPUT}
    return dict(zip(named, run_all(*named.values()), strict=True))


def output_of(name: str) -> str:
    """Return what a good command prints."""
    code, output, _, text = outcomes()[name]
    assert code == 0, text
    return output


def answer_of(name: str) -> dict:
    """Return what a good command prints with --json: one line, one object."""
    output = output_of(name)
    assert output.count("\n") == 1
    return json.loads(output)


def test_epsilon_from_noise() -> None:
    """The figure is the accountant's own, of rounds and of the noised count of linked rows."""
    got = answer_of("epsilon")

    rounds = SampledRelease(sampling_rate=0.1, noise_multiplier=1.0, count=1000)
    linked = GaussianRelease(noise_multiplier=10.0)
    assert got["epsilon"] == pld_epsilon([rounds, linked], delta=1e-5)
    settings = (got["unit"], got["encoder"], got["links_per_record"])
    assert settings == ("secondary-record", "frozen", 1)
    assert "linked to at most 1 of the primary's rows" in got["hides"]


def test_noise_from_epsilon_and_steps_from_both() -> None:
    """The other two directions are the calculator's."""
    budget = Budget(steps=500, sampling_rate=0.1, delta=1e-5, links_per_record=1, counts_links=True)
    noise, steps = answer_of("noise"), answer_of("steps")

    assert noise["noise_multiplier"] == budget.noise_multiplier(epsilon=2.0)
    assert steps["steps"] == budget.steps_within(epsilon=2.0, noise_multiplier=4.7)
    assert noise["epsilon"] <= 2
    assert steps["epsilon"] <= 2


def test_the_text_says_who_what_and_how_much() -> None:
    """Without --json: figures, then the sentence to sign."""
    output = output_of("text")

    assert "the primary together with any 1 of the 4 secondaries" in output
    assert "noise per party" in output


def test_updates_of_dp_trained_encoders_have_noise_of_their_own() -> None:
    """Text and JSON say how much, in the gradient's units: 2 C_g m over its multiplier."""
    answer = answer_of("updates")

    assert answer["gradient_noise_std"] == 1.5 * 2 * 0.5 * 3
    assert "noise per update  4.5" in output_of("updates in text")


def test_compare_marks_what_is_no_guarantee() -> None:
    """Five figures; the papers' own is marked."""
    got = answer_of("compare")["compare"]

    assert {name for name, row in got.items() if not row["guarantee"]} == {"as-published"}
    assert len(got) == 5
    assert "not a guarantee" in output_of("compare in text")


@pytest.mark.parametrize(("arguments", "error", "text"), BAD_INPUT)
def test_bad_input_is_one_clear_line(arguments: list[str], error: str, text: str) -> None:
    """Our own error, for the command line to print and to exit with its code."""
    _, output, name, message = outcomes()[" ".join(arguments)]

    assert (name, output) == (error, "")
    assert issubclass(getattr(errors, name), errors.SecureVflError)
    assert text in message
    assert "\n" not in message


def test_the_calculator_loads_neither_torch_nor_crypten() -> None:
    """A privacy officer's laptop answers without them."""
    code = (
        "import sys; import securevfl.desk.budget_command; "
        "import securevfl.dp.budget; "
        "import securevfl.ledger.ledger; "
        "print(sorted({'torch', 'crypten'} & {m.split('.')[0] for m in sys.modules}))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    assert done.stdout == "[]\n"
