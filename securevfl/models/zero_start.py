"""Top models whose outputs are zero when training begins, so that a sum with a base is the base."""

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models.split import Explained

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""What a :class:`securevfl.models.split.Top` reads."""


@runtime_checkable
class StartsAtZero(Protocol):
    """A top model that knows which of its weights are best zero when training begins."""

    def start_at_zero(self) -> None:
        """Make outputs zero by as few weights as possible, so that all others learn soon."""
        ...


class Gated(nn.Module):
    """A top model behind one number that starts at zero, and learns like its weights."""

    def __init__(self, top: nn.Module) -> None:
        super().__init__()
        self.top = top
        self.gate = nn.Parameter(torch.zeros(()))

    @property
    def positions(self) -> nn.Module:
        """The positional encoding, which parties may average."""
        return self.top.get_submodule("positions")

    def forward(
        self,
        features: Float[Tensor, "batch features"],
        keys: Float[Tensor, "batch dimension"],
        aggregate: Float[Tensor, "batch positions width"],
        similarities: Float[Tensor, "batch secondaries links"] | None,
    ) -> Float[Tensor, "batch outputs"]:
        """Return the outputs of a batch, times the gate."""
        out: Tensor = self.gate * self.top(features, keys, aggregate, similarities)
        return out

    def explain(
        self,
        features: Float[Tensor, "batch features"],
        keys: Float[Tensor, "batch dimension"],
        aggregate: Float[Tensor, "batch positions width"],
        similarities: Float[Tensor, "batch secondaries links"] | None,
    ) -> dict[str, Any]:
        """Return what the top model tells of a batch, if anything."""
        if not isinstance(self.top, Explained):
            return {}
        return self.top.explain(features, keys, aggregate, similarities)


def starting_at_zero(top: nn.Module, inputs: Inputs, *, gated: bool = False) -> nn.Module:
    """Return a top model whose outputs are zero until it learns.

    A model that is a :class:`StartsAtZero` does it by itself. In any other, linear layers are set
    to zero that are a term of the outputs, or without which all outputs are zero; the last one that
    is computed is looked at first. Where outputs are still not zero, the model comes back behind a
    gate.

    Args:
        top: With its initial weights, on the CPU; these change.
        inputs: A few rows of any numbers but zero.
        gated: Whether it is put behind a gate in any case, as a model whose weights are loaded
            later must be.
    """
    if gated:
        return Gated(top)
    run = _Trial(top, inputs)
    if isinstance(top, StartsAtZero):
        top.start_at_zero()
    _silence(run)
    return Gated(top) if run.speaks() else top


def ungated(model: nn.Module) -> nn.Module:
    """Return a model as its family has built it."""
    return model.top if isinstance(model, Gated) else model


def zero(weights: Iterable[Tensor]) -> None:
    """Set weights to zero, in place."""
    with torch.no_grad():
        for one in weights:
            one.zero_()


class _Trial:
    """A top model's outputs for a few rows, and those of each of its linear layers."""

    def __init__(self, top: nn.Module, inputs: Inputs) -> None:
        self._top = top
        self._inputs = inputs
        self.layers: dict[nn.Linear, Tensor] = {}
        """What each gave when the model was last asked, in the order of their calls."""

    def outputs(self) -> Tensor:
        self.layers.clear()
        linear = [module for module in self._top.modules() if isinstance(module, nn.Linear)]
        hooks = [module.register_forward_hook(self._heard) for module in linear]
        training = self._top.training
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                out: Tensor = self._top.eval()(*self._inputs)
        finally:
            self._top.train(training)
            for hook in hooks:
                hook.remove()
        return out

    def speaks(self) -> bool:
        return bool(self.outputs().any())

    def _heard(self, module: nn.Module, _inputs: object, output: Tensor) -> None:
        assert isinstance(module, nn.Linear), "hooked alone"
        self.layers.pop(module, None)
        # A copy: some models go on in place.
        self.layers[module] = output.clone()


def _silence(trial: _Trial) -> None:
    before = trial.outputs()
    given = dict(trial.layers)
    for layer in reversed(given):
        if not before.any():
            return
        weights = list(layer.parameters())
        kept = [one.detach().clone() for one in weights]
        zero(weights)
        after = trial.outputs()
        if not after.any() or _is_term(given[layer], before - after):
            before = after
            continue
        with torch.no_grad():
            for one, old in zip(weights, kept, strict=True):
                one.copy_(old)


def _is_term(given: Tensor, missing: Tensor) -> bool:
    """Whether what a layer gave is what the outputs lack without it."""
    return given.shape == missing.shape and torch.allclose(given, missing, rtol=1e-3, atol=1e-5)


def trial_inputs(
    *,
    num_features: int,
    key_dim: int,
    cut_shape: tuple[int, int],
    similarities: tuple[int, int] | None,
) -> Inputs:
    """Return two rows of random numbers, as a top model takes them.

    Args:
        num_features: Feature columns.
        key_dim: Key columns.
        cut_shape: (L, H) of the aggregate.
        similarities: Secondaries and links; None for a family that reads none.
    """
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(2, *shape, generator=random) + 0.1

    return (
        drawn(num_features),
        drawn(key_dim),
        drawn(*cut_shape),
        None if similarities is None else -drawn(*similarities),
    )
