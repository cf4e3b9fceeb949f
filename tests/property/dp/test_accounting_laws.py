"""What holds of every plan."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.desk.accountants import amplified_epsilon, sampled_gaussian_epsilon
from securevfl.dp import Privacy
from securevfl.dp.gaussian import gaussian_delta, gaussian_epsilon, gaussian_noise_multiplier
from securevfl.dp.release_plan import ReleasePlan

multipliers = st.floats(0.05, 200.0)
deltas = st.floats(1e-12, 0.1)
epsilons = st.floats(1e-3, 100.0)


@given(epsilon=epsilons, z=multipliers)
@settings(deadline=None)
def test_more_epsilon_or_noise_never_needs_more_delta(epsilon: float, z: float) -> None:
    """The curve falls in both arguments and lies in [0, 1]."""
    delta = gaussian_delta(epsilon=epsilon, noise_multiplier=z)

    assert 0 <= delta <= 1
    # Upward rounding may lift a value that is nearly zero; never by more than a billionth.
    assert gaussian_delta(epsilon=epsilon * 1.01, noise_multiplier=z) <= delta * (1 + 1e-9) + 1e-9
    assert gaussian_delta(epsilon=epsilon, noise_multiplier=z * 1.01) <= delta * (1 + 1e-9) + 1e-9


@given(epsilon=epsilons, delta=deltas)
@settings(deadline=None, max_examples=50)
def test_noise_and_epsilon_are_inverse(epsilon: float, delta: float) -> None:
    """Enough noise for epsilon costs at most epsilon, and nearly all of it."""
    z = gaussian_noise_multiplier(epsilon=epsilon, delta=delta)
    spent = gaussian_epsilon(delta=delta, noise_multiplier=z)

    assert spent <= epsilon * (1 + 1e-9)
    assert math.isclose(spent, epsilon, rel_tol=1e-4)


@given(epsilon=st.floats(0, 800), q=st.floats(1e-6, 1))
@settings(deadline=None)
def test_sampling_never_costs_and_beats_no_less_than_its_rate(epsilon: float, q: float) -> None:
    """Q epsilon <= log(1 + q (exp(epsilon) - 1)) <= epsilon: the paper's shorthand is too small."""
    amplified = amplified_epsilon(epsilon=epsilon, sampling_rate=q)

    assert q * epsilon * (1 - 1e-9) <= amplified <= epsilon * (1 + 1e-9)


@given(z=multipliers, delta=st.floats(1e-10, 0.01), q=st.floats(0.001, 1))
@settings(deadline=None, max_examples=50)
def test_one_sampled_release_costs_at_most_the_whole(z: float, delta: float, q: float) -> None:
    """Sampling one release never costs more than releasing on all records."""
    sampled = sampled_gaussian_epsilon(delta=delta, noise_multiplier=z, sampling_rate=q)

    assert sampled <= gaussian_epsilon(delta=delta, noise_multiplier=z) * (1 + 1e-9)


@st.composite
def plan_settings(draw: st.DrawFn) -> dict:
    """Return the numbers of any sound plan without sampling."""
    parties = draw(st.integers(1, 12))
    min_active = draw(st.integers(1, parties))
    colluding = draw(st.integers(0, min_active - 1))
    rows, passes = draw(st.integers(1, 500)), draw(st.integers(1, 5))
    batch = draw(st.integers(1, rows))
    encoder = draw(st.sampled_from(["trained", "frozen"]))
    return {
        "privacy": {
            "epsilon": draw(st.floats(0.1, 20)),
            "unit": draw(st.sampled_from(["secondary-record", "linked-row", "entity"])),
            "encoder": encoder,
            "links_per_record": draw(st.integers(1, 50)) if encoder == "frozen" else None,
            "clip_norm": draw(st.floats(0.1, 10)),
            "colluding": colluding,
        },
        "parties": parties,
        "min_active": min_active,
        "rounds": passes * -(-rows // batch),
        "rows_per_round": batch,
        "row_releases": passes * rows,
        "releases_per_row": passes,
        "links": draw(st.integers(1, 60)),
        "pooled": draw(st.booleans()),
    }


def plan_of(settings_of_plan: dict) -> ReleasePlan:
    """Return the plan; built outside the strategy, whose own random numbers must not be used."""
    privacy = Privacy(**settings_of_plan["privacy"])
    return ReleasePlan(**{**settings_of_plan, "privacy": privacy})


@given(numbers=plan_settings())
@settings(deadline=None, max_examples=60)
def test_a_calibrated_plan_keeps_its_promise(numbers: dict) -> None:
    """Whatever the plan: its noise keeps epsilon, and 0.1 % less noise would not."""
    plan = plan_of(numbers)
    plan.check()
    share = plan.noise_share_std()
    target = plan.privacy.epsilon

    assert plan.epsilon(share) <= target
    assert plan.epsilon(share * 0.999) > target


@given(numbers=plan_settings())
@settings(deadline=None, max_examples=60)
def test_spending_part_of_a_plan_never_costs_more_than_all_of_it(numbers: dict) -> None:
    """Epsilon so far rises with what was released, up to the plan's total."""
    plan = plan_of(numbers)
    share = plan.noise_share_std()
    part = max(plan.row_releases // 2, 1)
    so_far = plan.epsilon_after(share, rounds=1, row_releases=part)

    assert so_far <= plan.epsilon(share) * (1 + 1e-9)
