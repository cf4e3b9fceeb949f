"""Checkpoints: whole or not at all, two of a kind, and of one run under these settings only."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.damage import HARMS, damage

from securevfl.core.errors import ConfigError, StorageError
from securevfl.federation.checkpoint import Checkpoints

RUN, OTHER = "1" * 32, "2" * 32


def state(value: float) -> dict[str, Any]:
    return {"weights": torch.full((3,), value), "epoch": 1, "history": [{"loss": value}]}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"run.pt"}


def opened(folder: Path, *, settings: str = "abc") -> Checkpoints:
    return Checkpoints(folder, settings_digest=settings)


def loaded(store: Checkpoints, epoch: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    store.load(epoch, found.update)
    return found


def weight(store: Checkpoints, epoch: int) -> float:
    return float(loaded(store, epoch)["weights"][0])


@pytest.fixture
def store(tmp_path: Path) -> Checkpoints:
    made = opened(tmp_path / "run" / "parties" / "bank")
    made.begin(RUN)
    return made


def test_two_epochs_and_two_best_ones_are_kept(store: Checkpoints) -> None:
    """Of each kind the newest two remain, and they hold what was saved."""
    for epoch in (8, 9, 10, 11):
        store.save(epoch, state(epoch))
    for epoch in (2, 9, 10):
        store.save_best(epoch, state(-epoch))
    assert store.epochs() == [10, 11]
    assert names(store.folder) == {"epoch-10.pt", "epoch-11.pt", "best-9.pt", "best-10.pt"}
    best: dict[str, Any] = {}
    store.load_best(9, best.update)
    assert torch.equal(best["weights"], torch.full((3,), -9.0))
    found = loaded(store, 11)
    assert torch.equal(found["weights"], torch.full((3,), 11.0))
    assert found["history"] == [{"loss": 11}]


def test_only_the_owner_can_read_them(store: Checkpoints) -> None:
    """Weights say something of the records that they were trained on."""
    store.save(1, state(1))
    assert {path.stat().st_mode & 0o777 for path in store.folder.iterdir()} == {0o600}


def test_going_back_forgets_what_came_later(store: Checkpoints) -> None:
    """A resumed epoch is the newest: a later best one was never agreed upon."""
    for epoch in (4, 5):
        store.save(epoch, state(epoch))
        store.save_best(epoch, state(epoch))
    store.load(4, lambda _state: None)
    assert names(store.folder) == {"epoch-4.pt", "best-4.pt"}


def test_going_back_to_what_does_not_fit_forgets_nothing(store: Checkpoints) -> None:
    """A table with other columns makes other shapes: one line, and everything is still there."""
    for epoch in (4, 5):
        store.save(epoch, torch.nn.Linear(3, 2).state_dict())
    again = opened(store.folder)
    again.resume()
    with pytest.raises(ConfigError, match=r"epoch-4\.pt: does not fit this party's model.*table"):
        again.load(4, torch.nn.Linear(2, 2).load_state_dict)
    assert names(store.folder) == {"epoch-4.pt", "epoch-5.pt"}


@pytest.mark.parametrize("calls", [1, 2])
def test_full_disk_leaves_what_was_saved(store: Checkpoints, calls: int) -> None:
    """A write that fails, in the file or in its folder, loses nothing and leaves nothing behind."""
    for epoch in (1, 2):
        store.save(epoch, state(epoch))
    done = 0

    def full(handle: int) -> None:
        nonlocal done
        done += 1
        if done == calls:
            raise OSError(28, "No space left on device")

    with patch.object(os, "fsync", full), pytest.raises(StorageError, match="No space left"):
        store.save(3, state(3))
    again = opened(store.folder)
    assert again.resume() == []
    assert {1, 2} <= set(again.epochs())
    assert weight(again, 2) == 2.0


def test_other_settings_are_refused(store: Checkpoints) -> None:
    """Weights of one federation are not those of another; refusing forgets nothing."""
    for epoch in (1, 2):
        store.save(epoch, state(epoch))
    with pytest.raises(ConfigError, match="other settings"):
        opened(store.folder, settings="xyz").resume()
    assert names(store.folder) == {"epoch-1.pt", "epoch-2.pt"}


def test_what_is_not_there(store: Checkpoints, tmp_path: Path) -> None:
    """An epoch that nobody saved is named; a folder without a run cannot be gone on with."""
    assert store.epochs() == []
    with pytest.raises(ConfigError, match=r"epoch-3\.pt: does not exist"):
        loaded(store, 3)
    with pytest.raises(
        ConfigError, match=r"holds nothing that 'new' could go on with.*another --out"
    ):
        opened(tmp_path / "run" / "parties" / "new").resume()


@pytest.mark.parametrize("leave", ["save", "save_best", "save_stage"])
def test_used_folder_is_refused(store: Checkpoints, leave: str) -> None:
    """Any work of an earlier run makes a fresh one impossible; its id alone does not."""
    store.require_unused()
    getattr(store, leave)(1, state(1))
    with pytest.raises(ConfigError, match=r"run folder .*run: holds a run already.*--resume"):
        store.require_unused()


@pytest.mark.parametrize("harm", sorted(HARMS))
def test_the_checkpoint_before_a_damaged_one_is_taken(store: Checkpoints, harm: str) -> None:
    """Found before anybody is told, named in one line, and left until its successor is whole."""
    for epoch in (1, 2, 3):
        store.save(epoch, state(epoch))
    path = store.folder / "epoch-3.pt"
    damage(path, harm)

    again = opened(store.folder)
    told = again.resume()

    assert again.run == RUN
    assert again.epochs() == [2]
    if harm == "deleted":
        assert told == []
    else:
        assert told == [f"checkpoint {path}: is damaged; epoch 2 is taken instead"]
    assert weight(again, 2) == 2.0
    again.save(3, state(-3))
    assert weight(again, 3) == -3.0
    assert names(store.folder) == {"epoch-2.pt", "epoch-3.pt"}


def test_every_flipped_bit_shows(store: Checkpoints) -> None:
    """Wherever a bit flips in a file, the file is not taken."""
    store.save(1, state(1))
    path = store.folder / "epoch-1.pt"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        again = opened(store.folder)
        again.resume()
        assert again.epochs() == [], place


def test_a_damaged_file_goes_only_behind_its_successor(store: Checkpoints) -> None:
    """The damaged older one is removed by the next save, and not before that one is whole."""
    for epoch in (1, 2):
        store.save(epoch, state(epoch))
    damage(store.folder / "epoch-1.pt", "half")
    again = opened(store.folder)
    again.resume()
    assert names(store.folder) == {"epoch-1.pt", "epoch-2.pt"}
    again.save(3, state(3))
    assert names(store.folder) == {"epoch-2.pt", "epoch-3.pt"}


@pytest.mark.parametrize("harm", ["flipped", "deleted"])
def test_an_epoch_whose_best_one_is_damaged_is_not_taken(store: Checkpoints, harm: str) -> None:
    """A run that went on from it would end without the weights that it promised to end with."""
    for epoch in (1, 2):
        store.save_best(epoch, state(epoch))
        store.best = epoch
        store.save(epoch, state(epoch))
    damage(store.folder / "best-2.pt", harm)
    again = opened(store.folder)
    told = again.resume()
    assert again.epochs() == [1]
    assert len(told) == (harm != "deleted")
    assert all("best-2.pt: is damaged; epoch 1 is taken instead" in line for line in told)


def test_a_run_in_the_folder_of_another_deletes_nothing(store: Checkpoints) -> None:
    """Higher numbers of another run push no epoch of this one out, nor the other way."""
    for epoch in (8, 9):
        store.save(epoch, state(epoch))
    fresh = opened(store.folder)
    fresh.files.run = OTHER
    for epoch in (1, 2, 3):
        fresh.save(epoch, state(epoch))
    assert names(store.folder) == {f"epoch-{epoch}.pt" for epoch in (2, 3, 8, 9)}
    with pytest.raises(ConfigError, match=r"epoch-9\.pt: belongs to another run.*move it"):
        fresh.save(9, state(0))
    with pytest.raises(ConfigError, match=r"epoch-8\.pt: belongs to another run"):
        loaded(fresh, 8)
    assert weight(store, 9) == 9.0


def test_a_folder_with_files_of_two_runs_is_not_gone_on_with(store: Checkpoints) -> None:
    """The one that does not belong there is named, and stays."""
    store.save(1, state(1))
    other = opened(store.folder)
    other.files.run = OTHER
    other.save(7, state(7))
    with pytest.raises(ConfigError, match=r"epoch-7\.pt: belongs to another run.*move it"):
        opened(store.folder).resume()
    assert names(store.folder) == {"epoch-1.pt", "epoch-7.pt"}


@pytest.mark.parametrize("harm", ["flipped", "deleted"])
def test_a_run_is_known_by_any_of_its_files(store: Checkpoints, harm: str) -> None:
    """The file that only holds the id may be lost."""
    store.save(1, state(1))
    damage(store.folder / "run.pt", harm)
    again = opened(store.folder)
    assert len(again.resume()) == (harm != "deleted")
    assert again.run == RUN


def test_nothing_whole_is_nothing_to_go_on_with(store: Checkpoints) -> None:
    """Where everything is damaged, one file of it is named."""
    store.save(1, state(1))
    for path in store.folder.iterdir():
        damage(path, "half")
    with pytest.raises(ConfigError, match=r"epoch-1\.pt is damaged, and nothing else.*another run"):
        opened(store.folder).resume()


def test_a_file_that_would_run_code_is_not_loaded(store: Checkpoints) -> None:
    """Only tensors and plain values are read: a checkpoint cannot hold a program."""
    store.save(1, state(1))
    damage(store.folder / "epoch-1.pt", "program")
    with pytest.raises(ConfigError, match=r"epoch-1\.pt: is not a state that this program wrote"):
        loaded(store, 1)
