"""Top models fitted in one step: estimators and corrections of the base model.

B = rows of a batch, N = the primary's inputs, L and H = shape of the cut, S = secondaries,
K = links of a row, O = outputs.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor, nn

from securevfl.core.conventions import stream
from securevfl.core.devices import few_threads
from securevfl.core.errors import ConfigError
from securevfl.models.alone.choice import decide, mix_outputs
from securevfl.models.alone.margins import MarginModel, OwnInputs, cross_fit
from securevfl.models.alone.saving import model_bytes, model_of
from securevfl.models.family import Aggregate, RowFeatures, RowKeys, Similarities
from securevfl.models.optimisers import without_compiler
from securevfl.models.tasks import TaskHead


class FittedTop(nn.Module):
    """Top model without trainable weights: the margins of an estimator of scikit-learn.

    Its ``features`` are all of the primary's inputs, unscaled, and its ``keys`` are empty. Its
    state holds the estimator as bytes (:mod:`securevfl.models.alone.saving`), so that it is saved,
    hashed and loaded like weights, without running code.
    """

    def __init__(
        self,
        head: TaskHead,
        *,
        words: tuple[tuple[int, ...], ...],
        own: int,
        released: int,
        similarities: int,
    ) -> None:
        """Build an unfitted top model.

        Args:
            head: The task.
            words: Groups of the primary's inputs that are one column of words, as in
                :class:`OwnInputs`.
            own: N.
            released: L times H.
            similarities: S times K if links' similarities are inputs, else 0.
        """
        super().__init__()
        self.positions = nn.Identity()
        self.head = head
        self.words = words
        self.model: MarginModel | None = None
        self.filling: Tensor
        inputs = own + released + similarities
        self.register_buffer("filling", torch.zeros(inputs, dtype=torch.float64))

    def inputs(
        self, features: Float[Tensor, "batch own"], aggregate: Aggregate, similarities: Similarities
    ) -> Float64[np.ndarray, "batch inputs"]:
        """Return the estimator's inputs of each row; NaN where unknown."""
        parts = [features, aggregate, *([] if similarities is None else [similarities])]
        joined = torch.cat([part.flatten(1).double() for part in parts], dim=1)
        return joined.cpu().numpy()

    def fill_gaps(self, values: Float64[np.ndarray, "rows inputs"]) -> OwnInputs:
        """Return inputs with gaps filled by the training rows' means."""
        filling = np.broadcast_to(self.filling.cpu().numpy(), values.shape)
        return OwnInputs(values=np.where(np.isnan(values), filling, values), words=self.words)

    def fill_gaps_by(self, values: Float64[np.ndarray, "rows inputs"]) -> None:
        """Set the filling of gaps: each input's mean over the rows that have it, or 0."""
        there = ~np.isnan(values)
        totals = np.where(there, values, 0.0).sum(axis=0)
        means = torch.from_numpy(totals / np.maximum(there.sum(axis=0), 1))
        self.filling.copy_(means)

    def forward(
        self,
        features: Float[Tensor, "batch own"],
        keys: Float[Tensor, "batch 0"],
        aggregate: Aggregate,
        similarities: Similarities,
    ) -> Float[Tensor, "batch outputs"]:
        """Return the margins of a batch."""
        assert self.model is not None, "fitted before use"
        known = self.fill_gaps(self.inputs(features, aggregate, similarities))
        return torch.from_numpy(self.model.margins(known)).to(aggregate.device)

    def get_extra_state(self) -> Tensor:
        """Return the estimator's bytes and description, for torch."""
        content, about = b"", dict[str, Any]()
        if self.model is not None:
            content, about = model_bytes(self.model)
        whole = json.dumps({**about, "words": self.words}).encode() + b"\n" + content
        return torch.frombuffer(bytearray(whole), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Load an estimator from its state, for torch.

        Raises:
            ConfigError: If it is damaged, or contains types that are not scikit-learn's.
        """
        head, _, content = state.cpu().numpy().tobytes().partition(b"\n")
        try:
            about: Mapping[str, Any] = json.loads(head)
            self.words = tuple(tuple(group) for group in about["words"])
            model = model_of(content, about, self.head) if content else None
        except ConfigError:
            raise
        except Exception as error:
            # skops raises any error of an estimator's own loading.
            raise ConfigError("model.top: the saved estimator is damaged") from error
        assert model is None or isinstance(model, MarginModel), "kept from here"
        self.model = model


PENALTIES: Final = (1.0, 10.0, 100.0, 1e3, 1e4)
"""Candidate penalties on the squares of W, per unit of loss of a row."""

_STEPS: Final = 200


class TiedTop(nn.Module):
    """Linear correction ``t V T + V W + c`` of the base, with V a release over its deviation.

    T is fixed and maps the class scores in V to outputs: each class's score counts for that class,
    and one score for the second of two, or for a rising value. The scalar t weights this evidence;
    W, shrunk to zero by a penalty, corrects it.

    An addition to the papers. A symbol is its score's posterior mean up to a factor; if the noise
    of releases is Gaussian and larger than their spread, the label's log-odds are linear in them.
    """

    of_base = 1.0

    def __init__(self, *, width: int, outputs: int) -> None:
        """Build a correction of zero.

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
        self, features: RowFeatures, keys: RowKeys, aggregate: Aggregate, similarities: Similarities
    ) -> Float[Tensor, "batch outputs"]:
        """Return the correction of the base."""
        return self.correct(aggregate.flatten(1)).float()

    def correct(self, released: Float[Tensor, "rows width"]) -> Float[Tensor, "rows outputs"]:
        """Return the correction for flat releases, in float64."""
        evidence = released.double() / self.scale
        return self._sum(evidence @ self.tie, evidence)

    def _sum(
        self, tied: Float[Tensor, "rows outputs"], evidence: Float[Tensor, "rows width"]
    ) -> Float[Tensor, "rows outputs"]:
        added: Tensor = self.weight * tied + evidence @ self.own + self.offset
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
        """Fit all parameters to rows, starting from zero: a convex problem.

        Args:
            released: The rows' releases.
            base: The rows' base margins.
            targets: The rows' labels, as the head takes them.
            head: The task.
            penalty: Penalty on the squares of W, > 0.
        """
        with torch.no_grad():
            deviation = released.double().std(correction=0)
            self.scale.copy_(torch.where(deviation > 0, deviation, torch.ones_like(deviation)))
            for parameter in (self.weight, self.own, self.offset):
                parameter.zero_()
        optimizer = without_compiler(torch.optim.LBFGS)(
            self.parameters(), max_iter=_STEPS, line_search_fn="strong_wolfe"
        )
        exact, evidence = base.double(), released.double() / self.scale
        tied = evidence @ self.tie

        def closure() -> Tensor:
            optimizer.zero_grad()
            outputs = exact + self._sum(tied, evidence)
            # A weak penalty on the other parameters keeps them finite if the rows are separable.
            drawn = penalty * self.own.square().sum() + self.offset.square().sum()
            loss: Tensor = head.row_losses(outputs, targets).sum() + drawn / 2
            loss += self.weight.square() / 2
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)


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


