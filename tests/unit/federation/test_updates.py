"""Updates that are noised releases: what one row teaches, how much of it, and with which noise."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers.alarms import require_noise
from helpers.secondaries import answer, make_secondary
from torch import Tensor, nn

from securevfl.dp.clipping import clip_rows
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds import updates
from securevfl.federation.rounds.updates import (
    DropoutStream,
    GradientNoise,
    LinkedRecords,
    PrivateBackwardStep,
    RowGradients,
)
from securevfl.linkage.links import LinkTable
from securevfl.models.fet.family import FeTBottom
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.registry import FAMILIES

ROWS, LINKS, FEATURES = 13, 4, 3


class NoNoise:
    """Adds nothing, so that the rest can be seen."""

    def __init__(self, std_units: float) -> None:
        self.std_units = std_units

    def sample(self, shape, device="cpu") -> Tensor:
        return torch.zeros(tuple(shape), dtype=torch.int32, device=device)


def quiet(clip_norm: float) -> GradientNoise:
    return GradientNoise(clip_norm=clip_norm, noise_std=2.0**-6, sampler=NoNoise)


def linked(seed: int = 1, rows: int = ROWS) -> LinkedRecords:
    """Return links of which some are absent, one row's all."""
    torch.manual_seed(seed)
    present = torch.rand(rows, LINKS) > 0.3
    present[2] = False
    return LinkedRecords(
        features=torch.randn(rows, LINKS, FEATURES),
        keys=torch.randn(rows, LINKS, 2),
        present=present,
    )


def bottom_of(release: str, dropout: float) -> FeTBottom:
    config = FeTConfig(
        neighbours=LINKS, hidden=8, heads=2, fourier_features=8, fourier_width=8,
        release=release, dropout=dropout,
    )  # fmt: skip
    torch.manual_seed(5)
    return FeTBottom(config, num_features=FEATURES, key_dim=2)


def stream(seed: int = 0) -> DropoutStream:
    return DropoutStream(seed, "bank", device=torch.device("cpu"))


