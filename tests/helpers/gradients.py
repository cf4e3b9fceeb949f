"""Whether the gradient that every party gets is the loss's: autograd against finite differences.

Run in ``tests`` as ``python -m helpers.gradients`` for a table over all families.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from securevfl.federation.rounds.cut import AGGREGATIONS, Aggregation, CutLayer
from securevfl.models.family import AnyFamily, FamilySettings
from securevfl.models.registry import FAMILIES
from securevfl.mpc.codec import RingFormat

ROWS, FEATURES, KEYS, OUTPUTS = 4, 5, 2, 3
STEP = 1e-6

PAIR: Mapping[str, Any] = {"hidden": 6, "layer_width": 8}
GATES: Mapping[str, Any] = {**PAIR, "neighbours": 6, "dropout": 0.0}
FET: Mapping[str, Any] = {"neighbours": 6, "hidden": 8, "heads": 2, "dropout": 0.0}

CASES: Mapping[str, tuple[str, Mapping[str, Any], bool]] = {
    "fedsim": ("fedsim", GATES, False),
    "fedsim, as it comes": ("fedsim", {**GATES, "pair_scale": "none"}, False),
    "fedsim, convolution": (
        "fedsim",
        {**GATES, "merge": "convolution", "weight": "learned"},
        False,
    ),
    "fedsim, perceptron": ("fedsim", {**GATES, "merge": "perceptron"}, False),
    "fedsim, average": ("fedsim", {**GATES, "merge": "average"}, False),
    "exact": ("exact", PAIR, False),
    "top1sim": ("top1sim", PAIR, False),
    "avgsim": ("avgsim", {**PAIR, "neighbours": 6}, False),
    "avgsim, as it comes": ("avgsim", {**PAIR, "neighbours": 6, "pair_scale": "none"}, False),
    "featuresim": ("featuresim", {**PAIR, "neighbours": 6}, False),
    "fet": ("fet", FET, False),
    "fet, one vector a row": (
        "fet",
        {**FET, "release": "pooled"},
        False,
    ),
    "fet, additive, pooled by record": (
        "fet",
        {**FET, "release": "pooled", "top": "additive"},
        True,
    ),
    "fedhssl": ("fedhssl", {"hidden": 8, "encoder_hidden": 8, "norm": "layer"}, False),
    "fedhssl, batch norm": ("fedhssl", {"hidden": 8, "encoder_hidden": 8}, False),
    "fedsplitnn": ("fedsplitnn", {"hidden": 8, "encoder_hidden": 8, "norm": "none"}, False),
}
"""Label to family, settings, and whether its frozen encoders are meant."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What one batch holds: the primary's rows, and every secondary's links."""

    features: Float[Tensor, "batch features"]
    keys: Float[Tensor, "batch dimension"]
    similarities: Float[Tensor, "batch secondaries links"]
    targets: Float[Tensor, "batch outputs"]
    links: Sequence[
        tuple[
            Float[Tensor, "batch links features"],
            Float[Tensor, "batch links dimension"],
            Bool[Tensor, "batch links"],
        ]
    ]


