"""What torchrun starts in a test: rows over two processes, beside the same rows in one."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from securevfl.federation.rounds.party_workers import OwnRecords, PartyWorkers, WorkerGroup
from securevfl.federation.rounds.updates import DropoutStream, GradientNoise
from securevfl.launch.torchrun import started
from securevfl.models.fet.fet_bottom import FeTBottom
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.optimisers import build_optimizer
from securevfl.runtime.launching import help_party, leave_at_once, own_processes

RECORDS, LINKS, FEATURES = 30, 4, 3
CPU = torch.device("cpu")


def records() -> OwnRecords:
    torch.manual_seed(1)
    config = FeTConfig(
        neighbours=LINKS, hidden=8, heads=2, fourier_features=8, fourier_width=8, dropout=0.0
    )
    features = torch.randn(RECORDS, FEATURES)
    features[5] = torch.nan
    return OwnRecords(
        bottom=FeTBottom(config, num_features=FEATURES, key_dim=2).train(),
        features=features,
        keys=torch.randn(RECORDS, 2),
        row_by_row=False,
        apart=True,
    )


def links(rows: int) -> tuple[Tensor, Tensor]:
    drawn = np.random.default_rng(rows)
    index = torch.from_numpy(drawn.integers(6, RECORDS, (rows, LINKS)))
    return index, torch.from_numpy(drawn.random((rows, LINKS)) < 0.8)


def gradients(
    own: OwnRecords, compute: Callable[..., Tensor], given: tuple[Tensor, Tensor]
) -> list[Tensor]:
    own.bottom.zero_grad()
    out = compute(*given)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out.detach()] + [one.grad for one in own.bottom.parameters() if one.grad is not None]


def compare(group: WorkerGroup) -> None:
    own, noise = records(), GradientNoise(clip_norm=0.1, noise_std=1.0)
    stream = DropoutStream(0, "bank", device=CPU)
    spread = PartyWorkers(group, own, stream=stream, device=CPU, noise=noise, clip_norm=1.0)
    optimizer = build_optimizer("adamw", own.bottom.parameters(), learning_rate=0.1)
    for rows in (7, 8, 1, 7):
        given = links(rows)
        here, there = gradients(own, own, given), gradients(own, spread, given)
        assert len(here) == len(there) > 10
        for one, other in zip(here, there, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(own(*given), spread(*given), rtol=1e-5, atol=1e-6)
        # The others must hear of what it changes.
        optimizer.step()

    index, present = links(7)
    index[4, 0], present[4] = 5, True
    wanted = torch.linspace(-1, 1, 7 * LINKS * 8).view(7, LINKS, 8)
    alone = own.taught(index, present, clip_norm=1.0, units=noise, stream=stream)
    total, lost = alone.total(wanted), noise.not_finite
    assert lost == 1, lost
    released = spread.represent_privately(index, present)
    torch.testing.assert_close(alone.represent(), released, equal_nan=True)
    found = spread.private_gradients(wanted)
    # Rows are clipped and rounded one by one: what differs is the order of float32 within a row.
    assert (found - total).abs().max() <= 7, (found - total).abs().max()
    assert torch.equal(found, found.round())
    assert total.abs().max() > 10_000
    assert noise.not_finite == 2 * lost
    Path(sys.argv[1], "compared").touch()


if __name__ == "__main__":
    assert started() is not None
    with own_processes(Path(sys.argv[1]), device=CPU) as whole:
        assert whole is not None
        if whole.rank:
            help_party(whole, device=CPU)
        else:
            compare(whole)
    leave_at_once()
