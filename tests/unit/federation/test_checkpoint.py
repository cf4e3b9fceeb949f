"""Checkpoints: whole or not at all, two of a kind, and of these settings only."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from securevfl.core.errors import ConfigError, StorageError
from securevfl.federation.checkpoint import Checkpoints


def state(value: float) -> dict[str, object]:
    return {"weights": torch.full((3,), value), "epoch": 1, "history": [{"loss": value}]}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def store(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "run" / "parties" / "bank", settings_digest="abc")


def test_two_epochs_and_two_best_ones_are_kept(store: Checkpoints) -> None:
    """Of each kind the newest two remain, and they hold what was saved."""
    for epoch in (8, 9, 10, 11):
        store.save(epoch, state(epoch))
    for epoch in (2, 9, 10):
        store.save_best(epoch, state(-epoch))
    assert store.epochs() == [10, 11]
    assert names(store.folder) == {"epoch-10.pt", "epoch-11.pt", "best-9.pt", "best-10.pt"}
    assert torch.equal(store.load_best(9)["weights"], torch.full((3,), -9.0))
    loaded = store.load(11)
    assert torch.equal(loaded["weights"], torch.full((3,), 11.0))
    assert loaded["history"] == [{"loss": 11}]


def test_going_back_forgets_what_came_later(store: Checkpoints) -> None:
    """A resumed epoch is the newest: a later best one was never agreed upon."""
    for epoch in (4, 5):
        store.save(epoch, state(epoch))
        store.save_best(epoch, state(epoch))
    store.load(4)
    assert names(store.folder) == {"epoch-4.pt", "best-4.pt"}


def test_crash_while_writing_leaves_the_old_file(store: Checkpoints) -> None:
    """A write that fails before its end changes nothing and leaves nothing behind."""
    store.save(1, state(1))
    full = patch.object(os, "fsync", side_effect=OSError("disk full"))
    with full, pytest.raises(StorageError, match=r"epoch-1\.pt: cannot be written \(disk full\)"):
        store.save(1, state(2))
    assert names(store.folder) == {"epoch-1.pt"}
    assert torch.equal(store.load(1)["weights"], torch.ones(3))


def test_other_settings_are_refused(store: Checkpoints) -> None:
    """Weights of one federation are not those of another; refusing forgets nothing."""
    for epoch in (1, 2):
        store.save(epoch, state(epoch))
    store.save_released(torch.ones(2, 1, 3))
    other = Checkpoints(store.folder, settings_digest="xyz")
    with pytest.raises(ConfigError, match="other settings"):
        other.load(1)
    with pytest.raises(ConfigError, match="other settings"):
        other.load_released()
    assert store.epochs() == [1, 2]


def test_what_is_not_there(store: Checkpoints) -> None:
    """An epoch that nobody saved is named; a release that nobody made is None."""
    assert store.epochs() == []
    assert store.load_released() is None
    with pytest.raises(ConfigError, match=r"epoch-3\.pt: does not exist"):
        store.load(3)


def test_released_rows_come_back(store: Checkpoints) -> None:
    """What was released is kept bit for bit."""
    aggregates = torch.randn(5, 1, 4, generator=torch.Generator().manual_seed(1))
    store.save_released(aggregates)
    loaded = store.load_released()
    assert loaded is not None
    assert torch.equal(loaded, aggregates)


@pytest.mark.parametrize("leave", ["save", "save_best", "save_released"])
def test_used_folder_is_refused(store: Checkpoints, leave: str) -> None:
    """Any work of an earlier run makes a fresh one impossible; an empty folder does not."""
    store.require_unused()
    if leave == "save_released":
        store.save_released(torch.ones(1, 1, 1))
    else:
        getattr(store, leave)(1, state(1))
    with pytest.raises(ConfigError, match=r"run folder .*run: holds a run already.*--resume"):
        store.require_unused()


def test_a_file_that_would_run_code_is_not_loaded(store: Checkpoints) -> None:
    """Only tensors and plain values are read: a checkpoint cannot hold a program."""
    store.folder.mkdir(parents=True)
    torch.save({"settings_digest": "abc", "state": {"f": print}}, store.folder / "epoch-1.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        store.load(1)
