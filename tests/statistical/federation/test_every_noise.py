"""Every noise and every secret sample of secondaries that are built the way a run builds them.

What comes out is compared with what the ledger on the disk was charged, and with the formulas of
docs/privacy.md: the deviation of releases, of updates and of both fittings; the rate of samples,
and that each is fresh; and that two builds from one federation file, so from one seed, share none
of it. A comparison alarms falsely with probability at most 1e-11, the less than 100 of them all
together with 1e-9. Every check is also seen to raise its alarm on a build that was altered.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.alarms import QUANTILE, Alarm, Sample, require_new, require_noise, require_samples
from helpers.altered_builds import (
    LargerSample,
    LessOfReleases,
    LessOfUpdates,
    NinthBlockTwice,
    OneSample,
    PublicNoise,
    PublicSample,
    half_of_moments,
)
from helpers.built import Built, built, write_tables
from helpers.secondaries import answer
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from securevfl.federation import build, encoder_fitting
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import Purpose
from securevfl.linkage import sampling

CLIP, UPDATE_CLIP, UPDATE_NOISE, CAP, LINKS, PARTIES = 1.5, 0.5, 1.6, 2, 4, 2

pytestmark = pytest.mark.statistical

POOLED = {"release": "pooled", "neighbours": LINKS, "hidden": 8, "heads": 2, "dropout": 0.0}
SEQUENCE = {**POOLED, "release": "sequence"}
FEW_NUMBERS = {**POOLED, "hidden": 4, "top": "additive"}
FROZEN = {
    "noise_multiplier": 1.0,
    "delta": 1e-6,
    "encoder": "frozen",
    "unit": "secondary-record",
    "links_per_record": CAP,
    "clip_norm": CLIP,
}
DP_TRAINED = {
    **FROZEN,
    "encoder": "dp-trained",
    "gradient_clip_norm": UPDATE_CLIP,
    "gradient_noise_multiplier": UPDATE_NOISE,
}
SILENT = {"mechanism": "none", "encoder": "frozen", "links_per_record": CAP}


@contextmanager
def twins(path: Path) -> Iterator[tuple[Built, Built]]:
    """Two builds from one federation file."""
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(built(path, path.parent / name)) for name in ("first", "second")
        )
        yield first, second


def opposites(count: int, width: int) -> np.ndarray:
    """Return records in [-1, 1], each with its opposite beside it: they add up to zero."""
    half = np.random.default_rng(5).uniform(-1, 1, (count // 2, width))
    return np.stack([half, -half], axis=1).reshape(count, width)


def numbered(count: int) -> np.ndarray:
    """Return records that rise in their first feature."""
    rest = np.random.default_rng(3).uniform(-1, 1, (count, 2))
    return np.column_stack([np.linspace(-1, 1, count), rest])


def records_seen(secondary: Secondary, ask: Callable[[], object]) -> Sample:
    """Return which :func:`numbered` records the bottom model is given."""
    seen: list[Tensor] = []

    def look(_module: object, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        features, _, present = inputs
        seen.append(features[present][:, 0])

    hook = secondary.bottom.register_forward_pre_hook(look)
    try:
        ask()
    finally:
        hook.remove()
    own = secondary.data.features[:, 0].contiguous()
    found = np.zeros(len(own), dtype=bool)
    found[torch.searchsorted(own, torch.cat(seen)).numpy()] = True
    return found


def multiplier_charged(one: Built, rank: int) -> float:
    """Return the noise multiplier of a fitting, as the ledger has it."""
    (fit,) = [line for line in one.booked(rank) if line["kind"] == "fit"]
    return fit["noise_multiplier"]


def check_releases(
    folder: Path, *, expected: float, purpose: Purpose = "release", **sections: dict[str, Any]
) -> None:
    """What leaves two builds in one round differs by the noise of both, and by nothing else."""
    training = {"epochs": 1, "batch_size": 600}
    path = write_tables(folder, opposites(600, 3), training=training, **sections)
    with twins(path) as both:
        found = []
        for one in both:
            rows = np.arange(600) if purpose == "release" else one.split.train
            found.append(one.answer(one.round(1, rows, purpose)))
            for rank in one.secondaries:
                assert one.booked(rank)[0]["noise_share_std"] == pytest.approx(expected)
    noise = found[0] - found[1]
    for party in noise:
        require_noise(party.flatten(1), math.sqrt(2) * expected)
    require_noise(noise[0] - noise[1], 2 * expected)


def check_rows_that_choose(folder: Path) -> None:
    """One record moves m pooled rows by 2 C / K."""
    expected = 2 * CLIP / LINKS * math.sqrt(CAP / PARTIES)
    check_releases(folder, expected=expected, model=POOLED, privacy=FROZEN)


def check_records_that_choose(folder: Path) -> None:
    """By half of that, and by the rounding of sums that are drawn back."""
    rounding = math.sqrt(POOLED["hidden"]) * 2.0**-10 / LINKS
    expected = (CLIP / LINKS + rounding) * math.sqrt(CAP / PARTIES)
    choose = {"choose": "records"}
    check_releases(folder, expected=expected, model=POOLED, privacy=FROZEN, linkage=choose)


def check_rows_of_a_round(folder: Path) -> None:
    """Where encoders learn, one record moves m rows of a round by 2 C."""
    expected = 2 * CLIP * math.sqrt(CAP / PARTIES)
    check_releases(folder, expected=expected, model=SEQUENCE, privacy=DP_TRAINED, purpose="train")


@contextmanager
def gradients_of_steps() -> Iterator[list[Tensor]]:
    """Collect the gradient that any optimizer is given in each of its steps, as one vector."""
    seen: list[Tensor] = []

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        seen.append(torch.cat([weight.grad.flatten().double() for weight in weights]))

    hook = register_optimizer_step_pre_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


def check_updates(folder: Path) -> None:
    """A gradient of zero teaches nothing: what the optimizer gets is noise."""
    training = {"epochs": 2, "batch_size": 120}
    path = write_tables(
        folder, opposites(120, 3), model=SEQUENCE, privacy=DP_TRAINED, training=training
    )
    expected = UPDATE_NOISE * 2 * UPDATE_CLIP * CAP
    found = []
    with twins(path) as both:
        for one in both:
            rows = one.split.train
            for epoch in (1, 2):
                plan = one.round(2 * epoch, rows, "train")
                for secondary in one.secondaries.values():
                    answer(secondary, plan)
                    with gradients_of_steps() as steps:
                        secondary.learn(plan, torch.zeros(len(rows), *one.plan.cut.shape))
                    found += [step * len(rows) for step in steps]
                one.end_epoch(epoch, number=2 * epoch + 1)
    noise = torch.stack(found)
    assert len(noise) == 8
    require_noise(noise, expected)
    require_noise(noise[:4] - noise[4:], math.sqrt(2) * expected)


def check_moments(folder: Path) -> None:
    """Records add up to zero, so the mean that an encoder is fitted to is noise."""
    count, width = 1200, 240
    path = write_tables(
        folder,
        opposites(count, width),
        model=FEW_NUMBERS,
        encoder={"method": "principal", "share": 0.1},
        privacy=FROZEN,
        training={"epochs": 1, "batch_size": count},
    )
    # A share of 1/z^2. One record changes u u^T by 5/4 R^2 for u = (R/2, x); an entry beside the
    # diagonal gets 1/sqrt(2) of the noise for that; and the mean is the sum over R/2 a record.
    multiplier, radius = math.sqrt(0.9 / 0.1), math.sqrt(width)
    expected = multiplier * 1.25 * radius**2 / math.sqrt(2) / (radius / 2 * count)
    # The number of records, by which the mean divides, has noise as well.
    slack = QUANTILE * 5 * multiplier / count
    found = []
    with twins(path) as both:
        for one in both:
            for rank, secondary in one.secondaries.items():
                answer(secondary, one.passed()[0])
                assert multiplier_charged(one, rank) == pytest.approx(multiplier)
                found.append(secondary.bottom.encode.centre)
    noise = torch.stack(found)
    require_noise(noise.flatten(), expected, slack=slack)
    require_noise((noise[:2] - noise[2:]).flatten(), math.sqrt(2) * expected, slack=slack)


def check_samples_of_rounds(folder: Path) -> None:
    """Every training round of an encoder that learns is over a secret sample of its own.

    A sampled record picks the row at its own place and is its nearest, so the model sees it.
    """
    epochs, rate = 6, 0.3
    path = write_tables(
        folder,
        numbered(300),
        model=SEQUENCE,
        privacy={**DP_TRAINED, "sampling_rate": rate},
        training={"epochs": epochs, "batch_size": 300},
    )
    with twins(path) as both:
        drawn: dict[int, list[list[Sample]]] = {rank: [] for rank in both[0].secondaries}
        for one in both:
            rows = one.split.train
            for samples in drawn.values():
                samples.append([])
            for epoch in range(1, epochs + 1):
                plan = one.round(2 * epoch, rows, "train")
                for rank, secondary in one.secondaries.items():
                    seen = records_seen(secondary, partial(answer, secondary, plan))
                    secondary.learn(plan, torch.zeros(len(rows), *one.plan.cut.shape))
                    drawn[rank][-1].append(seen[rows])
                one.end_epoch(epoch, number=2 * epoch + 1)
        for samples in drawn.values():
            require_samples(*samples, rate)


def check_samples_of_passes(folder: Path, choose: str) -> None:
    """The one pass of a frozen encoder is over one secret sample, another one in each build."""
    rate = 0.3
    path = write_tables(
        folder,
        numbered(300),
        model=POOLED,
        linkage={"choose": choose},
        privacy={**FROZEN, "sampling_rate": rate},
        training={"epochs": 1, "batch_size": 100},
    )
    with twins(path) as both:
        samples = []
        for one in both:
            for secondary in one.secondaries.values():
                passed = one.passed()
                samples.append(
                    records_seen(secondary, lambda: [answer(secondary, plan) for plan in passed])  # noqa: B023
                )
        require_samples(samples[:2], samples[2:], rate)


def check_sample_where_rows_choose(folder: Path) -> None:
    """Of the nearest records of each row."""
    check_samples_of_passes(folder, "rows")


def check_sample_where_records_choose(folder: Path) -> None:
    """Of all records that picked a row."""
    check_samples_of_passes(folder, "records")


def check_blocks(folder: Path) -> None:
    """Two million numbers, in requests alike and unlike: no part of a block comes twice."""
    training = {"epochs": 1, "batch_size": 60}
    path = write_tables(folder, opposites(60, 3), model=POOLED, privacy=FROZEN, training=training)
    shapes = [(512, 1, 8)] * 40 + [(128, 1, 16), (512, 1, 8)] * 10 + [(48,)] * 40
    with built(path, folder / "run") as one:
        blocks = [
            secondary.contribution.noise.sample(shape).flatten().numpy()
            for secondary in one.secondaries.values()
            for shape in shapes * 5
        ]
    assert sum(map(len, blocks)) > 2_000_000
    require_new(blocks)


CHECKS = [
    check_rows_that_choose,
    check_records_that_choose,
    check_rows_of_a_round,
    check_updates,
    check_moments,
    check_samples_of_rounds,
    check_sample_where_rows_choose,
    check_sample_where_records_choose,
    check_blocks,
]


def name_of(one: Any) -> str:
    """Return what a parameter is called in the name of a test."""
    return one if isinstance(one, str) else one.__name__.rpartition(".")[2]


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_what_a_run_builds_keeps_its_promise(check: Callable[[Path], None], tmp_path: Path) -> None:
    """All together fail by chance once in 1e9 at most."""
    check(tmp_path)


@pytest.mark.parametrize(
    ("module", "altered", "check", "alarm"),
    [
        (build, {"ExactDiscreteGaussian": PublicNoise}, check_rows_that_choose, "size"),
        (build, {"ExactDiscreteGaussian": PublicNoise}, check_rows_of_a_round, "size"),
        (build, {"ExactDiscreteGaussian": LessOfReleases}, check_rows_that_choose, "size"),
        (build, {"ExactDiscreteGaussian": LessOfReleases}, check_records_that_choose, "size"),
        (build, {"GradientNoise": LessOfUpdates}, check_updates, "size"),
        (build, {"NoiseBuffer": NinthBlockTwice}, check_blocks, "twice"),
        (encoder_fitting, {"noised_moments": half_of_moments}, check_moments, "size"),
        (sampling, {"PoissonSampler": OneSample}, check_samples_of_rounds, "fresh"),
        (sampling, {"PoissonSampler": PublicSample}, check_samples_of_rounds, "fresh"),
        (sampling, {"PoissonSampler": LargerSample}, check_samples_of_rounds, "rate"),
        (sampling, {"PoissonSampler": PublicSample}, check_sample_where_rows_choose, "fresh"),
        (sampling, {"PoissonSampler": PublicSample}, check_sample_where_records_choose, "fresh"),
        (sampling, {"PoissonSampler": LargerSample}, check_sample_where_records_choose, "rate"),
    ],
    ids=lambda one: "-".join(map(name_of, one.values())) if isinstance(one, dict) else name_of(one),
)
def test_an_altered_build_is_noticed(
    module: Any,
    altered: dict[str, Any],
    check: Callable[[Path], None],
    alarm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the alarm that is there for it; missed by chance less than once in 1e9.

    The nearest misses: twice the rate of 600 draws is eight deviations beyond the limit, four
    fifths of the noise on 4,800 numbers seventeen.
    """
    for name, part in altered.items():
        monkeypatch.setattr(module, name, part)
    with pytest.raises(Alarm, match=alarm):
        check(tmp_path)
