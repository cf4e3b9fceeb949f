"""Every record removed in turn: no release and no update moves further than it is charged for.

The running classes are used: linkage under the record-side cap, the bottom model, the clips, and
the integers that noise is added to. Weights and the primary's gradient are held, as accounting
does when it composes rounds one by one.
"""

import math

import numpy as np
import pytest
import torch
from helpers.linking import round_linker
from torch import nn

from securevfl.dp.clipping import clip_rows
from securevfl.dp.events import Unit
from securevfl.dp.sensitivity import gradient_sensitivity, sum_sensitivity
from securevfl.federation.rounds.updates import (
    DropoutStream,
    GradientNoise,
    LinkedRecords,
    PrivateBackwardStep,
    RowGradients,
)
from securevfl.linkage.sampling import RoundLinker
from securevfl.models.fet.family import FeTBottom
from securevfl.models.fet.settings import FeTConfig
from securevfl.mpc.codec import RingFormat, quantise

ROWS, RECORDS, CLIP, GRADIENT_CLIP = 9, 6, 0.5, 0.25
RING = RingFormat.choose(clip_norm=CLIP, noise_share_std=0.0, parties=2)


class Kept:
    """No noise: the units themselves."""

    def __init__(self, std_units: float) -> None:
        self.std_units = std_units

    def sample(self, shape, device="cpu") -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=torch.int32, device=device)


NOISE = GradientNoise(clip_norm=GRADIENT_CLIP, noise_std=1.0, sampler=Kept)


def federation(seed: int):
    random = np.random.default_rng(seed)
    keys = random.uniform(0, 3, (ROWS, 1)), random.uniform(0, 3, (RECORDS, 1))
    return *keys, torch.from_numpy(random.normal(size=(RECORDS, 3)) * 3).float()


def bottom_of(release: str, links: int) -> nn.Module:
    config = FeTConfig(
        neighbours=links, hidden=4, heads=1, fourier_features=4, fourier_width=4,
        release=release, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(2)
    return FeTBottom(config, num_features=3, key_dim=1).train()


def answer(bottom: nn.Module, linker: RoundLinker, features, keys, batch, wanted, present):
    """Return a round's released units and its update's units, of the records that are present."""
    index = torch.from_numpy(linker.link(batch, present).indices)
    there = index >= 0
    index = index.clamp_min(0)
    records = LinkedRecords(features=features[index], keys=keys[index], present=there)
    rows = RowGradients(
        bottom,
        records,
        forward=bottom,
        clip_norm=CLIP,
        noise=NOISE,
        stream=DropoutStream(0, "bank", device=torch.device("cpu")),
    )
    lesson = PrivateBackwardStep(bottom, rows.total, noise=NOISE)
    with torch.no_grad():
        released = quantise(clip_rows(bottom(*_inputs(records)), CLIP), RING).double()
    lesson.gradients_from(wanted)
    update = torch.cat([one.grad.flatten() for one in bottom.parameters()]).double() * len(batch)
    return released.flatten(1) * RING.granularity, update


def _inputs(records: LinkedRecords):
    return records.features, records.keys, records.present


@pytest.mark.parametrize("release", ["sequence", "pooled"])
@pytest.mark.parametrize(("cap", "links"), [(1, 1), (3, 2), (9, 3)])
def test_no_removal_moves_a_round_further_than_it_is_charged(
    cap: int, links: int, release: str
) -> None:
    """Rows touched, the released rows together, and the one vector of the update."""
    batch = np.arange(0, ROWS, 2) if cap < ROWS else np.arange(ROWS)
    shape = (len(batch), links if release == "sequence" else 1, 4)
    bottom = bottom_of(release, links)
    rows, records, features = federation(cap)
    keys = torch.from_numpy(records).float()
    torch.manual_seed(cap)
    wanted = torch.randn(shape) * 5
    linker = round_linker(rows, records, links, rate=1.0, cap=cap)
    everyone = np.ones(RECORDS, dtype=bool)
    whole = answer(bottom, linker, features, keys, batch, wanted, everyone)
    for out in range(RECORDS):
        rest = everyone.copy()
        rest[out] = False
        part = answer(bottom, linker, features, keys, batch, wanted, rest)
        moved = (whole[0] - part[0]).norm(dim=1)
        touched = int((moved > 0).sum())
        most = min(cap, len(batch))

        assert touched <= most
        assert float(moved.norm()) <= sum_sensitivity(
            clip_norm=CLIP,
            active=1,
            unit=Unit.SECONDARY_RECORD,
            links_per_record=cap,
            rows=len(batch),
        )
        # Float32 carries the units here; they are exact to 2^-24 of their length.
        assert float((whole[1] - part[1]).norm()) <= gradient_sensitivity(
            clip_norm=GRADIENT_CLIP, unit=Unit.SECONDARY_RECORD, rows=most
        ) * (1 + 1e-6)


class Plaintext(nn.Module):
    """Releases its one weight vector, with a sign that the nearest record decides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.1, 0.2]))

    def forward(self, features, keys, present):
        del keys
        return self.weight * features[:, :1, :1] * present[:, :1, None]


def test_updates_add_up_over_rows_and_releases_do_not() -> None:
    """Negative control: sqrt(m) would undercount. One record turns m gradients around together."""
    cap = 9
    rows, keys = np.zeros((cap, 1)), np.array([[0.0], [1.0]])
    features = torch.tensor([[1.0], [-1.0]])
    linker = round_linker(rows, keys, 1, rate=1.0, cap=cap)
    wanted = torch.full((cap, 1, 2), 100.0)
    batch = np.arange(cap)
    both, without = (
        answer(
            Plaintext(), linker, features, torch.zeros(2, 1), batch, wanted, np.array([first, True])
        )
        for first in (True, False)
    )
    gradient = float((both[1] - without[1]).norm())
    released = float((both[0] - without[0]).norm())

    charged = gradient_sensitivity(clip_norm=GRADIENT_CLIP, unit=Unit.SECONDARY_RECORD, rows=cap)
    assert 0.999 * charged < gradient <= charged * (1 + 1e-6)
    assert gradient > 2.9 * 2 * GRADIENT_CLIP * math.sqrt(cap)
    assert released <= 2 * CLIP * math.sqrt(cap)
