"""From a plan to noise, and from noise to epsilon."""

import math
from dataclasses import replace

import pytest

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp import Privacy, release_plan
from securevfl.dp.accountant import pld_epsilon
from securevfl.dp.budget import Budget
from securevfl.dp.events import SampledRelease
from securevfl.dp.gaussian import gaussian_epsilon, gaussian_noise_multiplier
from securevfl.dp.release_plan import ReleasePlan


def plan_of(
    *, min_active: int = 4, pooled: bool = False, passes: int = 1, **privacy
) -> ReleasePlan:
    """Return a plan of 1,000 rows in 10 rounds a pass, at four secondaries."""
    settings = {"epsilon": 8.0} if "noise_multiplier" not in privacy else {}
    return ReleasePlan(
        privacy=Privacy(**{**settings, **privacy}),
        parties=4,
        min_active=min_active,
        rounds=10 * passes,
        rows_per_round=100,
        row_releases=1000 * passes,
        releases_per_row=passes,
        links=20,
        pooled=pooled,
    )


FROZEN = {"encoder": "frozen", "links_per_record": 4}


def test_a_trained_encoder_pays_for_every_row_of_every_round() -> None:
    """Mu = 2C sqrt(row releases) / (tau sqrt(k)), as in docs/privacy.md, section 3."""
    plan = plan_of(passes=5, clip_norm=3.0)
    mu = 2 * 3.0 * math.sqrt(5000) / (7.0 * 2)

    assert plan.epsilon(7.0) == pytest.approx(
        gaussian_epsilon(delta=1e-5, noise_multiplier=1 / mu), rel=1e-9
    )


def test_a_frozen_encoder_pays_once_for_the_rows_of_one_record() -> None:
    """Delta_sum = 2C sqrt(m), whatever the number of rounds."""
    plan = plan_of(**FROZEN)

    assert plan.sensitivity() == 4.0
    assert plan.noise_share_std() == pytest.approx(
        gaussian_noise_multiplier(epsilon=8.0, delta=1e-5) * 4.0 / 2, rel=1e-9
    )


def test_pooling_is_worth_a_factor_of_k_with_a_frozen_encoder_only() -> None:
    """With a trained one, all K vectors of a row may change together."""
    frozen = plan_of(**FROZEN)
    trained = plan_of()

    assert plan_of(pooled=True, **FROZEN).noise_share_std() == pytest.approx(
        frozen.noise_share_std() / 20, rel=1e-9
    )
    assert plan_of(pooled=True).noise_share_std() == trained.noise_share_std()


def test_calibrated_noise_keeps_the_promise_and_little_more() -> None:
    """Epsilon of the calibrated plan is at most the target, and above 99.9 % of it."""
    for plan in (
        plan_of(),
        plan_of(**FROZEN),
        plan_of(sampling_rate=0.3, **FROZEN),
        plan_of(unit="entity", colluding=1),
        plan_of(unit="linked-row", encoder="frozen", passes=3),
        plan_of(min_active=2, unit="entity", **FROZEN),
    ):
        epsilon = plan.epsilon(plan.noise_share_std())

        assert 7.99 < epsilon <= 8.0


def test_noise_for_other_releases_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration that leaves out an answer ends, and the promise is not made."""
    solver = release_plan.noise_multiplier_for
    monkeypatch.setattr(
        release_plan, "noise_multiplier_for", lambda *one, **how: 0.99 * solver(*one, **how)
    )
    with pytest.raises(PrivacyError, match="no noise was found for epsilon = 8"):
        plan_of(**FROZEN).noise_share_std()


@pytest.mark.parametrize(
    ("unit", "answers", "change"),
    [("secondary-record", 1, 4), ("entity", 4, 4), ("linked-row", 4, 1)],
)
def test_a_unit_pays_for_every_number_of_linked_rows(unit: str, answers: int, change: int) -> None:
    """Mu of each secondary's number is what the unit moves it by over its noise."""
    plan = replace(plan_of(unit=unit, **FROZEN), linked_rows=1000)
    share_std = plan.noise_share_std()
    rows = plan.release(share_std, rounds=10, row_releases=1000).noise_multiplier
    mu = math.sqrt(rows**-2 + answers * (change / plan.link_count_std(share_std)) ** 2)

    assert 7.99 < plan.epsilon(share_std) <= 8.0
    assert plan.epsilon(share_std) == pytest.approx(
        gaussian_epsilon(delta=1e-5, noise_multiplier=1 / mu), rel=1e-9
    )


