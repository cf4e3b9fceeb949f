"""With a base every top model starts at zero, and still learns, and lets others learn."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from securevfl.models.building import top_of
from securevfl.models.initial import initialise
from securevfl.models.registry import family_named, family_names
from securevfl.models.zero_start import Gated, starting_at_zero, trial_inputs

F, D, OUT, S = 3, 2, 4, 2

# Inner widths of 4, the number of outputs, must not be taken for outputs.
SMALL: dict[str, dict[str, Any]] = {
    "fet": {"neighbours": 3, "hidden": 4, "heads": 2, "fourier_features": 4, "fourier_width": 4},
    "fedsim": {"neighbours": 3, "kernel": 2, "hidden": 4, "layer_width": 4, "pair_outputs": 4},
}
for family in ("exact", "top1sim", "avgsim", "featuresim"):
    SMALL[family] = {"hidden": 4, "layer_width": 4}
for family in ("fedhssl", "fedgssl", "fedcssl", "fedlocalssl", "fedsplitnn"):
    SMALL[family] = {"hidden": 4, "encoder_hidden": 4}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "fet": [{}, {"top": "additive", "release": "pooled"}, {"norm": "post"}],
    "fedsim": [{"merge": one} for one in ("residual", "convolution", "perceptron", "average")]
    + [{"weight": "none"}, {"sort": "none"}],
    "fedhssl": [{}, {"head": [4]}, {"norm": "batch"}],
}
CASES = [
    pytest.param(name, variant, id=f"{name}-{'-'.join(map(str, variant.values()))}")
    for name in family_names()
    if name in SMALL
    for variant in VARIANTS.get(name, [{}])
]


def test_every_family_is_tried() -> None:
    """A family that comes to the package comes to this file, unless nothing of it is a network."""
    assert set(SMALL) == {name for name in family_names() if not family_named(name).assisted}


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_outputs_are_zero_and_the_aggregate_matters_after_one_step(
    name: str, variant: dict[str, Any]
) -> None:
    """No row gets anything at first; after one step a gradient reaches the secondaries."""
    family = family_named(name)
    settings = family.settings_from({**SMALL[name], **variant})
    top = top_of(
        family,
        settings,
        num_features=F,
        key_dim=D,
        feature_names=[f"x{axis}" for axis in range(F)],
        outputs=OUT,
        classes=True,
    )
    initialise(top, seed=1, positions_seed=2)
    links = (S, settings.neighbours) if family.needs_similarities(settings) else None
    shape = family.cut_shape(settings)
    tried = trial_inputs(num_features=F, key_dim=D, cut_shape=shape, similarities=links)
    top = starting_at_zero(top, tried)
    assert not isinstance(top, Gated)

    random = torch.Generator().manual_seed(5)
    features, keys = torch.randn(6, F, generator=random), torch.randn(6, D, generator=random)
    aggregate = torch.randn(6, *shape, generator=random).requires_grad_()
    near = None if links is None else -torch.rand(6, *links, generator=random)
    targets = torch.randint(OUT, (6,), generator=random)
    optimizer = torch.optim.SGD(top.parameters(), lr=0.5)
    for step in range(2):
        outputs = top(features, keys, aggregate, near)
        assert bool(outputs.any()) == (step == 1)
        aggregate.grad = None
        optimizer.zero_grad()
        nn.functional.cross_entropy(outputs, targets).backward()
        optimizer.step()
    assert aggregate.grad is not None
    assert bool(aggregate.grad.abs().sum() > 0)


class Foreign(nn.Module):
    """A top model of another package."""

    def __init__(self, last: Callable[[Tensor, nn.ModuleDict], Tensor]) -> None:
        super().__init__()
        self.positions = nn.Identity()
        self.parts = nn.ModuleDict(
            {
                "inner": nn.Linear(F, OUT),
                "one": nn.Linear(OUT, OUT),
                "other": nn.Linear(OUT, OUT),
                "cell": nn.Bilinear(OUT, OUT, OUT),
            }
        )
        self.last = last

    def forward(
        self, features: Tensor, keys: Tensor, aggregate: Tensor, similarities: Tensor | None
    ) -> Tensor:
        return self.last(features, self.parts)


def tried(last: Callable[[Tensor, nn.ModuleDict], Tensor]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    inner = Foreign(last)
    inputs = trial_inputs(num_features=F, key_dim=D, cut_shape=(1, 2), similarities=None)
    top = starting_at_zero(inner, inputs)
    assert not top(*inputs).any()
    return top, inner


def test_terms_of_a_sum_are_silenced_and_no_layer_below_them() -> None:
    """Two layers are added up, and the one below them keeps its weights."""
    top, inner = tried(
        lambda x, parts: (
            parts["one"](parts["inner"](x).tanh()) + parts["other"](parts["inner"](x).relu())
        )
    )
    assert top is inner
    weights = {name: bool(part.weight.any()) for name, part in inner.parts.items()}
    assert weights == {"inner": True, "one": False, "other": False, "cell": True}


def test_what_no_linear_layer_ends_is_put_behind_a_gate_that_learns() -> None:
    """A bilinear layer plus one: a gate of zero, which has a gradient."""
    top, inner = tried(lambda x, parts: parts["cell"](parts["inner"](x), parts["inner"](x)) + 1)
    assert isinstance(top, Gated)
    assert bool(inner.parts["inner"].weight.any())
    inputs = trial_inputs(num_features=F, key_dim=D, cut_shape=(1, 2), similarities=None)
    top(*inputs).sum().backward()
    assert float(top.gate.grad) != 0
