"""A GPU is waited for once a round, and nothing leaves before its checks are read."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.labelled_cuda import CPU, device_of, labelled_cuda, waits
from helpers.labelled_runs import RUNS, run, write
from helpers.secondaries import LINKS, ROWS, WIDTH, LinearBottom, answer, make_secondary

from securevfl.core.devices import DeviceReads, read_together, reads, to_device
from securevfl.core.errors import EncodingRangeError, PrivacyError
from securevfl.core.progress import PretrainingRound, ProgressEvent, RoundDone
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.secondary import Secondary
from securevfl.mpc.codec import RingFormat, quantise

ROUNDS_OF_NETWORKS = [
    name
    for name in RUNS
    if not name.startswith(("class-means", "fet-frozen", "fet-additive", "fet-linear"))
]
"""Runs that train by rounds; the others release each row once, or fit."""


def waits_between(event_type: type, path: Path, out: Path) -> list[Counter[str]]:
    """Return what the host waited for between each two events of one epoch or iteration."""
    seen: list[Counter[str]] = []

    def observe(event: ProgressEvent) -> None:
        if isinstance(event, event_type):
            if event.done > 1:  # type: ignore[attr-defined]
                found.append(waits() - seen[-1])
            seen.append(waits())

    found: list[Counter[str]] = []
    with labelled_cuda():
        run(path, out, device="cuda", observe=observe)
    assert found
    return found


@pytest.mark.parametrize("name", ROUNDS_OF_NETWORKS)
def test_a_training_round_waits_once(name: str, tmp_path: Path) -> None:
    """Both secondaries, the ring, the noise and the loss together, whatever is promised."""
    for one in waits_between(RoundDone, write(tmp_path, RUNS[name]), tmp_path / "run"):
        assert one == {"synchronize": 1}


def test_a_pretraining_round_waits_twice(tmp_path: Path) -> None:
    """For the projections that are sent, and for those that come back."""
    changes = {**RUNS["fedgssl"], "pretraining": {**RUNS["fedgssl"]["pretraining"]}}
    changes["pretraining"]["batch_size"] = 8
    for one in waits_between(PretrainingRound, write(tmp_path, changes), tmp_path / "run"):
        assert one == {"synchronize": 2}


def test_a_check_that_fails_is_raised_when_it_is_read() -> None:
    """At once outside of a block; in one at its end, or before a value is on the host."""
    fmt = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=2)
    with labelled_cuda():
        far = torch.full((2, 3), 1e6, device="cuda")
        with pytest.raises(EncodingRangeError, match="outside the bound"):
            quantise(far, fmt)
        with pytest.raises(EncodingRangeError, match="outside the bound"), read_together():
            quantise(far, fmt)
        with read_together() as known:
            quantise(far, fmt)
            with pytest.raises(EncodingRangeError, match="outside the bound"):
                known.host(torch.ones(1, device="cuda"))
        assert waits() == {"copy": 1, "synchronize": 2}


def raise_after(then: Callable[[torch.Tensor], None]) -> None:
    """Fail with a read that waits."""
    reads().add(torch.ones((), device="cuda"), then)
    raise EncodingRangeError("outside the bound")


def test_blocks_within_blocks_are_one_and_leave_nothing_behind() -> None:
    heard: list[float] = []
    with labelled_cuda():
        with read_together():
            with read_together():
                reads().add(torch.ones((), device="cuda"), lambda one: heard.append(float(one)))
            assert heard == []
        assert heard == [1.0]
        with pytest.raises(EncodingRangeError, match="outside the bound"), read_together():
            raise_after(lambda one: heard.append(float(one)))
        reads().add(torch.zeros((), device="cuda"), lambda one: heard.append(float(one)))
    assert heard == [1.0, 0.0]


def test_what_is_copied_without_a_wait_is_there_after_it() -> None:
    """Both ways, and the values are those of the device."""
    with labelled_cuda():
        there = to_device(np.arange(4.0), torch.device("cuda"))
        assert waits() == {}
        early = there.to("cpu", non_blocking=True)
        assert not np.array_equal(early.numpy(), np.arange(4.0)), (
            "the stand-in shows a missing wait"
        )
        (here,) = DeviceReads().host(there * 2)
        assert device_of(here) == CPU
        assert np.array_equal(here.numpy(), 2 * np.arange(4.0))


def secondary_on_the_device(change: Callable[[torch.Tensor], None]) -> Secondary:
    """Return a secondary on the device, with a change to its bottom model's weights."""
    secondary = make_secondary(device="cuda")
    with torch.no_grad():
        for weight in secondary.bottom.parameters():
            change(weight)
    return secondary


def words_of(secondary: Secondary, due: RoundPlan) -> torch.Tensor:
    """Return what the secondary sends."""
    with read_together() as known:
        (words,) = known.host(answer(secondary, due))
    return words


def plan(number: int) -> RoundPlan:
    rows = np.arange(ROWS, dtype=np.int64)
    return RoundPlan(round_number=number, rows=rows, active=(1, 2), purpose="train")


def test_nothing_leaves_a_secondary_that_has_diverged() -> None:
    with labelled_cuda():
        secondary = secondary_on_the_device(lambda weight: weight.fill_(torch.nan))
        with pytest.raises(PrivacyError, match="round 1: the representation is not finite"):
            words_of(secondary, plan(1))


def test_a_step_that_diverged_is_found_before_the_next_round_leaves() -> None:
    """The step itself waits for nothing."""
    with labelled_cuda():
        secondary = secondary_on_the_device(lambda weight: weight.fill_(1e-3))
        answer(secondary, plan(1))
        before = waits()
        secondary.learn(plan(1), torch.full((ROWS, LINKS, WIDTH), 3e38))
        assert waits() == before
        with pytest.raises(PrivacyError, match="round 1: the bottom model's gradient is not"):
            words_of(secondary, plan(2))


class InHalfPrecision(LinearBottom):
    """Computes as a model does under torch.autocast."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(*inputs)


def test_a_model_in_half_precision_is_clipped_and_encoded_in_single() -> None:
    """It learns as one in single precision does, up to its own rounding."""
    torch.manual_seed(0)
    whole = LinearBottom(0.0)
    half = InHalfPrecision(0.0)
    half.load_state_dict(whole.state_dict())
    parties = [make_secondary(bottom=one) for one in (whole, half)]
    sent = [answer(party, plan(1)) for party in parties]
    assert not torch.equal(*sent), "half precision rounds"
    gradient = torch.ones(ROWS, LINKS, WIDTH)
    for party in parties:
        party.learn(plan(1), gradient)
    for one, other in zip(whole.parameters(), half.parameters(), strict=True):
        assert other.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
