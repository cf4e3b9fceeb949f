"""One party's pretraining steps: what is learned, followed, shared and left alone."""

from typing import Any

import pytest
import torch
from helpers.learners import SMALL, flat, learner, table

from securevfl.models.family import PretrainingSettings
from securevfl.models.fedhssl.encoders import (
    FedCSSLConfig,
    FedHSSLConfig,
    FedLocalSSLConfig,
    FedSplitNNConfig,
)
from securevfl.stages.pretraining.learner import simsiam_loss, sphere_spread, unit


def test_averaged_weights_are_taken() -> None:
    one = learner()
    wanted = {name: value + 1 for name, value in one.shared_weights().items()}
    one.load_shared(wanted)
    assert torch.equal(flat(one.shared_weights()), flat(wanted))


@pytest.mark.parametrize("algorithm", ["simsiam", "byol", "moco"])
def test_local_learning_lowers_its_loss(algorithm: str) -> None:
    one = learner(algorithm=algorithm, learning_rate=5e-3, guidance=0.0)
    losses = [float(one.learn_local(table())[0]) for _ in range(60)]
    assert sum(losses[-10:]) < sum(losses[:10]) - 1


@pytest.mark.parametrize("algorithm", ["simsiam", "byol", "moco"])
def test_cross_learning_lowers_its_loss(algorithm: str) -> None:
    one, other = learner("a", algorithm=algorithm), learner("b", algorithm=algorithm)
    x = table()
    losses = []
    for _ in range(60):
        mine, theirs = unit(one.project(x)), unit(other.project(x * 2 + 1))
        losses.append(float(one.learn_cross([theirs])))
        other.learn_cross([mine])
    assert sum(losses[-10:]) < sum(losses[:10]) - 1


@pytest.mark.parametrize("algorithm", ["simsiam", "byol"])
def test_projections_have_their_own_lengths_and_no_gradient(algorithm: str) -> None:
    """What noise is scaled by the longest of must not have been made of length 1 before."""
    one = learner(algorithm=algorithm)
    sent = one.project(table())
    tower = one.towers["cross"]
    whole = tower(table()) if tower.follower is None else tower.follower(table())
    assert torch.equal(sent, whole)
    assert float(sent.norm(dim=1).max()) > 1.2 * float(sent.norm(dim=1).min())
    assert not sent.requires_grad


def test_target_follows_by_its_momentum() -> None:
    one = learner(algorithm="byol", momentum=0.9)
    tower = one.towers["local"]
    before = [value.clone() for value in tower.follower.parameters()]
    one.learn_local(table())
    online = [*tower.encoder.parameters(), *tower.projector.parameters()]
    for old, new, value in zip(before, tower.follower.parameters(), online, strict=True):
        assert torch.allclose(new, 0.9 * old + 0.1 * value, atol=1e-6)


def test_momenta_of_the_paper() -> None:
    assert PretrainingSettings(algorithm="byol").target_momentum == 0.995
    assert PretrainingSettings(algorithm="moco").target_momentum == 0.99
    assert learner(algorithm="simsiam").towers["local"].follower is None


def test_guidance_teaches_local_and_leaves_the_cross_encoder_alone() -> None:
    one, other = learner(guidance=1.0), learner(guidance=0.0)
    for each in (one, other):
        before = flat(dict(each.towers["cross"].named_parameters())).clone()
        each.learn_local(table())
        assert torch.equal(flat(dict(each.towers["cross"].named_parameters())), before)
    assert not torch.equal(flat(one.shared_weights()), flat(other.shared_weights()))


def test_local_loss_is_equation_6() -> None:
    """Both views in one pass: batch statistics are those of both, all else as in the paper."""
    one = learner(guidance=0.7)
    x = table()
    twin = torch.Generator().manual_seed(0)
    twin.set_state(one.generator.get_state())
    views = one.augment(torch.cat([x, x]), twin)
    tower = one.towers["local"]
    with torch.no_grad():
        z = tower(views)
        p, c = tower.predictor(z), unit(one.towers["cross"](views))
        (p1, p2), (z1, z2), (c1, c2) = p.chunk(2), unit(z).chunk(2), c.chunk(2)
        expected = 0.5 * (simsiam_loss(p1, z2) + simsiam_loss(p2, z1))
        expected += 0.7 * (simsiam_loss(p1, c1) + simsiam_loss(p2, c2))
    assert float(one.learn_local(x)[0]) == pytest.approx(float(expected), abs=1e-5)


def test_both_views_are_augmented() -> None:
    one, seen = learner(), []
    inner = one.augment

    def watch(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        seen.append((batch, inner(batch, generator)))
        return seen[-1][1]

    one.augment = watch
    one.learn_local(table())
    batch, views = seen[0]
    changed = (batch != views).any(dim=1)
    assert bool(changed.all())
    assert not torch.equal(*views.chunk(2))


def test_several_updates_from_one_exchange() -> None:
    once, often = learner(local_updates=1), learner(local_updates=4)
    target = unit(torch.randn(64, 8, generator=torch.Generator().manual_seed(3)))
    for each in (once, often):
        each.project(table())
        each.learn_cross([target])
    start = flat(learner().encoders()["cross"])
    moved = [(flat(each.encoders()["cross"]) - start).norm() for each in (once, often)]
    assert moved[1] > 2 * moved[0]


def test_state_brings_everything_back() -> None:
    for algorithm in ("simsiam", "byol", "moco"):
        one = learner(algorithm=algorithm)
        one.learn_local(table())
        state = one.state()
        copy = learner(algorithm=algorithm)
        copy.load_state(torch.load(_saved(state), weights_only=True))
        assert float(one.learn_local(table())[0]) == float(copy.learn_local(table())[0])


def _saved(state: dict[str, Any]) -> Any:
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def test_steps_decide_which_encoders_there_are() -> None:
    assert set(learner(kind=FedCSSLConfig).towers) == {"cross"}
    assert set(learner(kind=FedLocalSSLConfig).towers) == {"local"}
    assert FedSplitNNConfig(**SMALL).used_encoders == ("local",)
    assert FedHSSLConfig(**SMALL).cut_shape == (1, 32)
    assert FedHSSLConfig(**SMALL, encoders="cross").cut_shape == (1, 16)


def test_spread_tells_collapse() -> None:
    even = unit(torch.randn(500, 32, generator=torch.Generator().manual_seed(0)))
    assert sphere_spread(even) == pytest.approx(1.0, abs=0.05)
    assert sphere_spread(unit(torch.ones(500, 32) + 1e-3 * even)) < 0.01
