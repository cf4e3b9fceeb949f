"""Assisted boosting: settings, local models of a round, both halves, and the family.

In local models n = rows, K = links of a row, F = inputs of a record, O = outputs; in the halves
B = rows of a batch, F = features, D = key dimension.
"""

import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Shaped
from torch import Tensor, nn

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.files import require_unpackable
from securevfl.models.alone.margins import LEAST_PROBABILITY
from securevfl.models.family import Family
from securevfl.models.tasks import TaskHead

# Settings.


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistConfig:
    """The ``[model]`` table of ``family = "assist"``."""

    outputs: int = 1
    """Numbers of a score: the classes of a multiclass task, otherwise 1. Every party plans by it,
    and the primary refuses one that its labels do not have."""

    rounds: int = 4
    """T, how often the primary sends residuals and every secondary fits a model to them, at most.
    It takes the place of ``training.epochs``."""

    neighbours: int = 1
    """K, links of a row at every secondary."""

    estimator: Literal["boosting", "forest", "linear"] = "boosting"
    """What a secondary fits: ``boosting``, histogram boosting, trees for each output by itself;
    ``forest``, a random forest of trees for all outputs together, much faster with many classes;
    ``linear``, ridge regression whose penalty is chosen by generalised cross-validation."""

    trees: int = 50
    """Trees of a round's model, for each output where they are boosted."""

    leaves: int = 15
    """Leaves of a tree, at most."""

    label_epsilon: float | None = None
    """What secondaries may learn of how any one training row is labelled, all of them together and
    over all rounds: labels are randomised once, and nothing that is sent is made of others. None:
    what is sent shows labels."""

    label_lower: float | None = None
    """Least label of a regression that counts under ``label_epsilon``, in the label's own unit:
    lower ones are raised to it. Not to be taken from the labels."""

    label_upper: float | None = None
    """Largest label that counts under ``label_epsilon``; higher ones are lowered to it."""

    keys_as_features: bool = False
    """Whether a record's keys are inputs beside its features; they must be numbers then."""

    party_dropout: ClassVar[float] = 0.0
    """All secondaries take part in every round."""

    average_positions_every: ClassVar[int] = 0
    """There are no positional encodings to average."""

    @property
    def cut_shape(self) -> tuple[int, int]:
        """One score a row."""
        return 1, self.outputs

    def __post_init__(self) -> None:
        checks.within(1, checks.MOST_WIDTH, outputs=self.outputs)
        checks.within(1, checks.MOST_LINKS, neighbours=self.neighbours)
        checks.within(1, checks.MOST_TIMES, rounds=self.rounds, trees=self.trees)
        checks.within(2, checks.MOST_TIMES, leaves=self.leaves)
        checks.one_of(("boosting", "forest", "linear"), estimator=self.estimator)
        if self.label_epsilon is not None:
            checks.positive(label_epsilon=self.label_epsilon)


# A secondary's local model of one round: from its linked records to the primary's residuals.

FOLDS: Final = 3
"""Parts of the training rows, each of which is scored by a model that never saw it."""

_FEWEST: Final = 2 * FOLDS
"""Linked training rows without which nothing is fitted."""

_MOST_UNPACKED: Final = 2**30
"""Bytes of the models of all rounds, which are kept packed."""

_TRUSTED: Final = (
    "numpy.dtype",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.tree._tree.Tree",
)
"""What a kept model may hold beside what skops knows to be safe."""


def inputs_of(
    records: Float32[np.ndarray, "rows links inputs"], present: Bool[np.ndarray, "rows links"]
) -> Float64[np.ndarray, "rows columns"]:
    """Return what a local model reads of rows: their records, one after another by rank.

    Behind the records comes their mean, where there are several. What is missing is NaN. How near
    a link is does not come in: under most protections of linkage a secondary does not know it.
    """
    table = records.astype(np.float64)
    table[~present] = np.nan
    rows, links, width = table.shape
    columns = table.reshape(rows, links * width)
    if links == 1:
        return columns
    known = np.maximum(present.sum(axis=1), 1)[:, None]
    mean = np.where(present[:, :, None], table, 0.0).sum(axis=1) / known
    mean[~present.any(axis=1)] = np.nan
    return np.hstack([columns, mean])


