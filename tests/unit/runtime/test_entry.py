"""Runs from Python: a federation file's, and what does not go together."""

from pathlib import Path

import pytest

import securevfl as sv
from securevfl.core.errors import ConfigError
from securevfl.testing import write_federation

SMALL = {"rows": 60, "training": {"epochs": 2, "batch_size": 32}}


def test_simulate_takes_a_file_as_its_command_does(tmp_path: Path) -> None:
    """By its path or as it was read, with the same losses; a finished run is not run again."""
    path = write_federation(tmp_path, **SMALL)
    heard: list[object] = []
    run = sv.simulate(str(path), out=tmp_path / "run", observe=lambda event: heard.append(event))
    again = sv.simulate(path, out=tmp_path / "run", resume=True)
    read = sv.simulate(sv.read_federation(path), data_root=tmp_path)

    assert run.losses == read.losses
    assert len(run.history) == 2
    assert (again.metrics, again.history, again.ledger) == (run.metrics, run.history, run.ledger)
    assert again.losses == []
    assert any('mechanism = "none"' in str(event) for event in heard)


def test_simulate_refuses_what_does_not_go_together(tmp_path: Path) -> None:
    """A file says its own settings, and tables need a promise."""
    path = write_federation(tmp_path, **SMALL)
    digits = sv.datasets.load_builtin("digits")
    tables = sv.datasets.split_table(digits.X[:60], digits.y[:60], parties=2, key_dim=4, seed=0)
    fet = sv.models.FeT(neighbours=4)
    privacy = sv.dp.Privacy(mechanism="none")
    for arguments, message in (
        ({"parties": path, "model": fet}, "model: the federation file says it"),
        ({"parties": path, "seed": 0}, "seed: the federation file says it"),
        ({"parties": path, "resume": True}, "resume: needs out"),
        ({"parties": tables, "model": fet}, "privacy: must be given"),
        ({"parties": tables, "model": fet, "privacy": privacy, "resume": True}, "resume, data_r"),
        ({"parties": tables, "privacy": privacy}, "model: must be given"),
    ):
        with pytest.raises(ConfigError, match=message):
            sv.simulate(**arguments)
