"""Tasks, optimizers, initial weights, settings and the registry of models."""

import math

import pytest
import torch
from torch import nn

from securevfl.core.errors import ConfigError
from securevfl.models.family import Bottom, Top
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.layers import MLP, initialise
from securevfl.models.optimisers import OPTIMIZERS, build_optimizer, without_compiler
from securevfl.models.registry import FAMILIES, family_named
from securevfl.models.tasks import TaskHead

SMALL = FeTConfig(neighbours=4, hidden=8, heads=2, fourier_features=6, fourier_width=5)


@pytest.mark.parametrize(
    ("task", "better", "worse"), [("regression", 1.0, 2.0), ("binary", 2.0, 1.0)]
)
def test_better_has_a_direction_and_nan_is_never_better(
    task: str, better: float, worse: float
) -> None:
    """A smaller RMSE and a larger AUC win; equal or NaN does not, and NaN loses to all."""
    head = TaskHead(task=task)

    assert head.is_better(better, worse)
    assert not head.is_better(worse, better)
    assert not head.is_better(better, better)
    assert not head.is_better(math.nan, worse)
    assert head.is_better(worse, math.nan)


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass"])
def test_each_loss_falls_towards_zero_at_a_perfect_output(task: str) -> None:
    """The loss of right outputs is small and that of wrong ones is not."""
    head = TaskHead(task=task, num_classes=3)
    targets = torch.tensor([0, 1, 1]) if task == "multiclass" else torch.tensor([0.0, 1.0, 1.0])
    if task == "multiclass":
        right = 20 * torch.eye(3)[targets]
    else:
        right = (targets if task == "regression" else 40 * targets - 20).unsqueeze(1)

    assert right.shape[1] == head.outputs
    assert head.loss(right, targets).item() < 1e-6
    assert head.loss(right.roll(1, dims=0), targets).item() > 0.3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_lowers_a_loss(name: str) -> None:
    """Thirty steps on a quadratic bring its loss down."""
    if name == "lamb":
        pytest.importorskip("pytorch_optimizer")
    weight = nn.Parameter(torch.ones(4))
    optimizer = build_optimizer(name, [weight], learning_rate=0.02, weight_decay=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()

    assert weight.square().sum().item() < 0.7 * 4


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_without_the_compiler_are_torchs_own(kind: type[torch.optim.Optimizer]) -> None:
    """To the last bit, through a state that was kept; and a step is in no gradient."""
    start, found = torch.linspace(-1, 1, 5), []
    for one in (kind, without_compiler(kind)):
        weight = nn.Parameter(start.clone())
        optimizer = one([weight], lr=0.1, weight_decay=0.01)
        for number in range(4):
            if number == 2:
                kept = optimizer.state_dict()
                optimizer = one([weight], lr=0.5)
                optimizer.load_state_dict(kept)
            optimizer.zero_grad()
            weight.pow(4).sum().backward()
            optimizer.step()
        found.append(weight)
    assert torch.equal(*found)
    assert not torch.equal(found[1].detach(), start)
    assert found[1].grad_fn is None
    assert without_compiler(kind) is without_compiler(kind)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "rmsprop"}, "optimizer must be one of adamw, adam, lamb, sgd; got 'rmsprop'"),
        ({"learning_rate": math.nan}, "learning_rate must be finite and > 0"),
        ({"weight_decay": -1.0}, "weight_decay must be finite and >= 0"),
    ],
)
def test_impossible_optimizers_are_refused(change: dict[str, object], text: str) -> None:
    """The message names the argument."""
    given = {"name": "adamw", "learning_rate": 0.1, "weight_decay": 0.0, **change}
    name = given.pop("name")
    with pytest.raises(ConfigError, match=text):
        build_optimizer(name, [nn.Parameter(torch.ones(1))], **given)


