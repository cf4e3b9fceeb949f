"""What fitting an encoder costs: composed with the releases, for every unit."""

import math
from dataclasses import replace

import pytest

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp.accountant import epsilon_of, pld_epsilon
from securevfl.dp.events import GaussianRelease, SampledRelease
from securevfl.dp.gaussian import gaussian_epsilon, gaussian_noise_multiplier
from securevfl.dp.privacy import Privacy
from securevfl.dp.release_plan import FittingPlan, ReleasePlan

SHARE = 0.1
PLAIN = FittingPlan(share=SHARE)
TWICE = FittingPlan(share=SHARE, steps=2)


def plan_of(*, fitting: FittingPlan | None = PLAIN, **privacy) -> ReleasePlan:
    """Return one pass of 1,000 rows at four secondaries, whose encoders are fitted before."""
    settings = {} if privacy.keys() & {"noise_multiplier", "mechanism"} else {"epsilon": 4.0}
    settings |= {"encoder": "frozen", "links_per_record": 1}
    return ReleasePlan(
        privacy=Privacy(**{**settings, **privacy}),
        parties=4,
        min_active=4,
        rounds=10,
        rows_per_round=100,
        row_releases=1000,
        releases_per_row=1,
        links=5,
        pooled=True,
        fitting=fitting,
    )


@pytest.mark.parametrize(
    "privacy",
    [
        {},
        {"unit": "entity"},
        {"unit": "linked-row"},
        {"colluding": 2},
        {"sampling_rate": 0.3},
    ],
)
def test_fitting_and_releases_keep_the_budget_together(privacy: dict) -> None:
    """The whole plan, fitting and all, meets its epsilon, and with little to spare."""
    plan = plan_of(**privacy)
    tau = plan.noise_share_std()

    assert 3.99 < plan.epsilon(tau) <= 4.0
    # The fitting is counted in it: the releases alone would come to less, unless they cost nothing.
    alone = replace(plan, fitting=None).epsilon(tau)
    assert alone == plan.epsilon(tau) if privacy.get("unit") == "linked-row" else alone < 3.99


def test_two_gaussians_compose_by_the_squares_of_mu() -> None:
    """1/z^2 = 1/z_f^2 + 1/z_r^2, worked out by hand at one secondary's record."""
    plan = plan_of()
    z = gaussian_noise_multiplier(epsilon=4.0, delta=1e-5)
    fitting = plan.fitting_multiplier()
    # Pooled and contested: a row moves by 2 C / K = 0.4; four parties' noise.
    released = plan.noise_share_std() * math.sqrt(4) / 0.4

    assert fitting == pytest.approx(z / math.sqrt(SHARE))
    assert released == pytest.approx(z / math.sqrt(1 - SHARE), rel=1e-9)
    assert fitting**-2 + released**-2 == pytest.approx(z**-2, rel=1e-9)


def test_an_entity_is_in_every_secondarys_statistics() -> None:
    """Four fittings and the releases, composed by an accountant that knows neither by name."""
    plan = plan_of(unit="entity")
    tau = plan.noise_share_std()
    fittings = [GaussianRelease(noise_multiplier=plan.fitting_multiplier()) for _ in range(4)]
    # A release of four terms, each moved by 0.4, under four shares of noise.
    release = GaussianRelease(noise_multiplier=tau * math.sqrt(4) / (4 * 0.4))

    assert epsilon_of([*fittings, release], delta=1e-5) == pytest.approx(plan.epsilon(tau))


def test_a_sampled_pass_composes_with_a_fitting_to_all_records() -> None:
    """The fitting sees every record: it is not amplified, and stands beside the sampled pass."""
    plan = plan_of(sampling_rate=0.3)
    tau = plan.noise_share_std()
    fitting = GaussianRelease(noise_multiplier=plan.fitting_multiplier())
    release = SampledRelease(sampling_rate=0.3, noise_multiplier=tau * math.sqrt(4) / 0.4)

    assert pld_epsilon([fitting, release], delta=1e-5) == pytest.approx(plan.epsilon(tau))


def test_two_noised_answers_have_the_share_of_one_together() -> None:
    """Whitened class means take two: each gets sqrt(2) of the noise, and both are counted."""
    for unit, fittings in (("secondary-record", 1), ("entity", 4)):
        plan = plan_of(fitting=TWICE, unit=unit)
        tau = plan.noise_share_std()
        alike = gaussian_noise_multiplier(epsilon=4.0, delta=1e-5) / math.sqrt(SHARE)
        each = GaussianRelease(noise_multiplier=plan.fitting_multiplier())
        release = GaussianRelease(noise_multiplier=tau * math.sqrt(4) / (0.4 * fittings))

        assert each.noise_multiplier == pytest.approx(alike * math.sqrt(2 * fittings))
        together = epsilon_of([each] * (2 * fittings) + [release], delta=1e-5)
        assert together == pytest.approx(plan.epsilon(tau))
        assert 3.98 < together <= 4.0


def test_with_a_noise_multiplier_the_fitting_has_its_share_too() -> None:
    """The releases keep their multiplier; the fitting is a tenth of both in squared mu."""
    plan = plan_of(noise_multiplier=2.0)
    fitting = plan.fitting_multiplier()
    total = fitting**-2 + 2.0**-2

    assert fitting**-2 == pytest.approx(SHARE * total)
    assert plan.epsilon(plan.noise_share_std()) == pytest.approx(
        gaussian_epsilon(delta=1e-5, noise_multiplier=total**-0.5), rel=1e-9
    )


def test_without_noise_there_is_none_in_the_fitting_either() -> None:
    """``mechanism = "none"`` promises nothing, of the fitting no more than of the releases."""
    plan = plan_of(mechanism="none")

    assert plan.fitting_multiplier() is None
    assert plan.fitting_releases() == []
    assert plan.epsilon(0.0) == math.inf


def test_no_fitting_is_the_plan_as_it_was() -> None:
    """No event, and the noise of a random encoder."""
    plan = plan_of(fitting=None)

    assert plan.fitting_multiplier() is None
    assert plan.fitting_releases() == []
    assert plan.noise_share_std() < plan_of().noise_share_std()


def test_fittings_that_no_accounting_covers_are_refused() -> None:
    """Trained encoders are not fitted beforehand; the papers have no formula for fitted ones."""
    with pytest.raises(ConfigError, match="only frozen encoders are fitted"):
        plan_of(encoder="trained")
    for wrong in ({"share": 1.0}, {"share": 0.0}, {"steps": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            FittingPlan(**{"share": 0.1, **wrong})
    with pytest.raises(PrivacyError, match="no formula for fitted encoders"):
        plan_of(accounting="as-published").check()
