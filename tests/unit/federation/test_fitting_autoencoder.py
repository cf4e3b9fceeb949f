"""Pretraining by noised steps: it learns, alone from records, and from no more than its sample."""

import numpy as np
import pytest
import torch

from securevfl.federation.rounds import fitting
from securevfl.federation.rounds.fitting import pretrain
from securevfl.models.autoencoder import ChannelAutoencoder, small_encoder
from securevfl.models.layers import initialise


def model_of() -> ChannelAutoencoder:
    encoder = small_encoder(num_features=6, components=2)
    model = ChannelAutoencoder(encoder, num_features=6, components=2)
    initialise(model, seed=1, positions_seed=0)
    return model


def records_of(count: int = 400) -> torch.Tensor:
    """Return records in four clusters."""
    draw = np.random.default_rng(8)
    centres = draw.choice([-0.8, 0.8], (4, 6))
    return torch.tensor(
        centres[draw.integers(4, size=count)] + 0.05 * draw.normal(size=(count, 6)),
        dtype=torch.float32,
    )


def train(model: ChannelAutoencoder, records: torch.Tensor, **changes) -> float:
    """Pretrain, and return the mean error over all records without noise on the code."""
    settings = {
        "steps": 150,
        "sampling_rate": 0.2,
        "noise_multiplier": 1.0,
        "channel_std": 0.3,
        "generator": torch.Generator().manual_seed(2),
    }
    pretrain(model, records, **{**settings, **changes})
    with torch.no_grad():
        return float(model(records, torch.zeros(1, 2)).mean())


@pytest.mark.usefixtures("fixed_noise")
def test_it_learns_behind_noise_that_would_drown_one_record() -> None:
    """The error falls below half of a constant answer's."""
    records = records_of()
    constant = float(records.var(dim=0, unbiased=False).mean())

    assert train(model_of(), records) < constant / 2


def test_all_parts_of_every_gradient_are_in_the_noised_sum(monkeypatch) -> None:
    """The mechanism gets one row a sampled record, and every weight; nothing goes around it."""
    seen: list[torch.Size] = []

    class Silent(fitting.NoisedGradientSum):
        def __call__(self, gradients: torch.Tensor) -> torch.Tensor:
            seen.append(gradients.shape)
            return torch.zeros(gradients.shape[1])

    monkeypatch.setattr(fitting, "NoisedGradientSum", Silent)
    model = model_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, records_of(), steps=3, sampling_rate=1.0)

    assert seen == [(400, sum(value.numel() for value in before.values()))] * 3
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_step_without_records_is_a_step_of_noise() -> None:
    """An empty sample looks like any other: skipping it would tell that nobody was drawn."""
    model = model_of()
    before = model.encoder.layers[0].weight.clone()
    train(model, records_of(3), steps=1, sampling_rate=1e-12)

    assert not torch.equal(model.encoder.layers[0].weight, before)