def fit_tied(
    make: Callable[[], TiedTop],
    released: Float[Tensor, "rows width"],
    base: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
    head: TaskHead,
    *,
    folds: Shaped[Tensor, " rows"],
) -> tuple[TiedTop, Float[Tensor, "rows outputs"]]:
    """Return a correction fitted to all rows, and corrections out of fold.

    The penalty is chosen by loss out of fold.

    Args:
        make: Returns an unfitted correction.
        released: The training rows' releases.
        base: Their base margins, out of fold.
        targets: Their labels.
        head: The task.
        folds: Fold of each row.
    """
    corrections, losses = {}, {}
    for penalty in PENALTIES:
        added = torch.zeros_like(base, dtype=torch.float64)
        for fold in folds.unique():
            held_out = folds == fold
            model = make()
            rest = ~held_out
            model.fit(released[rest], base[rest], targets[rest], head, penalty=penalty)
            with torch.no_grad():
                added[held_out] = model.correct(released[held_out])
        corrections[penalty] = added
        losses[penalty] = float(head.row_losses(base.double() + added, targets).mean())
    best = min(PENALTIES, key=lambda penalty: losses[penalty])
    whole = make()
    whole.fit(released, base, targets, head, penalty=best)
    return whole, corrections[best]


_MIXED_BY: Final = 20_000
"""Largest number of training rows for fitting and weighing the trees."""


