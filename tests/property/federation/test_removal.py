"""One record taken away, on every path to a release: no release moves further than its plan says.

Secondaries are built as runs build them (:mod:`helpers.removal`): tables read, features scaled,
keys linked, samples drawn, encoders made and fitted. What is compared are whole numbers before
noise, and the bounds are the plan's own.
"""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.removal import World, world
from helpers.secondaries import AnyRound

from securevfl.dp.events import Unit
from securevfl.dp.sensitivity import gradient_sensitivity
from securevfl.mpc.codec import COARSEST_STEP
from securevfl.testing import save_federation, write_federation

ROWS = 60
CAP = 3
GONE = (0, 17, 31, ROWS - 1)
PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-4, "encoder": "frozen", "links_per_record": CAP}
POOLED = {"release": "pooled"}
DIRECTIONS = {**POOLED, "hidden": 4, "top": "additive"}
RECORDS_CHOOSE = {"choose": "records"}

FROZEN: dict[str, dict[str, Any]] = {
    "rows side by side": {},
    "pooled": {"model": POOLED},
    "pooled cosines and keys": {
        "model": {**POOLED, "frozen_map": "fourier", "keys_as_features": True}
    },
    "records choose": {"model": POOLED, "linkage": RECORDS_CHOOSE},
    "sampled once": {"model": POOLED, "privacy": {**PRIVACY, "sampling_rate": 0.5}},
    "records choose, sampled once": {
        "model": POOLED,
        "privacy": {**PRIVACY, "sampling_rate": 0.5},
        "linkage": RECORDS_CHOOSE,
    },
    "random directions": {"model": DIRECTIONS, "encoder": {"method": "random"}},
    "principal directions": {
        "model": DIRECTIONS,
        "encoder": {"method": "principal", "share": 0.3},
        "linkage": RECORDS_CHOOSE,
    },
    "average of links": {"model": {"family": "avgsim", "neighbours": 4, "hidden": 8}},
}


def write(folder: Path, **sections: Any) -> Path:
    """Write a federation whose secondaries declare their bounds."""
    sections = {"privacy": PRIVACY, "training": {"batch_size": 16}, **sections}
    path = write_federation(folder, rows=ROWS, **sections)
    source = tomllib.loads(path.read_text())
    for party in source["party"][1:]:
        # Narrow enough that some values lie outside, and are drawn back.
        party |= {"scaling": "bounds", "bounds": [-1.5, 1.5]}
    return save_federation(folder, source)


def require_within(whole: torch.Tensor, part: torch.Tensor, of: World) -> float:
    """Check that at most m rows moved, none by more than the plan says; return the furthest."""
    moved = torch.linalg.vector_norm(whole - part, dim=1)
    assert int((moved > 0).sum()) <= CAP
    assert float(moved.max()) <= of.row_bound
    return float(moved.max()) / of.row_bound


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_pass(name: str, tmp_path: Path) -> None:
    """Rows that a record did not touch are the same numbers; the others keep to the bound."""
    path = write(tmp_path, **FROZEN[name])
    there = world(path)
    whole = there.release_all()
    furthest = 0.0
    for gone in GONE:
        without = world(path, gone=gone, before=there)
        part = without.release_all()
        furthest = max(furthest, require_within(whole, part, there))
        rest = np.delete(there.secondary.data.features.numpy(), gone, axis=0)
        assert np.array_equal(rest, without.secondary.data.features.numpy())
        assert all(change <= 1 + 1e-9 for change in there.said.changes(without.said))
    assert furthest > 0.1, "the records that were taken away had some effect"


def test_a_record_that_was_not_sampled_changes_nothing(tmp_path: Path) -> None:
    """Not one number of the pass, whoever else was in the one secret sample."""
    rate = 0.5
    path = write(tmp_path, model=POOLED, privacy={**PRIVACY, "sampling_rate": rate})
    there = world(path)
    whole = there.release_all()
    in_it = {gone: there.samples.had(gone, rate=rate) for gone in range(12)}
    assert {len(samples) for samples in in_it.values()} == {1}
    assert {samples[0] for samples in in_it.values()} == {True, False}
    for gone, samples in in_it.items():
        part = world(path, gone=gone, before=there).release_all()
        assert bool((whole != part).any()) == samples[0]


