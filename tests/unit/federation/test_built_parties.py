"""What secondaries that are built as in a run refuse, and what their plan allows for."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.built import Built, built, write_tables
from helpers.ring_keys import random_pair_keys
from helpers.secondaries import answer
from helpers.star import make_star, together

from securevfl import read_federation
from securevfl.core.errors import BudgetExceededError, DataError, PrivacyError, ProtocolError
from securevfl.federation.messages import RoundPlan
from securevfl.federation.over_star import serve, sum_from_secondary
from securevfl.federation.rounds.cut import MeanOfPooledRecords, MeanOfRows
from securevfl.federation.rounds.secondary import save_nothing
from securevfl.federation.run_plan import Purpose, RunFacts, RunPlan, plan_run
from securevfl.testing import save_federation

ROWS, BATCH, CAP, LINKS = 60, 20, 2, 4
MODEL = {"neighbours": LINKS, "hidden": 8, "heads": 2, "release": "pooled"}
FROZEN = {
    "noise_multiplier": 1.0,
    "delta": 1e-4,
    "encoder": "frozen",
    "unit": "secondary-record",
    "links_per_record": CAP,
}


def write(folder: Path, **sections) -> Path:
    features = np.random.default_rng(1).uniform(-1, 1, (ROWS, 3))
    settings = {"model": MODEL, "privacy": FROZEN, "training": {"epochs": 1, "batch_size": BATCH}}
    return write_tables(folder, features, **{**settings, **sections})


def ask(one: Built, folder: Path, active: tuple[int, ...], purpose: Purpose) -> object:
    """Let a primary announce one round over TLS to the first secondary; return what that raised."""
    star = make_star(folder / "star", one.plan.ranks)
    rows = np.arange(BATCH)
    asked = RoundPlan(round_number=1, rows=rows, active=active, purpose=purpose)
    with star.joined() as (primary, ends):
        keys = random_pair_keys(tuple(one.secondaries))
        sum_to, masks = sum_from_secondary(ends["bank-1"], one.plan, keys[1], rank=1)
        answering = partial(
            serve,
            one.secondaries[1].handlers(save_nothing),
            ends["bank-1"],
            sum_to,
            ranks=tuple(one.plan.secondaries),
            deadline_s=one.plan.config.waits.work.for_primary_s,
        )
        primary.broadcast(["bank-1"], asked.to_message())
        try:
            # Whoever answers in spite of all is told that the run is over, and ends.
            raised, _ = together([answering, primary.close])
        finally:
            masks.close()
    return raised


@pytest.mark.parametrize(
    ("privacy", "purpose"),
    [
        (FROZEN, "release"),
        ({**FROZEN, "encoder": "dp-trained"}, "train"),
        ({**FROZEN, "encoder": "dp-trained"}, "validation"),
    ],
    ids=["frozen", "dp-trained", "validation"],
)
def test_fewer_parties_than_the_noise_was_calibrated_for_are_refused(
    privacy: dict, purpose: Purpose, tmp_path: Path
) -> None:
    """By the server that a party's process runs, before anything is charged or computed."""
    with built(write(tmp_path, privacy=privacy), tmp_path / "run") as one:
        ran: list[object] = []
        one.secondaries[1].bottom.register_forward_pre_hook(lambda *_: ran.append(_))
        raised = ask(one, tmp_path, (1,), purpose)

        assert isinstance(raised, ProtocolError)
        assert "1 secondaries take part; the run has 2" in str(raised)
        assert [line["kind"] for line in one.booked(1)] == ["open"]
        assert not ran


@pytest.mark.parametrize("later", [2, 3])
def test_a_row_is_never_released_again(later: int, tmp_path: Path) -> None:
    """Neither in the next round nor after others; nothing is charged for the attempt.

    The ledger would refuse as well, when nothing is left; the rule must not rest on that.
    """
    with built(write(tmp_path), tmp_path / "run") as one:
        for plan in one.passed()[: later - 1]:
            one.answer(plan)
        fresh = one.passed()[later - 1].rows
        # The first round's last row takes the place of a new one.
        again = np.concatenate([fresh[1:], one.passed()[0].rows[-1:]])
        for rank, secondary in one.secondaries.items():
            with pytest.raises((PrivacyError, ProtocolError)) as refused:
                answer(secondary, one.round(later, again))
            assert not isinstance(refused.value, BudgetExceededError)
            charged = [line for line in one.booked(rank) if line["kind"] == "charge"]
            assert len(charged) == later - 1
        one.answer(one.passed()[later - 1])


def rounded_plan(folder: Path, *, clip_norm: float) -> RunPlan:
    config = read_federation(
        write(
            folder,
            model={**MODEL, "hidden": 16},
            linkage={"choose": "records"},
            privacy={**FROZEN, "clip_norm": clip_norm},
        )
    )
    return plan_run(config, RunFacts(rows=60, train_rows=42, validation_rows=6, test_rows=12))