def cross_fit(
    settings: AssistConfig,
    inputs: Float64[np.ndarray, "rows columns"],
    residuals: Float32[np.ndarray, "rows outputs"],
    *,
    seed: int,
) -> tuple[Any, Float32[np.ndarray, "rows outputs"]]:
    """Fit a model to rows that are linked, and score each of them by one that never saw it.

    Args:
        settings: The family's settings.
        inputs: What :func:`inputs_of` returned for the rows.
        residuals: What is to be explained.
        seed: Of folds and trees.

    Returns:
        The model of all rows, None where they are too few, and the scores out of fold. A forest's
        are those of the trees that did not draw the row.
    """
    scores = np.zeros(residuals.shape, dtype=np.float32)
    if len(inputs) < _FEWEST:
        return None, scores
    model = _fitted(settings, inputs, residuals, seed=seed)
    if settings.estimator == "forest":
        drawn = model.oob_prediction_.reshape(residuals.shape)
        # A row that every tree drew, as happens with few trees, has no score.
        return model, np.nan_to_num(drawn).astype(np.float32)
    from sklearn.model_selection import KFold

    folds = KFold(FOLDS, shuffle=True, random_state=seed)
    for rest, held_out in folds.split(inputs):
        part = _fitted(settings, inputs[rest], residuals[rest], seed=seed)
        scores[held_out] = predicted(part, inputs[held_out], outputs=residuals.shape[1])
    return model, scores


def predicted(
    model: Any, inputs: Float64[np.ndarray, "rows columns"], *, outputs: int
) -> Float32[np.ndarray, "rows outputs"]:
    """Return a model's scores of rows; zeros of a round in which nothing was fitted."""
    if model is None or not len(inputs):
        return np.zeros((len(inputs), outputs), dtype=np.float32)
    scores = np.asarray(model.predict(inputs), dtype=np.float32)
    return scores.reshape(len(inputs), outputs)


def within_ball(
    scores: Float[np.ndarray, "rows outputs"],
) -> Float32[np.ndarray, "rows outputs"]:
    """Return scores of norm at most 1, as the residuals have."""
    norm = np.linalg.norm(scores, axis=1, keepdims=True)
    return (scores / np.maximum(norm, 1.0)).astype(np.float32)


def packed(models: list[Any]) -> bytes:
    """Return models as bytes that hold no code; see :func:`unpacked`."""
    import skops.io  # It brings scikit-learn, which other families never use.

    return bytes(skops.io.dumps(models, compression=zipfile.ZIP_DEFLATED))


def unpacked(data: bytes) -> list[Any]:
    """Return the models that :func:`packed` was given.

    Raises:
        ValueError: If they are something else.
    """
    import skops.io

    try:
        require_unpackable(data, most=_MOST_UNPACKED)
        models = skops.io.loads(data, trusted=list(_TRUSTED))
    except Exception as error:
        raise ValueError("these are no local models of assisted boosting") from error
    if not isinstance(models, list):
        raise ValueError("these are no local models of assisted boosting")
    return models


def _fitted(
    settings: AssistConfig,
    inputs: Float64[np.ndarray, "rows columns"],
    residuals: Float32[np.ndarray, "rows outputs"],
    *,
    seed: int,
) -> Any:
    model = _unfitted(settings, rows=len(inputs), seed=seed)
    with warnings.catch_warnings():
        # A forest warns of rows that all its trees drew.
        warnings.simplefilter("ignore", UserWarning)
        return model.fit(inputs, residuals)