def taught(bottom: nn.Module, links: LinkedRecords, wanted: Tensor, *, clip: float) -> Tensor:
    """Return what a lesson sets as gradient, without noise, in one vector."""
    noise = quiet(clip)
    rows = RowGradients(bottom, links, forward=bottom, clip_norm=1.0, noise=noise, stream=stream())
    lesson = PrivateBackwardStep(bottom, rows.total, noise=noise)
    lesson.gradients_from(wanted)
    return torch.cat([parameter.grad.flatten() for parameter in bottom.parameters()])


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("release", ["sequence", "pooled"])
def test_without_clip_and_noise_a_lesson_is_the_plain_gradient(
    release: str, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, absent links and in pieces: the units that the release drops drop here too."""
    bottom, links = bottom_of(release, 0.3).train(), linked()
    numbers = sum(value.numel() for value in bottom.parameters())
    monkeypatch.setattr(updates, "_MOST_NUMBERS", numbers * math.ceil(ROWS / pieces))
    wanted = torch.randn(ROWS, LINKS if release == "sequence" else 1, 8) / ROWS
    ours = taught(bottom, links, wanted, clip=1e4)
    bottom.zero_grad()
    rows = updates.rows_at_a_time(bottom)
    assert len(links.pieces(rows)) == pieces
    with stream().active():
        out = torch.cat([bottom(p.features, p.keys, p.present) for p in links.pieces(rows)])
    clip_rows(out, 1.0).backward(wanted)
    plain = torch.cat([parameter.grad.flatten() for parameter in bottom.parameters()])

    assert float(plain.norm()) > 1e-2
    assert torch.allclose(ours, plain, atol=1e-6 + 1e-5 * float(plain.abs().max()))


@pytest.mark.parametrize(
    "name",
    [name for name, one in FAMILIES.items() if not one.pretraining and name != "class-means"],
)
def test_every_family_can_be_taught_row_by_row(name: str) -> None:
    """Nothing in a bottom model may depend on which links there are, or pool behind the clip."""
    family = FAMILIES[name]
    config = family.settings_class()
    torch.manual_seed(3)
    bottom = family.build_bottom(config, num_features=FEATURES, key_dim=2).train()
    if any(isinstance(layer, nn.modules.batchnorm._NormBase) for layer in bottom.modules()):
        pytest.skip("its default has BatchNorm, which is refused")
    links = LinkedRecords(
        features=torch.randn(5, config.neighbours, FEATURES),
        keys=torch.randn(5, config.neighbours, 2),
        present=torch.rand(5, config.neighbours) > 0.2,
    )
    wanted = torch.randn(5, *family.cut_shape(config)) / 5
    ours = taught(bottom, links, wanted, clip=1e5)
    bottom.zero_grad()
    with stream().active():
        out = bottom(links.features, links.keys, links.present)
    clip_rows(out, 1.0).backward(wanted)
    plain = torch.cat([parameter.grad.flatten() for parameter in bottom.parameters()])

    assert not family.pools_records(config, frozen=False)
    assert torch.allclose(ours, plain, atol=1e-5 * float(plain.abs().max()))


def test_each_row_is_clipped_by_itself() -> None:
    """A lesson is the mean of rows' own gradients, each drawn back to the clip norm."""
    bottom, links = bottom_of("pooled", 0.0).train(), linked()
    wanted = torch.randn(ROWS, 1, 8)
    alone = [
        taught(bottom, piece, wanted[row : row + 1], clip=1e4)
        for row, piece in enumerate(links.pieces(1))
    ]
    # A batch of one row has the gradient of that row's own loss, not of a thirteenth of it.
    lengths = torch.stack([one.norm() for one in alone])
    clip = float(lengths[lengths > 0].median())
    expected = sum(one * min(1.0, clip / max(float(one.norm()), 1e-9)) for one in alone)

    together = taught(bottom, links, wanted / ROWS, clip=clip)
    assert torch.allclose(together, expected / ROWS, atol=1e-4)
    assert float(together.norm()) <= clip


def test_a_row_without_links_teaches_nothing() -> None:
    """Its release is zero whatever the weights are."""
    bottom = bottom_of("pooled", 0.0).train()
    piece = linked().pieces(1)[2]

    assert not taught(bottom, piece, torch.ones(1, 1, 8), clip=1.0).any()


@pytest.mark.parametrize(("count", "width"), [(200, 77), (21, 50_000)])
def test_sums_are_whole_units_and_never_longer_than_their_rows(count: int, width: int) -> None:
    """Rounding is towards zero, row by row: what clipping bounds stays bounded, exactly.

    Rows of the longer sort are clipped and added two at a time.
    """
    noise = quiet(0.5)
    rows = torch.randn(count, width) * torch.logspace(-3, 3, count)[:, None]
    single = torch.stack([noise.units(row[None]) for row in rows])
    limit = 0.5 / noise.granularity

    assert torch.equal(single, single.trunc())
    assert float(single.norm(dim=1).max()) <= limit
    assert torch.equal(noise.units(rows), single.sum(dim=0))
    for worst in (torch.nan, torch.inf):
        spoiled = torch.cat([rows, torch.full((1, width), worst)])
        assert torch.equal(noise.units(spoiled), noise.units(rows))
    assert noise.not_finite == 2


@pytest.mark.statistical
@pytest.mark.parametrize("noise_std", [1e-3, 0.7, 1.0, 300.0])
def test_noise_is_what_was_asked_for_and_new_each_time(noise_std: float) -> None:
    """20,000 coordinates of two updates that share nothing; each comparison errs once in 1e11."""
    noise = GradientNoise(clip_norm=1.0, noise_std=noise_std)
    total = torch.arange(20_000, dtype=torch.float64)
    one, two = (noise.add_noise(total).double() - total * noise.granularity for _ in range(2))

    require_noise(one, noise_std)
    # Their difference would be smaller, or larger, if they were related.
    require_noise(one - two, math.sqrt(2) * noise_std)
    assert 2**20 <= noise_std / noise.granularity < 2**21


def test_a_round_releases_and_learns_from_one_sample() -> None:
    """A fresh sample for the update would be a second release; links are asked for once a round."""

    class Counting:
        def __init__(self) -> None:
            self.asked = 0

        def link(self, rows: np.ndarray) -> LinkTable:
            self.asked += 1
            shape = (len(rows), 3)
            return LinkTable(indices=np.full(shape, self.asked), distances=np.ones(shape))

    secondary = make_secondary()
    secondary.gradient_noise = quiet(1.0)
    links = Counting()
    secondary.data = dataclasses.replace(secondary.data, links=links)
    plan = RoundPlan(round_number=1, rows=np.arange(5), active=(1, 2), purpose="train")
    before = secondary.weights()
    answer(secondary, plan)
    secondary.learn(plan, torch.ones(5, 3, 4))

    assert links.asked == 1
    assert not torch.equal(before["positions.weight"], secondary.weights()["positions.weight"])
    # The only record that was linked is the first sample's: each coordinate of the gradient is
    # proportional to its features.
    moved = secondary.weights()["positions.weight"] - before["positions.weight"]
    record = secondary.data.features[1]
    cross = moved[:, 0] * record[1] - moved[:, 1] * record[0]
    assert float(cross.abs().max()) < 1e-5
