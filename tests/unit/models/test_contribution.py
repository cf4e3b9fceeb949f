"""What partners add: shares of a game, intervals paired by rows, permutations against exactness."""

import itertools
import math

import numpy as np
import pytest

from securevfl.lab.contribution import solve
from securevfl.models.tasks import TaskHead
from securevfl.runtime.coalitions import Coalition, CoalitionAnswer

HEAD = TaskHead(task="regression", label_deviation=2.0, chosen="r2")
ROWS = 80


def outputs_with(parts: dict[str, np.ndarray], coalition: Coalition) -> CoalitionAnswer:
    total = sum((parts[one] for one in sorted(coalition)), np.zeros(ROWS))
    return CoalitionAnswer(outputs=total[:, None], threshold=0.5)


def made(names: tuple[str, ...], seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    random = np.random.default_rng(seed)
    parts = {name: random.normal(size=ROWS) * (1 + place) for place, name in enumerate(names)}
    return parts, sum(parts.values()) + random.normal(size=ROWS)


def test_shapley_values_are_the_mean_over_all_orders_and_add_up() -> None:
    names = ("a", "b", "c")
    parts, targets = made(names)
    worth = solve(
        names,
        lambda one: outputs_with(parts, one),
        HEAD,
        targets,
        exact_up_to=3,
        permutations=4,
        seed=1,
    )

    assert worth.method == "exact"
    assert worth.coalitions == 8
    for metric, sign in (("r2", 1), ("mse", -1)):
        value = {one: sign * figures[metric].value for one, figures in worth.values.items()}
        for name in names:
            added = []
            for order in itertools.permutations(names):
                before = frozenset(order[: order.index(name)])
                added.append(value[before | {name}] - value[before])
            found = worth.partners[name]
            assert found.shapley[metric].value == pytest.approx(np.mean(added))
            left = value[frozenset(names)] - value[frozenset(names) - {name}]
            assert found.leave_one_out[metric].value == pytest.approx(left)
        total = sum(one.shapley[metric].value for one in worth.partners.values())
        assert total == pytest.approx(worth.gain[metric].value)
        assert worth.gain[metric].value == pytest.approx(
            sign * (worth.all[metric].value - worth.none[metric].value)
        )
    # In the label's unit squared: the mean error of nobody's outputs.
    assert worth.none["mse"].value == pytest.approx(4 * np.square(targets).mean())


def test_intervals_are_paired_by_rows() -> None:
    # A partner that says nothing moves no row: its interval has no width, however noisy the rest.
    parts, targets = made(("a", "b"))
    parts["idle"] = np.zeros(ROWS)
    worth = solve(
        ("a", "b", "idle"),
        lambda one: outputs_with(parts, one),
        HEAD,
        targets,
        exact_up_to=3,
        permutations=4,
        seed=1,
    )

    idle, busy = worth.partners["idle"], worth.partners["b"]
    assert idle.leave_one_out["mse"].interval == (0.0, 0.0)
    assert idle.shapley["mse"].interval == pytest.approx((0.0, 0.0), abs=1e-9)
    low, high = busy.leave_one_out["mse"].interval or (math.nan, math.nan)
    assert 0 < low < busy.leave_one_out["mse"].value < high
    wide = worth.all["mse"].interval or (math.nan, math.nan)
    assert wide[0] < worth.all["mse"].value < wide[1]


def test_equal_partners_share_equally() -> None:
    parts, targets = made(("a", "b"))
    parts["twin"] = parts["b"]
    half = {**parts, "b": parts["b"] / 2, "twin": parts["b"] / 2}
    worth = solve(
        ("a", "b", "twin"),
        lambda one: outputs_with(half, one),
        HEAD,
        targets,
        exact_up_to=3,
        permutations=4,
        seed=1,
    )

    first, second = worth.partners["b"], worth.partners["twin"]
    for metric in ("r2", "mse"):
        assert first.shapley[metric].value == pytest.approx(second.shapley[metric].value)
        assert first.shapley[metric].interval == pytest.approx(second.shapley[metric].interval)


def test_permutations_add_up_and_come_near_exact_values() -> None:
    names = tuple("abcdef")
    parts, targets = made(names)
    asked: list[Coalition] = []

    def value(one: Coalition) -> CoalitionAnswer:
        asked.append(one)
        # Partners overlap: what one adds depends on who is there.
        return CoalitionAnswer(
            outputs=np.tanh(outputs_with(parts, one).outputs / 4) * 8, threshold=0.5
        )

    exact = solve(names, value, HEAD, targets, exact_up_to=6, permutations=4, seed=1)
    asked.clear()
    drawn = solve(names, value, HEAD, targets, exact_up_to=5, permutations=41, seed=1)

    assert drawn.method == "sampled"
    assert drawn.permutations == 42
    assert len(asked) == len(set(asked)) == drawn.coalitions
    total = sum(one.shapley["mse"].value for one in drawn.partners.values())
    assert total == pytest.approx(exact.gain["mse"].value)
    for name in names:
        found = drawn.partners[name].shapley["mse"]
        error = found.standard_error
        assert error is not None
        # The draw is fixed by its seed: nothing here is left to chance.
        assert abs(found.value - exact.partners[name].shapley["mse"].value) < 4 * error
        assert drawn.partners[name].leave_one_out["mse"].standard_error is None
        assert (
            drawn.partners[name].leave_one_out["mse"] == exact.partners[name].leave_one_out["mse"]
        )
