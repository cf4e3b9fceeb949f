"""Accounting against reference cases that other implementations made."""

import copy
import json
import math
import os
from pathlib import Path

import pytest
from helpers.check_vectors import check_file, miss_of
from helpers.vector_groups import GROUPS
from helpers.warm import Program, printed

OWN = Path(__file__).parent / "accounting.json"
# Reference cases that are kept beside a checkout and not in it; SECUREVFL_VECTORS may name them.
BESIDE = Path(__file__).resolve().parents[3] / "shared" / "vectors" / "dp.json"
SHARED = Path(os.environ.get("SECUREVFL_VECTORS", BESIDE))
FILES = [OWN, *([SHARED] if SHARED.exists() else [])]
CASES = [case for path in FILES for case in json.loads(path.read_text())["cases"]]
needs_shared = pytest.mark.skipif(
    not SHARED.exists(), reason="the shared reference cases are not there; set SECUREVFL_VECTORS"
)


@pytest.mark.parametrize(
    "path", [OWN, pytest.param(SHARED, marks=needs_shared)], ids=lambda path: path.name
)
def test_every_reference_case_holds(path: Path) -> None:
    """Every case is met within its one-sided tolerance, and every refusal is a refusal."""
    program = Program("helpers.check_vectors", path)
    assert program.ended() == (0, "")
    cases = len(json.loads(path.read_text())["cases"])
    assert program.printed == f"{cases} passed, 0 failed\n"


@needs_shared
def test_every_group_of_the_program_has_a_case() -> None:
    """A group that nothing checks would be a promise without evidence."""
    assert {case["group"] for case in CASES} == set(GROUPS)


@pytest.mark.parametrize(
    "case_id",
    [
        "own-poisson_pld-03",
        "own-entity_mog-11",
        "own-heterogeneous_pld-13",
        "own-linked_row_parallel-21",
        *(
            pytest.param(shared, marks=needs_shared)
            for shared in (
                "poisson_pld-001",
                "gaussian_eps-003",
                "calibrate_z-003",
                "noise_multiplier-008",
            )
        ),
    ],
)
@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_a_wrong_expectation_is_a_miss(case_id: str, factor: float) -> None:
    """Negative control: two per cent off in either direction is noticed."""
    case = copy.deepcopy(next(case for case in CASES if case["id"] == case_id))
    for name in ("eps", "noise_multiplier"):
        if name in case["expect"]:
            case["expect"][name] *= factor

    assert miss_of(case) is not None


def test_an_answer_where_a_refusal_is_due_is_a_miss() -> None:
    """Negative control: a sound plan that is marked as one to refuse fails."""
    inputs = {"sigma": 1.0, "q": 0.01, "steps": 10, "delta": 1e-5, "max_rows_per_record": 1}
    case = {"group": "invalid", "inputs": inputs, "expect": {"refuse": True}}

    miss = miss_of(case)

    assert miss is not None
    assert "not refused" in miss


def test_nan_is_never_within_a_tolerance() -> None:
    """Negative control: NaN compares as a miss, whichever side it stands on."""
    inputs = {"sensitivity": 1, "noise_std": 2, "delta": 1e-5}
    case = {"group": "gaussian_eps", "inputs": inputs, "expect": {"eps": math.nan, "abs_tol": 1.0}}

    assert miss_of(case) is not None


def test_a_file_is_counted_and_its_misses_are_named(tmp_path: Path) -> None:
    """The checker reports how many cases pass, and each that does not by its id."""
    good = {"eps0": 1.0, "q": 1.0}
    cases = [
        {"id": "a", "group": "amplify_formula", "inputs": good, "expect": {"eps": 1.0}},
        {"id": "b", "group": "amplify_formula", "inputs": good, "expect": {"eps": 2.0}},
        {"id": "c", "group": "unheard_of", "inputs": {}, "expect": {}},
        {"id": "d", "group": "amplify_formula", "inputs": {"q": 1.0}, "expect": {"eps": 1.0}},
        {"id": "e", "group": "amplify_formula", "inputs": good, "expect": {"epsilon": 1.0}},
    ]
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": cases}))

    passed, misses = check_file(path)

    assert passed == 1
    assert [miss.split(":")[0] for miss in misses] == ["b", "c", "d", "e"]


def test_impossible_numbers_are_refused_and_never_crash(tmp_path: Path) -> None:
    """Every number of one case of every group, made impossible in turn: a refusal each time."""
    wrong = []
    for group in sorted({case["group"] for case in CASES}):
        case = next(case for case in CASES if case["group"] == group)
        for name, number in case["inputs"].items():
            # "sigma" of that group is the released deviation once more.
            if type(number) not in (int, float) or (group, name) == ("stateful_encoder", "sigma"):
                continue
            for value in (None, "nan", "inf", "-inf", "x", -1):
                if (name, value) == ("max_rows_per_record", None) and group == "noise_multiplier":
                    continue  # a linked row has no cap
                inputs = {**case["inputs"], name: value}
                label = f"{group} {name} {value}"
                wrong.append(
                    {"id": label, "group": group, "inputs": inputs, "expect": {"refuse": True}}
                )
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"cases": wrong}))
    assert printed("helpers.check_vectors", path) == f"{len(wrong)} passed, 0 failed\n"