def test_initial_weights_follow_from_the_seeds_alone() -> None:
    """The global generator does not matter; another seed gives other weights."""
    family = FAMILIES["fet"]
    models = []
    for noise, seed in ((1, 5), (2, 5), (3, 6)):
        torch.manual_seed(noise)
        model = family.build_bottom(SMALL, num_features=3, key_dim=2)
        initialise(model, seed=seed, positions_seed=9)
        models.append(model)
    first, again, other = (nn.utils.parameters_to_vector(m.parameters()) for m in models)

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_all_parties_start_with_one_positional_encoding() -> None:
    """Top and bottoms differ, and their positional encodings are equal."""
    family = FAMILIES["fet"]
    bottom = family.build_bottom(SMALL, num_features=3, key_dim=2)
    top = family.build_top(SMALL, num_features=5, key_dim=2, outputs=1)
    initialise(bottom, seed=1, positions_seed=9)
    initialise(top, seed=2, positions_seed=9)
    ours, theirs = top.positions.state_dict(), bottom.positions.state_dict()

    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(
        top.encoder[0].attention.query.weight, bottom.blocks[0].attention.query.weight
    )


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("fet", {"neighbours": 4, "hidden": 8, "heads": 2, "release": "sequence"}),
        ("fet", {"neighbours": 4, "hidden": 8, "heads": 2, "release": "pooled"}),
        ("fedsim", {"neighbours": 4, "kernel": 2}),
        ("exact", {}),
        ("top1sim", {"keys_as_features": True}),
        ("avgsim", {"neighbours": 4}),
        ("featuresim", {"neighbours": 4}),
    ],
)
def test_families_keep_the_protocols_and_their_cut_shape(
    name: str, table: dict[str, object], frozen: bool
) -> None:
    """What a bottom gives, pooled where the family says so, is what the top takes."""
    family = FAMILIES[name]
    config = family.settings_from(table)
    links = config.neighbours
    bottom = family.build_bottom(config, num_features=3, key_dim=2, frozen=frozen)
    top = family.build_top(config, num_features=5, key_dim=2, outputs=2)
    present = torch.ones(6, links, dtype=torch.bool)
    part = bottom(torch.randn(6, links, 3), torch.randn(6, links, 2), present)
    if family.pools_records(config, frozen=frozen):
        assert bottom.recordwise
        part = part.mean(dim=1, keepdim=True)
    similarities = torch.randn(6, 1, links) if family.needs_similarities(config) else None

    # From Python 3.12 on isinstance overlooks what torch keeps as a submodule.
    for model, protocol in ((bottom, Bottom), (top, Top)):
        assert all(hasattr(model, name) for name in protocol.__annotations__)
    assert tuple(part.shape[1:]) == family.cut_shape(config)
    assert top(torch.randn(6, 5), torch.randn(6, 2), part, similarities).shape == (6, 2)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "class-means"])
def test_a_recordwise_bottom_is_recordwise(name: str) -> None:
    """Position j depends on link j alone, and is zero where there is no link."""
    family = FAMILIES[name]
    for frozen in (False, True):
        config = family.settings_class()
        links = config.neighbours
        bottom = family.build_bottom(config, num_features=3, key_dim=2, frozen=frozen).eval()
        if not bottom.recordwise:
            continue
        features, keys = torch.randn(2, links, 3), torch.randn(2, links, 2)
        present = torch.ones(2, links, dtype=torch.bool)
        present[1, -1] = False
        whole = bottom(features, keys, present)
        alone = bottom(features[:, :1], keys[:, :1], present[:, :1])
        torch.testing.assert_close(whole[:1, :1], alone[:1])
        assert not whole[1, -1].any()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (None, "model.family: is missing; available: 'fet', 'fedsim'"),
        ("FeT", "must be one of 'fet', .*; got 'FeT'"),
        (3, "must be one of 'fet', .*; got 3"),
        ("solo", "'solo' trains on one table"),
    ],
)
def test_families_that_there_are_not_are_refused(name: object, text: str) -> None:
    """The message says what there is."""
    with pytest.raises(ConfigError, match=text):
        family_named(name)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"neighbors": 5}, r"model.neighbors: no such field; did you mean 'neighbours'\?"),
        ({"neighbours": 0}, "model.neighbours must be at least 1, got 0"),
        ({"heads": 3}, "model.heads must divide hidden=64, got 3"),
        ({"fourier_features": 7}, "fourier_features must be even"),
        ({"fourier_octaves": -1}, "fourier_octaves must be at least 0"),
        ({"fourier_octaves": 17}, "fourier_octaves must be at most 16"),
        ({"party_dropout": 1.0}, r"party_dropout must lie in \[0, 1\)"),
        ({"dropout": math.nan}, r"dropout must lie in \[0, 1\)"),
        ({"fourier_scale": 0.0}, "fourier_scale must be finite and > 0"),
        ({"release": "mean"}, "model.release: must be one of 'sequence', 'pooled'; got 'mean'"),
        ({"hidden": True}, "model.hidden: must be a whole number"),
    ],
)
def test_impossible_settings_are_refused_by_name(table: dict[str, object], text: str) -> None:
    """Each message has the field, the rule and the value."""
    with pytest.raises(ConfigError, match=text):
        FAMILIES["fet"].settings_from(table)


def test_a_perceptron_without_hidden_layers_is_linear() -> None:
    """Outputs of a sum are sums of outputs, up to the bias."""
    layer = MLP(3, [], 2)
    left, right = torch.randn(4, 3), torch.randn(4, 3)
    bias = layer(torch.zeros(4, 3))

    torch.testing.assert_close(layer(left + right) + bias, layer(left) + layer(right))
