"""Presets: the paper's settings beneath a file's own, and as methods of a comparison."""

from pathlib import Path
from typing import Any

import pytest

from securevfl import read_federation
from securevfl.config.presets import methods_with_presets, preset
from securevfl.core.errors import ConfigError
from securevfl.lab.methods import known_methods, method_family
from securevfl.lab.one_run import method_config
from securevfl.models.fedsim import FedSimConfig
from securevfl.models.registry import FAMILIES
from securevfl.testing import write_federation

MODEL: dict[str, Any] = {"family": "fedsim", "preset": "paper", "neighbours": 8}


def test_a_preset_fills_in_what_the_file_leaves_out(tmp_path: Path) -> None:
    """The file's own settings come first, whatever the preset says."""
    path = write_federation(tmp_path, secondaries=1, model={**MODEL, "merge": "perceptron"})
    config = read_federation(path)
    assert isinstance(config.model, FedSimConfig)
    assert (config.model.weight, config.model.pair_scale) == ("learned", "none")
    assert (config.model.merge, config.model.neighbours) == ("perceptron", 8)
    assert config.training.optimizer == "lamb"
    assert (config.training.learning_rate, config.training.batch_size) == (5e-3, 32)
    assert config.privacy.clip_norm == 1000
    assert config.source["model"]["preset"] == "paper"


def test_noise_needs_the_clip_that_the_file_says(tmp_path: Path) -> None:
    """Only where nothing is promised is the clip taken away; a promise would drown in its noise."""
    privacy = {"mechanism": "gaussian", "noise_multiplier": 1.0, "encoder": "trained"}
    path = write_federation(tmp_path, secondaries=1, model=MODEL, privacy=privacy)
    assert read_federation(path).privacy.clip_norm == 1


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ({"preset": "papre"}, r"model\.preset: 'fedsim' has 'paper'; got 'papre'"),
        ({"preset": 3}, r"model\.preset: 'fedsim' has 'paper'; got 3"),
        ({"merge": "sum"}, r"model\.merge: must be one of"),
    ],
)
def test_wrong_presets_are_refused(model: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    """In one line, which names what there is."""
    path = write_federation(tmp_path, secondaries=1, model={**MODEL, **model})
    with pytest.raises(ConfigError, match=complaint):
        read_federation(path)


def test_a_comparison_knows_the_papers_form_by_name(tmp_path: Path) -> None:
    """It comes before what the file tunes for the family, on the links and rows of all methods."""
    path = write_federation(
        tmp_path,
        secondaries=1,
        model={"family": "fedsim", "neighbours": 8, "merge": "perceptron", "hidden": 16},
        training={"epochs": 2, "test_fraction": 0.3},
        methods={"fedsim": {"weight": "none"}, "fedsim-paper": {"learning_rate": 3e-4}},
    )
    config = read_federation(path)
    paper = method_config(config, "fedsim-paper")
    assert isinstance(paper.model, FedSimConfig)
    assert (paper.model.weight, paper.model.merge) == ("learned", "convolution")
    assert (paper.model.neighbours, paper.model.hidden) == (8, 16)
    assert (paper.training.optimizer, paper.training.learning_rate) == ("lamb", 3e-4)
    assert (paper.training.epochs, paper.training.test_fraction) == (2, 0.3)
    assert paper.privacy.clip_norm == 1000
    assert method_config(config, "fedsim").privacy.clip_norm == 1
    with pytest.raises(ConfigError, match=r"methods\.fedsim-paper\.family: .* rename it"):
        method_family({**config.source, "methods": {"fedsim-paper": {"family": "fet"}}}, name=PAPER)


PAPER = "fedsim-paper"


def test_every_method_with_a_preset_can_be_read(tmp_path: Path) -> None:
    """No preset names a field that is none, or a value that its family refuses."""
    names = methods_with_presets()
    assert {"fedsim-paper", "avgsim-paper", "fedhssl-paper-byol", "fet-paper"} <= set(names)
    for name in names:
        one_link = "ssl" in name or "splitnn" in name
        model = {"neighbours": 1 if one_link else 8}
        config = read_federation(write_federation(tmp_path, secondaries=1, model=model))
        assert name in known_methods(config.source)
        read = method_config(config, name)
        assert FAMILIES[read.family.name].presets
        alone = preset(read.family.name)
        assert type(alone.model) is type(read.model)
        assert alone.privacy.clip_norm == 1000


def test_an_algorithm_brings_its_own(tmp_path: Path) -> None:
    """MoCo's projector and queue, whichever way it is asked for."""
    path = write_federation(tmp_path, secondaries=1, model={"neighbours": 1})
    moco = method_config(read_federation(path), "fedhssl-paper-moco").pretraining
    assert moco == preset("fedhssl", algorithm="moco").pretraining
    assert (moco.algorithm, moco.queue, moco.projection_width) == ("moco", 4096, 128)
    assert preset("fedhssl").pretraining.projection_width == 512


def test_a_methods_own_pretraining_stands_on_its_presets(tmp_path: Path) -> None:
    """Fewer iterations do not turn BYOL into another algorithm."""
    path = write_federation(
        tmp_path,
        secondaries=1,
        model={"neighbours": 1},
        methods={"fedhssl-paper-byol": {"pretraining": {"iterations": 3}}},
    )
    byol = method_config(read_federation(path), "fedhssl-paper-byol").pretraining
    assert (byol.algorithm, byol.iterations, byol.views) == ("byol", 3, "apart")