def test_noise_multiplier_is_noise_over_sensitivity() -> None:
    """Tau = z Delta_sum / sqrt(k - c), at the worst number of active secondaries."""
    plan = plan_of(noise_multiplier=1.5, colluding=1, **FROZEN)

    assert plan.noise_share_std() == pytest.approx(1.5 * plan.sensitivity() / math.sqrt(3))
    assert plan.epsilon(plan.noise_share_std()) == pytest.approx(
        gaussian_epsilon(delta=1e-5, noise_multiplier=1.5), rel=1e-9
    )


def test_fewest_active_parties_decide_for_a_record_and_most_for_an_entity() -> None:
    """Noise grows with sqrt(k_a), an entity's change with k_a: the worst end differs."""
    record = plan_of(min_active=1, **FROZEN)
    entity = plan_of(min_active=1, unit="entity", **FROZEN)

    assert record.noise_share_std() == pytest.approx(
        2 * plan_of(**FROZEN).noise_share_std(), rel=1e-9
    )
    assert entity.noise_share_std() == pytest.approx(
        plan_of(unit="entity", **FROZEN).noise_share_std(), rel=1e-9
    )


def test_collusion_makes_the_worst_end_move_for_an_entity() -> None:
    """With c = 1 and two active, one honest share hides a change of 2; with four, three hide 4."""
    plan = plan_of(min_active=2, unit="entity", colluding=1, **FROZEN)
    worst = max(2 / math.sqrt(1), 4 / math.sqrt(3))
    z = gaussian_noise_multiplier(epsilon=8.0, delta=1e-5)

    assert plan.noise_share_std() == pytest.approx(z * 2 * worst * math.sqrt(4), rel=1e-9)


def test_one_secret_sample_for_the_whole_pass_amplifies_once() -> None:
    """Poisson(q, z) x 1, however many rounds the pass has."""
    plan = plan_of(sampling_rate=0.2, **FROZEN)
    z = 3.0 * 2 / 4.0
    release = SampledRelease(sampling_rate=0.2, noise_multiplier=z)

    assert plan.epsilon(3.0) == pytest.approx(pld_epsilon([release], delta=1e-5), rel=1e-12)


def test_spending_rises_to_the_plans_total() -> None:
    """A frozen encoder spends while rows come that one record can touch; a trained one always."""
    trained, frozen = plan_of(), plan_of(**FROZEN)
    spent = [trained.epsilon_after(9.0, rounds=r, row_releases=100 * r) for r in range(11)]

    assert spent[0] == 0.0
    assert spent == sorted(spent)
    assert spent[-1] == trained.epsilon(9.0)
    assert frozen.epsilon_after(9.0, rounds=1, row_releases=4) == frozen.epsilon(9.0)
    assert frozen.epsilon_after(9.0, rounds=1, row_releases=3) < frozen.epsilon(9.0)


def test_the_papers_figure_is_beside_the_sound_one() -> None:
    """A trained encoder's sound epsilon is far above what Theorem 3 claims for the same noise."""
    plan = plan_of(passes=20)
    share = plan.noise_share_std()

    assert plan.epsilon_as_published(share) < 0.4 * plan.epsilon(share)


def test_as_published_accounting_calibrates_to_the_claim_and_says_so() -> None:
    """The claim is met, the statement calls it no guarantee and gives the sound figure."""
    plan = plan_of(accounting="as-published", sampling_rate=0.1, passes=20)
    plan.check()

    assert plan.epsilon_as_published(plan.noise_share_std()) == pytest.approx(8.0, rel=1e-3)
    assert "not a guarantee" in plan.statement(plan.noise_share_std()).text
    assert plan.epsilon(plan.noise_share_std()) > 1000


