"""A model of two torch modules: trained, kept, and held to what every family is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import securevfl as sv
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.models import registry

FREE = sv.dp.Privacy(mechanism="none", encoder="trained")
PROMISE = sv.dp.Privacy(epsilon=8.0, delta=1e-5, encoder="dp-trained", links_per_record=1)
ONE_EPOCH = sv.TrainingSettings(epochs=1)


@pytest.fixture(autouse=True)
def no_families_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})


@pytest.fixture(scope="module")
def parties() -> list[sv.data.PartyTable]:
    """The primary's label is in its partner's column alone, so that both halves must learn."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(400, 2, generator=random).numpy()
    y = (values[:, 1] > 0).astype(int)
    return sv.datasets.split_views(
        values, y, views={"left": [0], "right": [1]}, key_dim=1, key_noise=0.0, seed=0
    )


def layers(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


class Centred(nn.Linear):
    """Without the mean of its batch."""

    def forward(self, rows: Tensor) -> Tensor:
        """Mix rows."""
        return super().forward(rows - rows.mean(0))


def simulate(parties: list[sv.data.PartyTable], model: Any, **given: Any) -> sv.RunResult:
    bounds = [-5.0, 5.0]
    return sv.simulate(parties, model, with_alone=False, progress=False, bounds=bounds, **given)


def test_it_learns_and_predicts_from_its_folder(
    parties: list[sv.data.PartyTable], tmp_path: Path
) -> None:
    model = sv.models.split_model(layers, layers, width=4)
    training = sv.TrainingSettings(epochs=15, learning_rate=0.02)
    run = simulate(parties, model, privacy=FREE, training=training, out=tmp_path / "run")
    assert run.metrics["family"] == "split"
    assert run.metrics["test"] > 0.85  # alone: 0.5
    here = run.predict(parties[0])
    kept = sv.predict(tmp_path / "run", parties[0], parties=parties[1:])
    assert here.frame().equals(kept.frame())


def test_modules_are_copied_and_depend_on_the_seed_alone(
    parties: list[sv.data.PartyTable],
) -> None:
    """The same as functions, and modules stay as they were."""
    bottom, top = layers(2, 8), layers(1 + 8, 1)
    before = bottom.state_dict()["0.weight"].clone()
    model = sv.models.split_model(bottom, top, neighbours=2, name="modules")
    of_modules = simulate(parties, model, privacy=FREE, training=ONE_EPOCH)
    model = sv.models.split_model(layers, layers, neighbours=2, name="functions")
    assert simulate(parties, model, privacy=FREE, training=ONE_EPOCH).losses == of_modules.losses
    assert torch.equal(bottom.state_dict()["0.weight"], before)


def test_a_promise_holds_with_rows_apart(parties: list[sv.data.PartyTable]) -> None:
    model = sv.models.split_model(layers, layers)
    run = simulate(parties, model, privacy=PROMISE, training=ONE_EPOCH)
    assert run.metrics["privacy"]["epsilon"] <= 8.0


def normalised(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.BatchNorm1d(16), nn.Linear(16, outputs))


@pytest.mark.parametrize(
    ("bottom", "text"),
    [
        (normalised, "layer 'module.1' is a BatchNorm1d, which mixes the rows"),
        (Centred, "the bottom model of 'split' mixes the rows of a batch"),
    ],
)
def test_a_promise_refuses_rows_that_are_not_apart(
    bottom: Callable[[int, int], nn.Module], text: str, parties: list[sv.data.PartyTable]
) -> None:
    with pytest.raises(PrivacyError, match=text):
        simulate(parties, sv.models.split_model(bottom, layers), privacy=PROMISE)


@pytest.mark.parametrize(
    ("bottom", "top", "text"),
    [
        (nn.Linear(3, 8), layers, r"bottom .* fails on a batch of 2 rows: .*2x1 and 3x8"),
        (nn.Linear(1, 4), layers, r"bottom .* gives \(2, 1, 4\) .*, expected \(2, 1, 8\)"),
        (layers, nn.Linear(9, 3), r"top .* gives \(2, 3\) .*, expected \(2, 1\)"),
        (layers, nn.Linear(8, 1), r"top .* fails on a batch of 2 rows: .*2x9 and 8x1"),
        (layers, list, r"top .* can't be built: TypeError"),
    ],
)
def test_a_wrong_half_is_named_in_one_line(
    bottom: Any, top: Any, text: str, parties: list[sv.data.PartyTable]
) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        simulate(parties, sv.models.split_model(bottom, top), privacy=FREE)
    assert "\n" not in str(refused.value)


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="the name 'fet' is taken"):
        sv.models.split_model(layers, layers, name="fet")


@pytest.mark.parametrize("of", ["lambda", "local", "main"])
def test_processes_that_cannot_import_a_half_are_refused(
    of: str, parties: list[sv.data.PartyTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, before any is started and anything is written."""

    def local(inputs: int, outputs: int) -> nn.Module:
        return nn.Linear(inputs, outputs)

    monkeypatch.setattr(normalised, "__module__", "__main__")  # as of a script or notebook
    half = {"lambda": lambda i, o: nn.Linear(i, o), "local": local, "main": normalised}[of]
    model = sv.models.split_model(half, layers)
    with pytest.raises(ConfigError, match=r"write it into a file such as own_model\.py") as refused:
        sv.train(parties, model, privacy=FREE, out=tmp_path / "run", progress=False)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()
