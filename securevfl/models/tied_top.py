"""A top model of few numbers for releases that are mostly noise: it adds evidence to a base.

B = rows of a batch, H = numbers of a release, O = outputs.
"""

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from securevfl.models.optimisers import uncompiled
from securevfl.models.tasks import TaskHead

PENALTIES: Final = (1.0, 10.0, 100.0, 1e3, 1e4)
"""On the squares of what is not tied, over one unit of loss a row, of which training chooses."""

_STEPS: Final = 200


class TiedTop(nn.Module):
    """``t V T + V W + c`` of a release V, in units of its deviation; T ties votes to outputs.

    T says what votes mean: a number for each class is evidence for that class, the last of two is
    evidence for the second, and those of a regression's ordered classes are evidence for a value
    that rises with them. One number, t, says how much such evidence weighs; W, which a penalty
    draws to zero, says what differs from that.

    An addition to the papers. Given the label, where releases' noise is Gaussian and outweighs
    their own spread, the label's log-odds are linear in the release.
    """

    def __init__(self, *, width: int, outputs: int) -> None:
        """Make one that adds nothing yet.

        Args:
            width: H.
            outputs: O.
        """
        super().__init__()
        self.positions = nn.Identity()
        self.scale: Tensor
        self.tie: Tensor
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("tie", _tie(width, outputs))
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.own = nn.Parameter(torch.zeros(width, outputs, dtype=torch.float64))
        self.offset = nn.Parameter(torch.zeros(outputs, dtype=torch.float64))

    def forward(
        self,
        features: Float[Tensor, "batch features"],  # noqa: ARG002
        keys: Float[Tensor, "batch dimension"],  # noqa: ARG002
        aggregate: Float[Tensor, "batch positions width"],
        similarities: Float[Tensor, "batch secondaries links"] | None,  # noqa: ARG002
    ) -> Float[Tensor, "batch outputs"]:
        """Return what is added to the base."""
        return self.added(aggregate.flatten(1)).float()

    def added(self, released: Float[Tensor, "rows width"]) -> Float[Tensor, "rows outputs"]:
        """Return the same of releases without positions, in float64."""
        votes = released.double() / self.scale
        added: Tensor = self.weight * (votes @ self.tie) + votes @ self.own + self.offset
        return added

    def fit(
        self,
        released: Float[Tensor, "rows width"],
        base: Float[Tensor, "rows outputs"],
        targets: Shaped[Tensor, " rows"],
        head: TaskHead,
        *,
        penalty: float,
    ) -> None:
        """Fit all numbers to rows, from zero; convex, so that nothing is drawn.

        Args:
            released: The rows' releases.
            base: What is added to.
            targets: The rows' labels, as the head takes them.
            head: The task.
            penalty: On the squares of W, > 0.
        """
        with torch.no_grad():
            deviation = released.double().std(correction=0)
            self.scale.copy_(torch.where(deviation > 0, deviation, torch.ones_like(deviation)))
            for one in self.parameters():
                one.zero_()
        optimizer = uncompiled(torch.optim.LBFGS)(
            self.parameters(), max_iter=_STEPS, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            outputs = base.double() + self.added(released)
            # A weak pull on the other numbers keeps them finite where rows are told apart.
            drawn = penalty * self.own.square().sum() + self.offset.square().sum()
            loss: Tensor = head.row_losses(outputs, targets).sum() + drawn / 2
            loss += self.weight.square() / 2
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)


def fit_tied(
    make: Callable[[], TiedTop],
    released: Float[Tensor, "rows width"],
    base: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
    head: TaskHead,
    *,
    folds: Shaped[Tensor, " rows"],
) -> tuple[TiedTop, Float[Tensor, "rows outputs"]]:
    """Return a top model that is fitted to all rows, and what it adds to each of them out of fold.

    The penalty is the one with the least loss out of fold.

    Args:
        make: Returns one that is not fitted.
        released: Releases of the training rows.
        base: Their base, out of fold.
        targets: Their labels.
        head: The task.
        folds: Which part each row is of.
    """
    best: tuple[float, float, Tensor] | None = None
    for penalty in PENALTIES:
        added = torch.zeros_like(base, dtype=torch.float64)
        for fold in folds.unique():
            held_out = folds == fold
            model = make()
            rest = ~held_out
            model.fit(released[rest], base[rest], targets[rest], head, penalty=penalty)
            with torch.no_grad():
                added[held_out] = model.added(released[held_out])
        loss = float(head.row_losses(base.double() + added, targets).mean())
        if best is None or loss < best[0]:
            best = loss, penalty, added
    assert best is not None, "there are penalties"
    whole = make()
    whole.fit(released, base, targets, head, penalty=best[1])
    return whole, best[2]


def _tie(width: int, outputs: int) -> Float[Tensor, "width outputs"]:
    if outputs == 1:
        return (
            torch.linspace(-1, 1, width, dtype=torch.float64)[:, None]
            if width > 1
            else (torch.ones(1, 1, dtype=torch.float64))
        )
    if width == outputs:
        return torch.eye(width, dtype=torch.float64)
    return torch.zeros(width, outputs, dtype=torch.float64)