def _unfitted(settings: AssistConfig, *, rows: int, seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import RidgeCV
    from sklearn.multioutput import MultiOutputRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if settings.estimator == "linear":
        # RidgeCV's folds are rows left out one by one, which is free for a ridge.
        return make_pipeline(
            SimpleImputer(keep_empty_features=True),
            StandardScaler(),
            RidgeCV(np.logspace(-3, 4, 15)),
        )
    if settings.estimator == "forest":
        return RandomForestRegressor(
            settings.trees,
            max_leaf_nodes=settings.leaves,
            min_samples_leaf=2,
            max_features=1 / 3,
            oob_score=True,
            random_state=seed,
        )
    return MultiOutputRegressor(
        HistGradientBoostingRegressor(
            max_iter=settings.trees,
            max_leaf_nodes=settings.leaves,
            # scikit-learn's own 20 can't split forty rows.
            min_samples_leaf=min(20, max(3, rows // 50)),
            early_stopping=False,
            random_state=seed,
        )
    )


# The two halves of assisted boosting: a secondary's models, and the number that scales their
# sum.


class AssistBottom(nn.Module):
    """A secondary's models of all rounds so far; a row's score is their mean, weighted by steps.

    Every model's score is kept within the unit ball, and so their mean is too: what a prediction
    releases never meets a clip that training did not meet. Which records a row has is all that it
    reads of the links, and a row without any scores zero.
    """

    recordwise = False

    def __init__(self, config: AssistConfig) -> None:
        super().__init__()
        self.config = config
        self.positions = nn.Identity()
        self._models: list[Any] = []
        self._steps: list[float] = []

    def add(self, model: Any, step: float) -> None:
        """Take a round's model in, with the primary's step."""
        self._models.append(model)
        self._steps.append(step)

    def forward(
        self,
        features: Float[Tensor, "batch links features"],
        keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch one outputs"]:
        """Return the scores of a batch."""
        linked = present.any(dim=1).cpu().numpy()
        scores = np.zeros((len(linked), self.config.outputs), dtype=np.float32)
        total = sum(self._steps)
        if total and linked.any():
            inputs = self.inputs(features, keys, present)[linked]
            for model, step in zip(self._models, self._steps, strict=True):
                found = predicted(model, inputs, outputs=self.config.outputs)
                scores[linked] += step / total * within_ball(found)
        return torch.from_numpy(scores).unsqueeze(1).to(features.device)

    def inputs(
        self,
        features: Float[Tensor, "batch links features"],
        keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[np.ndarray, "batch columns"]:
        """Return what the models read of a batch."""
        records = torch.cat([features, keys], dim=2) if self.config.keys_as_features else features
        return inputs_of(records.cpu().numpy(), present.cpu().numpy())

    def get_extra_state(self) -> Tensor:
        """Return models and steps as bytes, so that they are kept like any other weights."""
        blob = packed([self._steps, self._models])
        return torch.from_numpy(np.frombuffer(blob, dtype=np.uint8).copy())

    def set_extra_state(self, state: Tensor) -> None:
        """Go back to what :meth:`get_extra_state` returned.

        Raises:
            RuntimeError: If it is something else, as :meth:`load_state_dict` raises.
        """
        try:
            steps, models = unpacked(state.cpu().numpy().tobytes())
            if len(steps) != len(models):
                raise ValueError("a step is missing")
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        self._steps, self._models = list(steps), list(models)


class AssistTop(nn.Module):
    """The primary's half: where it starts from, and the secondaries' average times one number.

    Nothing of it is trained by gradients.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.positions = nn.Identity()
        self.start = nn.Parameter(torch.zeros(outputs), requires_grad=False)
        """Margin of a row of which nothing is known."""
        self.scale = nn.Parameter(torch.zeros(()), requires_grad=False)
        """Steps of all rounds together, in units of the average."""

    def forward(
        self,
        features: Float[Tensor, "batch features"],  # noqa: ARG002
        keys: Float[Tensor, "batch dimension"],  # noqa: ARG002
        aggregate: Float[Tensor, "batch one outputs"],
        similarities: Float[Tensor, "batch secondaries links"] | None,  # noqa: ARG002
    ) -> Float[Tensor, "batch outputs"]:
        """Return the margins of a batch."""
        return self.start + self.scale * aggregate[:, 0]


# The primary's step: residuals, and the step length along the secondaries' scores.

_LONGEST: Final = 50.0
"""Of a step, in units of the longest residual: with separable classes the best one has no end."""

_ACCURACY: Final = 1e-3
"""Of a step, in the same units."""


def constant_margin(targets: Shaped[Tensor, " rows"], head: TaskHead) -> Float[Tensor, " outputs"]:
    """Return the margin of a row of which nothing is known but that its label is one of these."""
    if head.task == "regression":
        return targets.mean().reshape(1)
    if head.task == "binary":
        return targets.mean().clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY).logit().reshape(1)
    counts = torch.bincount(targets, minlength=head.outputs)
    return (counts / len(targets)).clamp_min(LEAST_PROBABILITY).log()


def residuals_of(
    margins: Float[Tensor, "rows outputs"], targets: Shaped[Tensor, "rows ..."], head: TaskHead
) -> Float[Tensor, "rows outputs"]:
    """Return each row's negative gradient of its loss with respect to its margin.

    That is label minus margin times two (regression, standardised), label minus probability
    (binary), or the class's indicator minus its probability.
    """
    at = margins.detach().clone().requires_grad_()
    with torch.enable_grad():
        loss = head.loss(at, targets) * len(targets)
        (gradient,) = torch.autograd.grad(loss, at)
    return -gradient


def best_step(
    margins: Float[Tensor, "rows outputs"],
    scores: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, "rows ..."],
    head: TaskHead,
    *,
    unit: float,
) -> float:
    """Return the step that makes the mean loss of ``margins + step * scores`` smallest.

    The loss is convex in it. A step that brings no gain is 0.

    Args:
        margins: Of training rows.
        scores: The sum of all secondaries' scores of these, out of fold.
        targets: Their labels.
        head: The task.
        unit: Norm of the longest residual.
    """
    from scipy.optimize import minimize_scalar  # slow to load, and only a primary's

    wide, add = margins.double(), scores.double()
    labels = targets.double() if targets.is_floating_point() else targets

    def loss(step: float) -> float:
        return float(head.loss(wide + step * unit * add, labels))

    found = minimize_scalar(
        loss, bounds=(0.0, _LONGEST), method="bounded", options={"xatol": _ACCURACY}
    )
    return float(found.x) * unit if found.fun < loss(0.0) else 0.0


# Family.


class AssistFamily(Family[AssistConfig]):
    """``family = "assist"``: residuals go out, and the sum of the secondaries' scores comes back.

    It is of the kind of Assisted Learning (Xian et al., 2020) and Gradient Assisted Learning (Diao
    et al., NeurIPS 2022); docs/assist.md says where it is another one.
    """

    name = "assist"
    settings_class = AssistConfig
    assisted = True

    def build_bottom(
        self,
        settings: AssistConfig,
        *,
        num_features: int,  # noqa: ARG002
        key_dim: int,  # noqa: ARG002
        feature_names: Sequence[str] = (),  # noqa: ARG002
        frozen: bool = False,  # noqa: ARG002
    ) -> nn.Module:
        """Return a secondary's half before the first round: every score is zero."""
        return AssistBottom(settings)

    def build_top(
        self,
        settings: AssistConfig,  # noqa: ARG002
        *,
        num_features: int,  # noqa: ARG002
        key_dim: int,  # noqa: ARG002
        feature_names: Sequence[str] = (),  # noqa: ARG002
        outputs: int,
        classes: bool = False,  # noqa: ARG002
    ) -> nn.Module:
        """Return the primary's half before the first round."""
        return AssistTop(outputs)

    def epochs(self, settings: AssistConfig, *, asked: int) -> int:  # noqa: ARG002
        """Return the rounds: each is an epoch of the protocol."""
        return settings.rounds

    def label_epsilon(self, settings: AssistConfig) -> float | None:
        """Return what secondaries may learn of one training row's label; None promises nothing."""
        return settings.label_epsilon

    def require_outputs(self, settings: AssistConfig, outputs: int) -> None:
        """Refuse a width of scores that is not that of the labels.

        Raises:
            ConfigError: Saying what to write.
        """
        if settings.outputs != outputs:
            raise ConfigError(
                f"model.outputs: is {settings.outputs}, and the label asks for {outputs}; write "
                f"model.outputs = {outputs}, which all parties plan by"
            )