def test_the_noise_allows_for_what_rounding_adds_to_a_sum_that_is_drawn_back(
    tmp_path: Path,
) -> None:
    """A record that moves a row by more than C / K, in the integers that are released.

    With it a row's sum is within the ball of radius K C; without it just outside, so drawing back
    takes a unit of every coordinate: fifteen of sixteen further from where they were with it.
    """
    width = 16
    # A clip norm of four times a whole number of units, and a little more for the clip's margin.
    bits = rounded_plan(tmp_path, clip_norm=1.0).cut.ring.precision_bits
    each = 2 ** (bits - 2)
    plan = rounded_plan(tmp_path, clip_norm=(4 * each + 0.5) * 2.0**-bits)
    aggregation = plan.aggregation()
    assert plan.cut.ring.precision_bits == bits
    radius = LINKS * plan.config.privacy.clip_norm * 2**bits
    # The others' sum: far down along one axis, one unit up along the rest; five records of it.
    down = math.ceil(radius)
    parts = [down // 5 + (number < down % 5) for number in range(5)]
    units = torch.zeros(2, 6, width)
    for number, part in enumerate(parts):
        units[:, number, 0] = -part
    units[:, 0, 1:] = 1
    units[0, 5] = each
    # In the middle of a unit, where rounding towards zero gives it back.
    batch = (units + 0.02 * units.sign()) * 2.0**-bits
    sums = aggregation.units(aggregation.clip(batch), bounded=True)[:, 0].double()

    assert sums[0].tolist() == units[0].sum(dim=0).tolist()
    moved = float((sums[0] - sums[1]).norm()) * 2.0**-bits / LINKS
    per_row = plan.config.privacy.clip_norm / LINKS
    # z is 1, so the noise of both parties together is what one record moves m rows by.
    allowed = plan.noise_share_std * math.sqrt(2) / math.sqrt(CAP)
    assert per_row < moved <= allowed


def test_a_plan_without_that_rounding_would_promise_too_much(tmp_path: Path) -> None:
    """Without it the plan asks for less noise; only sums that are drawn back need it."""
    plan = rounded_plan(tmp_path, clip_norm=1.0)
    without = replace(plan.releases, rounding=0.0)
    assert without.noise_share_std() < plan.noise_share_std
    config = read_federation(write(tmp_path))
    facts = RunFacts(rows=60, train_rows=42, validation_rows=6, test_rows=12)
    assert plan_run(config, facts).releases.rounding == 0


@pytest.mark.parametrize("encoder", ["trained", "dp-trained"])
def test_rows_of_encoders_that_learn_are_clipped_as_a_whole(encoder: str, tmp_path: Path) -> None:
    """Every weight may have changed with one record, so K clipped records bound nothing."""
    one = plan_run(
        read_federation(write(tmp_path, privacy={**FROZEN, "encoder": encoder})),
        RunFacts(rows=60, train_rows=42, validation_rows=6, test_rows=12),
    )
    assert isinstance(one.aggregation(), MeanOfRows)
    assert one.cut.slots == 1
    frozen = rounded_plan(tmp_path, clip_norm=1.0)
    assert isinstance(frozen.aggregation(), MeanOfPooledRecords)
    assert frozen.cut.slots == LINKS


MONTHS = ["2024-01-15", "2024-02-15", "2024-03-15"]
DECLARED = {
    "bounds": {f"f{axis}": [-1.0, 1.0] for axis in range(3)}
    | {"since": ["2020-01-01", "2025-01-01"]},
    "categories": {"town": ["east", "west"]},
    "missing_columns": ["f0", "town", "since"],
}


def write_gaps(folder: Path, declared: dict[str, object]) -> Path:
    """Write a federation whose first secondary's table has gaps, words and dates."""
    path = write(folder)
    source = dict(read_federation(path).source)
    frame = pd.read_csv(folder / "bank-1.csv")
    frame["town"] = ["east", "west", None] * (ROWS // 3)
    frame["since"] = MONTHS * (ROWS // 3)
    frame.loc[5, ["f0", "since"]] = None
    frame.to_csv(folder / "bank-1.csv", index=False)
    party = source["party"][1]
    party |= declared
    if "bounds" not in declared:
        party["bounds"] = {f"f{axis}": [-1.0, 1.0] for axis in range(3)}
    return save_federation(folder, source)


def test_a_table_with_gaps_is_released_under_a_promise(tmp_path: Path) -> None:
    """Filled in with the middle of what is declared, so that no row's features rest on others'."""
    with built(write_gaps(tmp_path, DECLARED), tmp_path) as one:
        features = one.secondaries[1].data.features
        assert features[5, :2].tolist() == [0.0, 1.0]  # the middle of the bounds, and the flag
        assert features.abs().max() == 1
        assert features.shape == (ROWS, 3 + 1 + 3 + 6)


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (("missing_columns",), r"'f0': whether values are missing .*missing_columns = \["),
        (("categories",), r"'town': which words there are depends .*categories = \{ town"),
    ],
)
def test_what_the_records_would_decide_must_be_declared(
    left_out: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """Whether there is a gap, and which words there are, tells of single records."""
    declared = {name: value for name, value in DECLARED.items() if name not in left_out}
    path = write_gaps(tmp_path, declared)
    with pytest.raises(PrivacyError, match=message), built(path, tmp_path):
        pass


def test_the_first_day_of_a_table_must_be_declared(tmp_path: Path) -> None:
    """Days are counted from somewhere, and the earliest date is one record's."""
    declared = {name: value for name, value in DECLARED.items() if name != "bounds"}
    path = write_gaps(tmp_path, declared)
    frame = pd.read_csv(tmp_path / "bank-1.csv")
    frame["since"] = frame["since"].fillna(MONTHS[0])
    frame.to_csv(tmp_path / "bank-1.csv", index=False)
    with (
        pytest.raises(PrivacyError, match=r"'since': the earliest date, .*bounds = \{ since = "),
        built(path, tmp_path),
    ):
        pass


def test_under_a_promise_no_median_stands_for_a_missing_value(tmp_path: Path) -> None:
    """A gap in a column without declared bounds is refused before anything is built."""
    path = write_gaps(
        tmp_path, {name: DECLARED[name] for name in ("categories", "missing_columns")}
    )
    with (
        pytest.raises(DataError, match=r"column 'since', row 6: is missing .* declare those of"),
        built(path, tmp_path),
    ):
        pass