def test_without_noise_nothing_is_promised() -> None:
    """No noise: infinite epsilon, and a sentence that says it."""
    plan = ReleasePlan(
        privacy=Privacy(mechanism="none"),
        parties=1,
        min_active=1,
        rounds=1,
        rows_per_round=1,
        row_releases=1,
        releases_per_row=1,
        links=1,
    )
    plan.check()

    assert plan.noise_share_std() == 0.0
    assert plan.epsilon(0.0) == math.inf
    assert plan.epsilon_as_published(0.0) == math.inf
    assert plan.epsilon_after(0.0, rounds=0, row_releases=0) == 0.0
    assert "No noise" in plan.statement(plan.noise_share_std()).text


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (lambda: plan_of(colluding=4), "leaves no secondary whose noise protects"),
        (lambda: plan_of(min_active=2, colluding=2), "leaves no secondary whose noise protects"),
        (lambda: plan_of(passes=2, sampling_rate=0.5, **FROZEN), "one secret sample"),
    ],
)
def test_an_unsound_plan_is_refused(plan, text: str) -> None:
    """Exit code 4, before anything is sent."""
    with pytest.raises(PrivacyError, match=text):
        plan().check()


@pytest.mark.parametrize(
    "change",
    [
        {"min_active": 5},
        {"row_releases": 10_000},
        {"row_releases": 10},
        {"releases_per_row": 11},
        {"rounds": 0},
    ],
)
def test_an_impossible_plan_is_refused(change: dict) -> None:
    """Counts that contradict one another are a bug of the caller's, found at once."""
    with pytest.raises(ConfigError):
        replace(plan_of(), **change)


DP_TRAINED = {"encoder": "dp-trained", "links_per_record": 4}


def budget_of(plan: ReleasePlan, **changes) -> Budget:
    """Return the calculator's plan of the same rounds."""
    privacy = plan.privacy
    return Budget(
        **{
            "steps": plan.releases_per_row,
            "delta": privacy.delta,
            "unit": privacy.unit,
            "encoder": privacy.encoder,
            "sampling_rate": privacy.sampling_rate,
            "links_per_record": privacy.links_per_record,
            "secondaries": plan.parties,
            "colluding": privacy.colluding,
            "clip_norm": privacy.clip_norm,
            "batch_rows": plan.rows_per_round,
            "gradient_clip_norm": privacy.gradient_clip_norm,
            "gradient_noise_multiplier": privacy.gradient_noise_multiplier,
            **changes,
        }
    )


@pytest.mark.parametrize("unit", ["secondary-record", "entity", "linked-row"])
def test_a_dp_trained_run_costs_what_the_calculator_says(unit: str) -> None:
    """A pass releases m rows and teaches m rows once: one full round of the calculator's."""
    plan = plan_of(
        passes=5, unit=unit, noise_multiplier=9.0, gradient_noise_multiplier=12.0, **DP_TRAINED
    )
    plan.check()
    budget = budget_of(plan)
    tau = plan.noise_share_std()

    assert tau == pytest.approx(budget.noise_share_std(noise_multiplier=9.0), rel=1e-12)
    assert plan.gradient_noise_std(tau) == pytest.approx(budget.gradient_noise_std(12.0), rel=1e-12)
    assert plan.epsilon(tau) == pytest.approx(budget.epsilon(noise_multiplier=9.0), rel=1e-9)


def test_a_fresh_sample_each_round_costs_what_the_calculator_says() -> None:
    """At most m rounds of a pass touch a record: Poisson(q, z_eff) that many times."""
    plan = plan_of(
        passes=5,
        noise_multiplier=2.0,
        gradient_noise_multiplier=3.0,
        sampling_rate=0.2,
        **DP_TRAINED,
    )
    plan.check()
    tau = plan.noise_share_std()
    joint = (2.0**-2 + 3.0**-2) ** -0.5
    rounds = SampledRelease(sampling_rate=0.2, noise_multiplier=joint, count=4 * 5)

    assert plan.epsilon(tau) == pld_epsilon([rounds], delta=1e-5)
    assert plan.epsilon(tau) == budget_of(plan, steps=20).epsilon(noise_multiplier=2.0)


def test_no_more_rounds_than_there_are_can_touch_a_record() -> None:
    """With a cap above the batches of a pass, every round is charged once, and no more."""
    plan = plan_of(
        passes=5, noise_multiplier=2.0, sampling_rate=0.2, encoder="dp-trained", links_per_record=50
    )
    release = plan.release(plan.noise_share_std(), rounds=50, row_releases=5000)

    assert isinstance(release, SampledRelease)
    assert release.count == 50


def test_rounds_beyond_the_plan_are_all_charged() -> None:
    """A record is in each of them: what is said to be spent never stops at the planned rounds."""
    plan = plan_of(
        passes=5, noise_multiplier=2.0, sampling_rate=0.2, encoder="dp-trained", links_per_record=50
    )
    tau = plan.noise_share_std()
    more = plan.release(tau, rounds=80, row_releases=8000, passes=8)

    assert isinstance(more, SampledRelease)
    assert more.count == 80
    spent = plan.epsilon_after(tau, rounds=80, row_releases=8000, passes=8)
    assert spent > plan.epsilon(tau) + 1


