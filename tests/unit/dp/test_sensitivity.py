"""Sensitivities of docs/privacy.md, section 3, and the noise that answers them."""

import itertools
import math

import numpy as np
import pytest
from helpers.vector_groups import noise_multiplier_of_shares, share_std_for_average

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp.events import Neighbouring, Unit
from securevfl.dp.sensitivity import (
    gradient_sensitivity,
    honest_parties,
    noise_share_std,
    row_change,
    sum_sensitivity,
)


def test_a_lost_neighbour_costs_twice_the_clip_norm() -> None:
    """Another one takes its place: 2C a row, not C."""
    assert row_change(clip_norm=3.0, active=5, unit=Unit.SECONDARY_RECORD) == 6.0


def test_units_scale_as_the_table_says() -> None:
    """Linked rows with k, records with sqrt(m), entities with both."""
    common = {"clip_norm": 1.0, "active": 4, "links_per_record": 9, "rows": 128}

    assert sum_sensitivity(unit=Unit.LINKED_ROW, **common) == 8.0
    assert sum_sensitivity(unit=Unit.LINKED_ROW, absent_row_is_zero=True, **common) == 4.0
    assert sum_sensitivity(unit=Unit.SECONDARY_RECORD, **common) == 6.0
    assert sum_sensitivity(unit=Unit.ENTITY, **common) == 24.0
    exchanged = sum_sensitivity(
        unit=Unit.SECONDARY_RECORD, neighbouring=Neighbouring.REPLACE_ONE, **common
    )
    assert exchanged == 2 * math.sqrt(18)


def test_a_batch_bounds_what_a_record_touches() -> None:
    """M beyond the rows released changes nothing."""
    small = sum_sensitivity(
        clip_norm=1.0, active=1, unit=Unit.SECONDARY_RECORD, links_per_record=100, rows=16
    )

    assert small == 8.0


def test_pooling_divides_one_record_by_k_but_never_beyond_the_clip() -> None:
    """2C/K plus rounding, and at most 2C."""
    pooled = {"clip_norm": 1.0, "active": 1, "unit": Unit.SECONDARY_RECORD}

    assert row_change(pooled_links=50, **pooled) == pytest.approx(0.04, rel=1e-12)
    assert row_change(pooled_links=50, rounding=0.01, **pooled) == pytest.approx(0.05, rel=1e-12)
    assert row_change(pooled_links=1, rounding=0.5, **pooled) == 2.0


def test_changes_in_coordinates_of_their_own_add_up_in_squares() -> None:
    """By all corners: each of four parties moves its own pair of coordinates by up to C."""
    step = np.array([[1.0, 0.0], [0.0, -1.0], [math.sqrt(0.5), math.sqrt(0.5)]])
    lengths = [
        np.linalg.norm(np.concatenate([step[i] for i in chosen]))
        for chosen in itertools.product(range(3), repeat=4)
    ]
    pooled = {"clip_norm": 1.0, "active": 4, "pooled_links": 1, "contested": False}

    for unit in (Unit.ENTITY, Unit.LINKED_ROW):
        own = row_change(unit=unit, absent_row_is_zero=True, disjoint=True, **pooled)
        assert own == pytest.approx(max(lengths)) == 2.0
        assert row_change(unit=unit, absent_row_is_zero=True, **pooled) == 4.0
    record = row_change(unit=Unit.SECONDARY_RECORD, disjoint=True, **pooled)
    assert record == row_change(unit=Unit.SECONDARY_RECORD, **pooled) == 1.0


def test_a_missing_cap_is_refused() -> None:
    """Without m there is no bound."""
    with pytest.raises(ConfigError, match="links_per_record: must be given"):
        sum_sensitivity(clip_norm=1.0, active=1, unit=Unit.ENTITY, links_per_record=None, rows=1)


def test_shares_leave_the_wanted_noise_on_the_average() -> None:
    """K shares of sqrt(k) s, divided by k, carry s."""
    k, wanted = 10, 0.4
    share = share_std_for_average(average_noise_std=wanted, parties=k)

    assert share * math.sqrt(k) / k == pytest.approx(wanted, rel=1e-12)


def test_honest_parties_carry_the_noise_alone() -> None:
    """With c colluders each share grows, and z counts honest shares only."""
    share = noise_share_std(sum_std=3.0, active=5, colluding=1)

    assert share == 1.5
    z = noise_multiplier_of_shares(share_std=share, sensitivity=2.0, active=5, colluding=1)
    assert z == 1.5


@pytest.mark.parametrize(("active", "colluding"), [(1, 1), (4, 4), (4, 9)])
def test_all_colluding_is_refused(active: int, colluding: int) -> None:
    """Nobody's noise would protect."""
    with pytest.raises(PrivacyError, match=f"at most {active - 1}"):
        honest_parties(active=active, colluding=colluding)


def test_what_one_unit_moves_in_a_sum_of_gradients() -> None:
    """A linked row is one row; a record moves every row of the round that it touches, by 2 C_g."""
    for unit, change in ((Unit.LINKED_ROW, 3.0), (Unit.SECONDARY_RECORD, 12.0)):
        assert gradient_sensitivity(clip_norm=1.5, unit=unit, rows=4) == change
    with pytest.raises(ConfigError, match="rows"):
        gradient_sensitivity(clip_norm=1.5, unit=Unit.LINKED_ROW, rows=0)
