"""Where positional encodings start, and what their average is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from securevfl.core.conventions import derive_seed
from securevfl.models.fet.positions import FourierPositions
from securevfl.models.layers import initialise
from securevfl.testing import run_in_process, write_federation

PARTIES = ("agency", "bank-1", "bank-2")
SEED = 3


def drawn(*stream: str) -> dict[str, Tensor]:
    """Return the weights of a positional encoding of the helper's federation, by its stream."""
    seed = derive_seed(SEED, "init", "positions", *stream)
    positions = FourierPositions(2, num_features=8, hidden=8, width=8, scale=1.0, octaves=5)
    initialise(positions, seed=seed, positions_seed=seed)
    return {name: value.detach() for name, value in positions.named_parameters()}


def after_an_epoch(folder: Path, **model: Any) -> dict[str, dict[str, Tensor]]:
    """Return each party's encoding after six rounds whose steps are too small to move it."""
    path = write_federation(
        folder, model=model, training={"epochs": 1, "optimizer": "sgd", "learning_rate": 1e-12}
    )
    run_in_process(path, folder / "run")
    return {name: kept_positions(folder / "run" / "parties" / name) for name in PARTIES}


def kept_positions(folder: Path) -> dict[str, Tensor]:
    """Return the weights of the encoding in a party's first checkpoint."""
    state = torch.load(folder / "epoch-1.pt")["state"]
    weights = state["bottom"] if "bottom" in state else state["top"]
    where = "embedding.positions."
    return {
        name.removeprefix(where): value for name, value in weights.items() if name.startswith(where)
    }


@pytest.mark.parametrize("start", ["shared", "separate"])
def test_where_encodings_start(tmp_path: Path, start: str) -> None:
    """All parties from one stream, or each, the primary too, from its own."""
    kept = after_an_epoch(tmp_path, average_positions_every=0, positions_start=start)

    for name in PARTIES:
        expected = drawn() if start == "shared" else drawn(name)
        torch.testing.assert_close(kept[name], expected, rtol=0, atol=1e-6)


def test_the_average_counts_the_primary_as_one_of_the_parties(tmp_path: Path) -> None:
    """[FeT] section 5.1: the encodings of all parties are averaged, and all parties get the mean.

    Worked out by hand from the three draws; the secure mean's steps of 2^-32 are far below 1e-6.
    """
    kept = after_an_epoch(tmp_path, average_positions_every=1, positions_start="separate")
    draws = [drawn(name) for name in PARTIES]
    mean = {name: torch.stack([draw[name] for draw in draws]).mean(0) for name in draws[0]}
    without = {name: torch.stack([draw[name] for draw in draws[1:]]).mean(0) for name in mean}

    for name in PARTIES:
        torch.testing.assert_close(kept[name], mean, rtol=0, atol=1e-6)
    assert not torch.allclose(mean["frequencies"], without["frequencies"], atol=1e-2)