class Network:
    """Every party's models, and the average between them, as one autograd graph."""

    def __init__(
        self, label: str, *, secondaries: int, clip_norm: float, dtype: torch.dtype, seed: int = 0
    ) -> None:
        name, table, frozen = CASES[label]
        self.family: AnyFamily = FAMILIES[name]
        self.settings: FamilySettings = self.family.settings_from(table)
        self.dtype = dtype
        with default_dtype(dtype), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.bottoms = [
                self.family.build_bottom(
                    self.settings, num_features=FEATURES, key_dim=KEYS, frozen=frozen
                )
                for _ in range(secondaries)
            ]
            self.top = self.family.build_top(
                self.settings, num_features=FEATURES, key_dim=KEYS, outputs=OUTPUTS, classes=True
            )
            for model in (*self.bottoms, self.top):
                model.train(not frozen)
            for part in self.parameters():
                # Layers that start at zero would hide what does not reach them.
                part.data.normal_(std=0.5)
                part.requires_grad_()
            self.inputs = self._inputs()
        shape = self.family.cut_shape(self.settings)
        kind = AGGREGATIONS[self.family.aggregation(self.settings, frozen=frozen)]
        ring = RingFormat.choose(clip_norm=clip_norm, noise_share_std=0.0, parties=secondaries)
        slots = self.settings.neighbours if kind.pooled else 1
        self.aggregation: Aggregation = kind(
            CutLayer(ring=ring, slots=slots, shape=shape, clip_norm=clip_norm)
        )

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters, those of the bottoms first."""
        return [part for model in (*self.bottoms, self.top) for part in model.parameters()]

    def norms(self) -> Float[Tensor, " norms"]:
        """Return the norms that the clip is about, of all secondaries."""
        dims = (2,) if self.aggregation.pooled else (1, 2)
        with default_dtype(self.dtype), torch.no_grad():
            return torch.cat(
                [
                    torch.linalg.vector_norm(bottom(*links), dim=dims).flatten()
                    for bottom, links in zip(self.bottoms, self.inputs.links, strict=True)
                ]
            )

    def outputs(self, aggregate: Tensor) -> Tensor:
        """Return what the top model makes of an aggregate."""
        inputs = self.inputs
        needed = self.family.needs_similarities(self.settings)
        similarities = inputs.similarities if needed else None
        out: Tensor = self.top(inputs.features, inputs.keys, aggregate, similarities)
        return out

    def loss(self) -> Float[Tensor, ""]:
        """Return the loss of the batch, on one graph."""
        with default_dtype(self.dtype):
            terms = [
                self.aggregation.term(self.aggregation.clip(bottom(*links)))
                for bottom, links in zip(self.bottoms, self.inputs.links, strict=True)
            ]
            return self.squares(self.outputs(torch.stack(terms).mean(dim=0)))

    def squares(self, outputs: Tensor) -> Float[Tensor, ""]:
        """Return a smooth loss of outputs."""
        return (outputs - self.inputs.targets).square().mean()

    def _inputs(self) -> Inputs:
        count, links = len(self.bottoms), self.settings.neighbours
        present = torch.ones(count, ROWS, links, dtype=torch.bool)
        if links > 1:
            present[:, 1, -2:] = False
        similarities = torch.randn(ROWS, count, links).sort(dim=2, descending=True).values
        similarities[~present.transpose(0, 1)] = float("nan")
        return Inputs(
            features=torch.randn(ROWS, FEATURES),
            keys=torch.randn(ROWS, KEYS),
            similarities=similarities,
            targets=torch.randn(ROWS, OUTPUTS),
            links=[
                (torch.randn(ROWS, links, FEATURES), torch.randn(ROWS, links, KEYS), present[rank])
                for rank in range(count)
            ],
        )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors of a type, and then as before."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def relative_error(label: str, *, secondaries: int, bites: bool, directions: int = 40) -> float:
    """Return how far autograd is from central differences, relative to the gradient's norm.

    It is the gradient of the secondaries' parameters where they learn, which comes through the
    top model, the average and the clip; else the top's. Along a random direction a difference of
    norm e shows as e / sqrt(n) on average; what is returned estimates e from that.

    Args:
        label: Of :data:`CASES`.
        secondaries: Their number.
        bites: Whether the clip shortens every row, or none.
        directions: Along how many directions to look.
    """
    probe = Network(label, secondaries=secondaries, clip_norm=1.0, dtype=torch.float64).norms()
    there = probe[probe > 0]
    clip_norm = float(there.min()) / 2 if bites else float(there.max()) * 2
    network = Network(label, secondaries=secondaries, clip_norm=clip_norm, dtype=torch.float64)
    parts = [p for bottom in network.bottoms for p in bottom.parameters()] or network.parameters()
    gradients = torch.autograd.grad(network.loss(), parts, allow_unused=True)
    flat = torch.cat(
        [
            (torch.zeros_like(part) if gradient is None else gradient).flatten()
            for part, gradient in zip(parts, gradients, strict=True)
        ]
    )
    random = torch.Generator().manual_seed(1)
    total = 0.0
    for _ in range(directions):
        drawn = torch.randn(flat.shape, generator=random, dtype=flat.dtype)
        direction = drawn / drawn.norm()
        total += (_slope(network, parts, direction) - float(flat @ direction)) ** 2
    return (total / directions * len(flat)) ** 0.5 / float(flat.norm())


def _slope(network: Network, parts: Sequence[Tensor], direction: Tensor) -> float:
    values = []
    pieces = direction.split([part.numel() for part in parts])
    for sign in (1.0, -1.0):
        with torch.no_grad():
            for part, piece in zip(parts, pieces, strict=True):
                part.add_(piece.view_as(part), alpha=sign * STEP)
            values.append(float(network.loss()))
            for part, piece in zip(parts, pieces, strict=True):
                part.sub_(piece.view_as(part), alpha=sign * STEP)
    return (values[0] - values[1]) / (2 * STEP)


def main() -> None:
    """Write the relative error of every family as a table."""
    kinds = [(count, bites) for bites in (True, False) for count in (1, 2, 4)]
    heads = [f"{count}, {'clipped' if bites else 'not clipped'}" for count, bites in kinds]
    lines = [f"| model \\ secondaries | {' | '.join(heads)} |", "| --- |" + " --- |" * len(kinds)]
    for label in CASES:
        errors = [relative_error(label, secondaries=n, bites=bites) for n, bites in kinds]
        lines.append(f"| {label} | {' | '.join(f'{error:.1e}' for error in errors)} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