def test_one_batch_may_hold_all_of_a_records_rows() -> None:
    """Worst over all ways to spread m rows over batches: (2 C_g m)^2 and not m (2 C_g)^2."""
    plan = plan_of(passes=1, noise_multiplier=5.0, gradient_clip_norm=0.3, **DP_TRAINED)
    tau = plan.noise_share_std()
    noise = plan.gradient_noise_std(tau)
    forward, update = 2 * math.sqrt(4) / (tau * 2), 2 * 0.3 * 4 / noise

    assert plan.epsilon(tau) == pytest.approx(
        gaussian_epsilon(delta=1e-5, noise_multiplier=math.hypot(forward, update) ** -1), rel=1e-9
    )
    assert update == pytest.approx(1 / 5.0)


def test_the_share_divides_the_budget() -> None:
    """1/z^2 adds up: a tenth for updates leaves nine tenths for releases."""
    even = plan_of(passes=3, **DP_TRAINED)
    skewed = plan_of(passes=3, gradient_share=0.1, **DP_TRAINED)
    quick = plan_of(passes=3, sampling_rate=0.3, gradient_share=0.1, **DP_TRAINED)

    for plan in (even, skewed, quick):
        assert 7.99 < plan.epsilon(plan.noise_share_std()) <= 8.0
    assert skewed.noise_share_std() / even.noise_share_std() == pytest.approx(
        math.sqrt(0.5 / 0.9), rel=1e-6
    )
    assert skewed.gradient_noise_std(skewed.noise_share_std()) / even.gradient_noise_std(
        even.noise_share_std()
    ) == pytest.approx(math.sqrt(0.5 / 0.1), rel=1e-6)


def test_part_of_a_dp_trained_run_is_charged_by_its_passes() -> None:
    """Two passes of five cost what a run of two does, whatever the order of the batches."""
    plan = plan_of(passes=5, noise_multiplier=9.0, **DP_TRAINED)
    short = plan_of(passes=2, noise_multiplier=9.0, **DP_TRAINED)
    tau = plan.noise_share_std()
    part = plan.epsilon_after(tau, rounds=13, row_releases=1300, passes=2)

    assert part == pytest.approx(short.epsilon(tau), rel=1e-12)
    assert plan.epsilon_after(tau, rounds=1, row_releases=3, passes=1) < part


def test_updates_do_not_lose_noise_to_colluding_or_missing_parties() -> None:
    """A secondary's update carries its own noise, whole; only the sum's noise is shared."""
    alone = plan_of(noise_multiplier=3.0, **DP_TRAINED)
    helped = plan_of(noise_multiplier=3.0, colluding=2, min_active=3, **DP_TRAINED)

    assert helped.noise_share_std() == pytest.approx(2 * alone.noise_share_std(), rel=1e-12)
    assert helped.gradient_noise_std(helped.noise_share_std()) == pytest.approx(
        alone.gradient_noise_std(alone.noise_share_std()), rel=1e-12
    )


def test_an_entity_sampled_by_each_party_is_the_calculators_mixture() -> None:
    """One pass with a frozen encoder, each party with a secret sample of its own."""
    plan = plan_of(unit="entity", sampling_rate=0.2, noise_multiplier=1.5, **FROZEN)

    assert plan.epsilon(plan.noise_share_std()) == budget_of(plan).epsilon(noise_multiplier=1.5)


def test_right_angles_and_samples_of_their_own_take_the_full_change() -> None:
    """Parties in coordinates of their own: j of them change sqrt(j/k) of it, more than j/k.

    The calculator's mixture would be too small, so the release at rate q with the full change
    bounds it.
    """
    plan = plan_of(unit="entity", sampling_rate=0.2, noise_multiplier=1.5, pooled=True, **FROZEN)
    apart = replace(plan, disjoint=True)
    full = SampledRelease(sampling_rate=0.2, noise_multiplier=1.5)

    assert apart.epsilon(apart.noise_share_std()) == pytest.approx(
        pld_epsilon([full], delta=1e-5), rel=1e-9
    )
    assert apart.epsilon(apart.noise_share_std()) > plan.epsilon(plan.noise_share_std())