class MixedTop(nn.Module):
    """Top model ``(1 - w) (base + correction) + w trees``, with w in [0, 1] chosen by loss.

    The correction is a :class:`TiedTop`. The trees are boosted on all of the primary's inputs and
    released numbers, and find interactions of both.

    An addition to the papers.
    """

    def __init__(self, tied: TiedTop, trees: FittedTop) -> None:
        """Build a top model that is the correction alone.

        Args:
            tied: The correction.
            trees: Unfitted trees.
        """
        super().__init__()
        self.positions = nn.Identity()
        self.tied = tied
        self.trees = trees
        self.mixed: Tensor
        self.register_buffer("mixed", torch.zeros(3, dtype=torch.float64))

    @property
    def share(self) -> float:
        """The trees' weight w."""
        return float(self.mixed[0])

    @property
    def of_base(self) -> float:
        """The base's share in the joint margin."""
        return 1 - self.share

    def forward(
        self, features: RowFeatures, keys: RowKeys, aggregate: Aggregate, similarities: Similarities
    ) -> Float[Tensor, "batch outputs"]:
        """Return the outputs to add to the base's share."""
        added: Tensor = self.tied(features, keys, aggregate, similarities)
        if not self.share:
            return added
        trees = self.trees(features, keys, aggregate, similarities)
        return mix_outputs(added, trees, self.share)

    def fit(
        self,
        values: Float64[np.ndarray, "rows inputs"],
        tied: Float[Tensor, "rows outputs"],
        targets: Shaped[Tensor, " rows"],
        *,
        seed: int,
        keys: Int64[np.ndarray, " rows"] | None = None,
    ) -> Float[Tensor, "rows outputs"]:
        """Fit the trees and their weight; return the rows' joint margins out of fold.

        Trees that are not better than the correction alone by more than one standard error are
        dropped. At most :data:`_MIXED_BY` rows are used.

        Args:
            values: The trees' inputs.
            tied: Margins of base and correction, out of fold.
            targets: The rows' labels, as the head takes them.
            seed: Run seed.
            keys: A number for each row's key, where rows of one key share a release.
        """
        head, rows = self.trees.head, len(values)
        self.trees.fill_gaps_by(values)
        drawn = np.sort(stream(seed, "mixed-rows").permutation(rows)[:_MIXED_BY])
        labels = targets.cpu().numpy()
        known = self.trees.fill_gaps(values)
        with few_threads(known.values.size):
            fitted = cross_fit("boosting", known, labels, head, train=drawn, seed=seed, groups=keys)
        trees = torch.from_numpy(fitted.margins).to(tied)
        apart = None if keys is None else torch.from_numpy(keys).to(targets.device)
        decision = decide(head, base=tied, joint=trees, alone=tied, targets=targets, keys=apart)
        share = decision.scale if decision.used == "joint" else 0.0
        self.trees.model = fitted.model if share else None
        fitted_values = share, decision.gain, decision.error
        self.mixed.copy_(torch.tensor(fitted_values, dtype=torch.float64))
        return mix_outputs(tied, trees, share)

    def as_json(self) -> dict[str, float]:
        """Return the trees' weight, their gain out of fold and its standard error."""
        return dict(zip(("trees", "gain", "error"), self.mixed.tolist(), strict=True))