def test_the_statistics_of_a_fitting(tmp_path: Path) -> None:
    """Count, mean and covariance of the scaled table, by no more than their noise is made for."""
    path = write(tmp_path, model=DIRECTIONS, encoder={"method": "principal"})
    there = world(path)
    there.release([0], number=1)
    furthest = 0.0
    for gone in GONE:
        without = world(path, gone=gone, before=there)
        without.release([0], number=1)
        (change,) = there.said.changes(without.said)
        assert 0 < change <= 1 + 1e-9
        furthest = max(furthest, change)
    assert furthest > 0.3, "values near their bounds come near the bound"


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_releases_and_updates_of_rounds_that_learn(rate: float, tmp_path: Path) -> None:
    """Dropout on: the units dropped for a row do not depend on which records other rows have."""
    privacy = {**PRIVACY, "encoder": "dp-trained", "sampling_rate": rate}
    path = write(tmp_path, model={**POOLED, "dropout": 0.4}, privacy=privacy)
    there = world(path)
    random = torch.Generator().manual_seed(1)
    train, test = there.split.train, there.split.test.tolist()
    # An epoch, and a round of the next.
    rounds = list(enumerate([*np.split(train, [16, 32]), train[5:21]], start=1))
    gradients = [
        torch.randn((len(rows), *there.plan.cut.shape), generator=random) for _, rows in rounds
    ]

    def learned(which: World) -> list[torch.Tensor]:
        # Rows of a next epoch, without the one before it being whole.
        which.secondary.validator = AnyRound()
        out = []
        for (number, rows), gradient in zip(rounds, gradients, strict=True):
            out.append(which.release(rows.tolist(), number=number, purpose="train"))
            which.learn(rows.tolist(), gradient, number=number)
        return [*out, which.release(test, number=len(rounds) + 1, purpose="test")]

    whole = learned(there)
    most = gradient_sensitivity(clip_norm=1.0, unit=Unit.SECONDARY_RECORD, rows=CAP)
    furthest = 0.0
    for gone in GONE:
        without = world(path, gone=gone, before=there)
        parts = learned(without)
        furthest = max(
            furthest, *(require_within(*pair, there) for pair in zip(whole, parts, strict=True))
        )
        changes = there.said.changes(without.said)
        assert len(changes) == len(rounds)
        assert max(changes) <= most
        # The last release has no update.
        for change, before, after in zip(changes, whole[:-1], parts[:-1], strict=True):
            assert change == 0 or not torch.equal(before, after)
    assert furthest > 0.1


@pytest.mark.parametrize("linkage", [{}, RECORDS_CHOOSE], ids=["rows choose", "records choose"])
def test_rows_without_links_are_zero(linkage: dict[str, str], tmp_path: Path) -> None:
    """Also those that lose their only record: what the cheaper bound of pooled rows rests on."""
    privacy = {**PRIVACY, "links_per_record": 1}
    path = write(tmp_path, model=POOLED, privacy=privacy, linkage=linkage)
    table = tmp_path / "bank-1.csv"
    pd.read_csv(table).head(ROWS // 2).to_csv(table, index=False)
    there = world(path)
    whole = there.release_all()
    links = there.secondary.data.links.link(np.arange(ROWS))
    counts = links.present.sum(axis=1)
    assert (counts == 0).any()
    assert not whole[counts == 0].any()
    lonely = np.flatnonzero(counts == 1)[:3]
    assert len(lonely) == 3
    for row in lonely:
        only = int(links.indices[row][links.present[row]][0])
        part = world(path, gone=only, before=there).release_all()
        assert whole[row].any()
        assert not part[row].any()
        assert torch.linalg.vector_norm(whole[row]) <= there.row_bound
        assert bool((whole != part).any(dim=1).sum() == 1)


def test_a_sum_that_is_drawn_back_is_rounded_once_more(tmp_path: Path) -> None:
    """One record moves it by more than C, which the plan knows of, and by no more than that.

    Four records of one direction and a fifth, at which their sum just leaves the ball of radius
    K C: drawn back it is no longer whole, and is rounded towards zero. The directions were found
    by a search for the furthest move.
    """
    four, fifth = 1.2706544970571667, 2.96470842847718
    path = write(
        tmp_path,
        model={**DIRECTIONS, "neighbours": 4},
        encoder={"method": "random"},
        privacy={**PRIVACY, "links_per_record": 1},
        linkage=RECORDS_CHOOSE,
    )
    source = tomllib.loads(path.read_text())
    source["party"][1] |= {"bounds": [-1.0, 1.0]}
    save_federation(tmp_path, source)
    primary = pd.read_csv(tmp_path / "agency.csv")
    angles = np.array([four] * 4 + [fifth])
    frame = pd.DataFrame({"x0": np.cos(angles), "x1": np.sin(angles), "x2": 0.0})
    frame[["lon", "lat"]] = primary.loc[0, ["lon", "lat"]].to_numpy(float)
    frame.to_csv(tmp_path / "bank-1.csv", index=False)

    def released(gone: int | None) -> World:
        which = world(path, gone=gone)
        encode = which.secondary.bottom.get_submodule("encode")
        encode.fit(centre=np.zeros(3), projection=np.eye(3)[:, :2])
        return which

    there = released(None)
    moved = torch.linalg.vector_norm(there.release_all() - released(4).release_all(), dim=1)
    unit = there.plan.cut.ring.granularity
    assert unit == COARSEST_STEP
    assert 1.0 / unit + 0.7 < float(moved[0]) <= there.row_bound
    assert not moved[1:].any()


class Numbered:
    """Noise that tells its blocks apart."""

    def __init__(self, std_units: float) -> None:
        self.std_units = std_units
        self.blocks = 0

    def sample(self, shape, device="cpu") -> torch.Tensor:
        """Return the number of the block, from 1, in every place."""
        self.blocks += 1
        return torch.full(tuple(shape), self.blocks, dtype=torch.int32, device=device)


def test_noise_that_is_drawn_ahead_is_used_once(tmp_path: Path) -> None:
    """One block a round, none twice, and the same ones whoever is in the table."""
    path = write(tmp_path, model=POOLED, training={"batch_size": 3})
    heard = []
    for gone in (None, 17):
        noised = world(path, gone=gone, noise=Numbered)
        noise = noised.release_all() - world(path, gone=gone).release_all()
        noised.secondary.close()
        blocks = noise[:, 0]
        assert torch.equal(noise, blocks[:, None].expand_as(noise))
        numbers, rows = blocks.unique(return_counts=True)
        assert len(numbers) == ROWS // 3
        assert set(rows.tolist()) == {3}
        heard.append(blocks)
    assert torch.equal(*heard)
