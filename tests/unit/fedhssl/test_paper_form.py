"""Lines of the paper's algorithm that are settings, and what local learning must leave alone."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.learners import SMALL, flat, learner, table

from securevfl.core.errors import ConfigError
from securevfl.models.family import PretrainingSettings
from securevfl.models.fedhssl.encoders import (
    FedCSSLConfig,
    FedGSSLConfig,
    FedHSSLConfig,
    FedLocalSSLConfig,
)
from securevfl.models.fedhssl.family import FedHSSLTop
from securevfl.mpc.codec import decode_mean, encode_weighted
from securevfl.stages.pretraining.learner import Tower, simsiam_loss, unit
from securevfl.stages.pretraining.learning import LearnerWithRecords

ALGORITHMS = ("simsiam", "byol", "moco")


def with_records(features: torch.Tensor, records: int = 64, **settings: Any) -> LearnerWithRecords:
    one = learner(features=features.shape[1], **settings)
    return LearnerWithRecords(one, features, np.arange(records), name="a", seed=1)


@pytest.mark.parametrize("algorithm", ["byol", "moco"])
def test_whose_projections_are_exchanged(algorithm: str) -> None:
    """The online encoder's."""
    one = with_records(table(), algorithm=algorithm, learning_rate=5e-3)
    rows = np.arange(32)
    target = unit(table(32, features=8, seed=3))
    for number in range(30):
        one.project(rows, round_number=number)
        one.learn_cross([target])
    tower = one.learner.towers["cross"]
    twin = Tower(tower.encoder, one.learner.settings, follows=False)
    twin.projector = tower.projector
    online = unit(twin(table()[:32])).detach()
    sent = unit(one.project(rows, round_number=31))
    assert torch.allclose(sent, online, atol=1e-5)


@pytest.mark.parametrize("views", ["together", "apart"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_local_epoch_leaves_the_cross_party_encoder_as_it_is(algorithm: str, views: str) -> None:
    """Its parameters and its running statistics, of encoder, projector and predictor, bit by bit.

    Statistics that followed corrupted views would be what fine-tuning starts from and predicts by.
    """
    one = with_records(table(), algorithm=algorithm, views=views, guidance=0.5)
    towers = one.learner.towers
    before = {
        name: {key: value.clone() for key, value in tower.state_dict().items()}
        for name, tower in towers.items()
    }
    assert any("running_mean" in key for key in before["cross"])
    one.begin_iteration(0, ())
    one.learn_local(0)
    after = towers["cross"].state_dict()
    assert after.keys() == before["cross"].keys()
    moved = [key for key, value in after.items() if not torch.equal(value, before["cross"][key])]
    assert moved == []
    learned = towers["local"].state_dict()
    assert any(not torch.equal(learned[key], value) for key, value in before["local"].items())


@pytest.mark.parametrize("algorithm", ["byol", "moco"])
def test_nothing_reads_the_running_statistics_of_a_follower(algorithm: str) -> None:
    """It takes parameters alone, since its targets always have a batch's own statistics."""
    one, other = learner(algorithm=algorithm), learner(algorithm=algorithm)
    follower = other.towers["local"].follower
    for name, buffer in follower.named_buffers():
        if "running" in name:
            buffer.add_(5)
    for _ in range(3):
        mine, theirs = one.learn_local(table()), other.learn_local(table())
        assert torch.equal(mine[1], theirs[1])
    assert torch.equal(flat(one.encoders()["local"]), flat(other.encoders()["local"]))


def starts(kind: type[FedHSSLConfig], **settings: Any) -> set[bool]:
    """Return whether two parties' tops, projectors and predictors start equal."""
    towers = [learner(party, kind=kind, **settings).towers for party in ("a", "b")]
    return {
        torch.equal(flat(towers[0][name].shared_weights()), flat(towers[1][name].shared_weights()))
        for name in towers[0]
    }


@pytest.mark.parametrize("kind", [FedHSSLConfig, FedGSSLConfig, FedCSSLConfig, FedLocalSSLConfig])
def test_parties_start_apart(kind: type[FedHSSLConfig]) -> None:
    assert starts(kind) == {False}


def test_how_much_a_party_counts_in_the_average() -> None:
    """1/K whatever it has."""
    few, many = (with_records(table(), number) for number in (8, 64))
    for one in (few, many):
        one.begin_iteration(0, ())
        one.learn_local(0)
    words = [
        encode_weighted(one.learner.shared_weights(), weight=1, parties=2) for one in (few, many)
    ]
    total = words[0] + words[1]
    mean = decode_mean(total, {k: v.shape for k, v in few.learner.shared_weights().items()})
    for name, value in mean.items():
        theirs = (one.learner.shared_weights()[name] for one in (few, many))
        assert torch.allclose(value, sum(theirs) / 2, atol=1e-6)
    # The last word is the sum of the weights, which the primary reads.
    assert int(total[-1]) >> 32 == 2


@pytest.mark.parametrize("views", ["together", "apart"])
def test_local_loss_is_equation_6(views: str) -> None:
    """Apart, each view has a pass and batch statistics of its own; together, one for both."""
    one = learner(guidance=0.7, views=views)
    x = table()
    twin = torch.Generator().manual_seed(0)
    twin.set_state(one.generator.get_state())
    both = one.augment(torch.cat([x, x]), twin)
    tower, cross = one.towers["local"], one.towers["cross"]

    def through(network: Any, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if views == "apart":
            first, second = (network(part) for part in inputs.chunk(2))
        else:
            first, second = network(inputs).chunk(2)
        return first, second

    with torch.no_grad():
        z1, z2 = through(tower, both)
        p1, p2 = through(tower.predictor, torch.cat([z1, z2]))
        c1, c2 = (unit(part) for part in through(cross, both))
        expected = 0.5 * (simsiam_loss(p1, unit(z2)) + simsiam_loss(p2, unit(z1)))
        expected += 0.7 * (simsiam_loss(p1, c1) + simsiam_loss(p2, c2))
    assert float(one.learn_local(x)[0]) == pytest.approx(float(expected), abs=1e-5)


def test_one_row_alone_has_no_batch_statistics() -> None:
    with pytest.raises(ConfigError, match="batch_size must be at least 3"):
        PretrainingSettings(views="apart", batch_size=2)


def test_a_queue_is_as_long_as_the_file_says() -> None:
    """Longer than the table, too; by default at most half of it."""
    for asked, size in ((None, 32), (16, 16), (500, 500)):
        for kind in ("cross", "local", "guide"):
            queue = learner(algorithm="moco", queue=asked)._objectives[kind].queue
            assert queue is not None
            assert len(queue.vectors) == size


@pytest.mark.parametrize("normalise", [True, False])
def test_the_head_gets_the_two_halves(normalise: bool) -> None:
    """As they are, as the paper's Equation 1 says, or each at mean 0 and deviation 1 in a row."""
    config = FedHSSLConfig(**SMALL, normalise=normalise)
    top = FedHSSLTop(config, num_features=6, outputs=3).eval()
    x, aggregate = table(), 0.01 * table(features=32, seed=1)
    halves = [top.encoders(x), aggregate]
    if normalise:
        halves = [
            (half - half.mean(dim=1, keepdim=True)) / half.std(dim=1, correction=0, keepdim=True)
            for half in halves
        ]
    expected = top.head(torch.cat(halves, dim=1))
    given = top(x, torch.zeros(64, 1), aggregate.unsqueeze(1), None)
    assert torch.allclose(given, expected, atol=1e-3 if normalise else 0)
