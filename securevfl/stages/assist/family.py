"""Assisted boosting: settings, local models, and the family of their halves."""

import warnings
import zipfile
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Shaped
from torch import Tensor, nn

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.files import require_unpackable
from securevfl.models import family
from securevfl.models.alone.margins import LEAST_PROBABILITY
from securevfl.models.tasks import TaskHead


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistConfig:
    """The ``[model]`` table of ``family = "assist"``."""

    outputs: checks.Width = 1
    """Width of a score: the classes of a multiclass task, otherwise 1. A width that does not fit
    the labels is refused."""

    rounds: checks.Times = 4
    """T, most rounds of residuals and fits. Replaces ``training.epochs``."""

    neighbours: checks.Links = 1
    """K, links of a row at every secondary."""

    estimator: Literal["boosting", "forest", "linear"] = "boosting"
    """A secondary's model: boosted trees for each output, a random forest for all outputs (faster
    with many classes), or ridge regression."""

    trees: checks.Times = 50
    """Trees of a round's model; boosted ones for each output."""

    leaves: Annotated[int, partial(checks.within, 2, checks.MOST_TIMES)] = 15
    """Leaves of a tree, at most."""

    label_epsilon: checks.Positive | None = None
    """Label-DP epsilon of one training row against all secondaries together, over all rounds:
    labels are randomised once. Not set: residuals show labels."""

    label_lower: float | None = None
    """Least label that counts under ``label_epsilon``; lower ones are raised to it. Not to be taken
    from the labels."""

    label_upper: float | None = None
    """Largest label that counts under ``label_epsilon``; higher ones are lowered to it."""

    keys_as_features: bool = False
    """Keys, which must be numbers, are inputs too."""

    party_dropout: ClassVar[float] = 0.0
    """All secondaries take part in every round."""

    average_positions_every: ClassVar[int] = 0
    """There are no positional encodings to average."""

    @property
    def cut_shape(self) -> tuple[int, int]:
        """One score a row."""
        return 1, self.outputs

    def __post_init__(self) -> None:
        checks.require_limits(self)


FOLDS: Final = 3
"""Folds of the training rows; each is scored by a model fitted to the others."""

_FEWEST: Final = 2 * FOLDS
"""Fewest linked training rows to which a model is fitted."""

_MOST_UNPACKED: Final = 2**30
"""Most bytes of the unpacked models of all rounds."""

_TRUSTED: Final = (
    "numpy.dtype",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.tree._tree.Tree",
)
"""Types that a saved model may contain in addition to those that skops trusts."""


def inputs_of(
    records: Float32[np.ndarray, "rows links inputs"], present: Bool[np.ndarray, "rows links"]
) -> Float64[np.ndarray, "rows columns"]:
    """Return the inputs of a local model: the records of each row, one after another by rank.

    Several records are followed by their mean. Missing values are NaN. Distances of links are not
    used: under most protections of linkage a secondary does not know them.
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
    """Fit a model to linked rows, and score each of them out of fold.

    Args:
        settings: The family's settings.
        inputs: Result of :func:`inputs_of` for the rows.
        residuals: Residuals of the rows.
        seed: Of folds and trees.

    Returns:
        The model of all rows, None if they are too few, and the scores out of fold. A forest scores
        a row by the trees that did not draw it.
    """
    scores = np.zeros(residuals.shape, dtype=np.float32)
    if len(inputs) < _FEWEST:
        return None, scores
    model = _fit_model(settings, inputs, residuals, seed=seed)
    if settings.estimator == "forest":
        drawn = model.oob_prediction_.reshape(residuals.shape)
        # A row that every tree drew, as happens with few trees, has no score.
        return model, np.nan_to_num(drawn).astype(np.float32)
    from sklearn.model_selection import KFold

    folds = KFold(FOLDS, shuffle=True, random_state=seed)
    for rest, held_out in folds.split(inputs):
        part = _fit_model(settings, inputs[rest], residuals[rest], seed=seed)
        scores[held_out] = predict_scores(part, inputs[held_out], outputs=residuals.shape[1])
    return model, scores


def predict_scores(
    model: Any, inputs: Float64[np.ndarray, "rows columns"], *, outputs: int
) -> Float32[np.ndarray, "rows outputs"]:
    """Return a model's scores of rows; zeros if no model was fitted."""
    if model is None or not len(inputs):
        return np.zeros((len(inputs), outputs), dtype=np.float32)
    scores = np.asarray(model.predict(inputs), dtype=np.float32)
    return scores.reshape(len(inputs), outputs)


def within_ball(
    scores: Float[np.ndarray, "rows outputs"],
) -> Float32[np.ndarray, "rows outputs"]:
    """Return scores scaled down to norm 1, the largest norm of residuals."""
    norm = np.linalg.norm(scores, axis=1, keepdims=True)
    return (scores / np.maximum(norm, 1.0)).astype(np.float32)


def pack_models(models: list[Any]) -> bytes:
    """Return models as bytes that hold no code; see :func:`unpack_models`."""
    import skops.io  # It brings scikit-learn, which other families never use.

    return bytes(skops.io.dumps(models, compression=zipfile.ZIP_DEFLATED))


def unpack_models(data: bytes) -> list[Any]:
    """Return the models that :func:`pack_models` was given.

    Raises:
        ValueError: If the bytes are not such models.
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


def _fit_model(
    settings: AssistConfig,
    inputs: Float64[np.ndarray, "rows columns"],
    residuals: Float32[np.ndarray, "rows outputs"],
    *,
    seed: int,
) -> Any:
    model = _build_model(settings, rows=len(inputs), seed=seed)
    with warnings.catch_warnings():
        # A forest warns of rows that all its trees drew.
        warnings.simplefilter("ignore", UserWarning)
        return model.fit(inputs, residuals)


def _build_model(settings: AssistConfig, *, rows: int, seed: int) -> Any:
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


class AssistBottom(nn.Module):
    """A secondary's models of all rounds so far; a row's score is their mean, weighted by steps.

    Every model's score is scaled down to the unit ball, and so is their mean: predictions are
    clipped no more than in training. A row without records scores zero.
    """

    recordwise = False

    def __init__(self, config: AssistConfig) -> None:
        super().__init__()
        self.config = config
        self.positions = nn.Identity()
        self._models: list[Any] = []
        self._steps: list[float] = []

    def add(self, model: Any, step: float) -> None:
        """Add a round's model, with the primary's step."""
        self._models.append(model)
        self._steps.append(step)

    def forward(
        self, features: family.RecordFeatures, keys: family.RecordKeys, present: family.Present
    ) -> Float[Tensor, "batch one outputs"]:
        """Return the scores of a batch."""
        linked = present.any(dim=1).cpu().numpy()
        scores = np.zeros((len(linked), self.config.outputs), dtype=np.float32)
        total = sum(self._steps)
        if total and linked.any():
            inputs = self.inputs(features, keys, present)[linked]
            for model, step in zip(self._models, self._steps, strict=True):
                predictions = predict_scores(model, inputs, outputs=self.config.outputs)
                scores[linked] += step / total * within_ball(predictions)
        return torch.from_numpy(scores).unsqueeze(1).to(features.device)

    def inputs(
        self, features: family.RecordFeatures, keys: family.RecordKeys, present: family.Present
    ) -> Float[np.ndarray, "batch columns"]:
        """Return the models' inputs for a batch."""
        records = torch.cat([features, keys], dim=2) if self.config.keys_as_features else features
        return inputs_of(records.cpu().numpy(), present.cpu().numpy())

    def get_extra_state(self) -> Tensor:
        """Return models and steps as bytes, so that they are saved like weights."""
        blob = pack_models([self._steps, self._models])
        return torch.from_numpy(np.frombuffer(blob, dtype=np.uint8).copy())

    def set_extra_state(self, state: Tensor) -> None:
        """Restore a state from :meth:`get_extra_state`.

        Raises:
            RuntimeError: If it is not such a state, as :meth:`load_state_dict` raises.
        """
        try:
            steps, models = unpack_models(state.cpu().numpy().tobytes())
            if len(steps) != len(models):
                raise ValueError("a step is missing")
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        self._steps, self._models = list(steps), list(models)


class AssistTop(nn.Module):
    """Top model: a constant plus the secondaries' average times a scale; not trained."""

    of_base = 1.0

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.positions = nn.Identity()
        self.start = nn.Parameter(torch.zeros(outputs), requires_grad=False)
        """Margin of a row without links."""
        self.scale = nn.Parameter(torch.zeros(()), requires_grad=False)
        """Sum of the steps of all rounds."""

    def forward(
        self,
        features: family.RowFeatures,
        keys: family.RowKeys,
        aggregate: family.Aggregate,
        similarities: family.Similarities,
    ) -> Float[Tensor, "batch outputs"]:
        """Return the margins of a batch."""
        return self.start + self.scale * aggregate[:, 0]


class AssistFamily(family.Family[AssistConfig]):
    """``family = "assist"``: secondaries fit residuals, the primary adds the sum of their scores.

    Similar to Assisted Learning (Xian et al., 2020) and Gradient Assisted Learning (Diao et al.,
    NeurIPS 2022); docs/assist.md says where it is another one.
    """

    name = "assist"
    settings_class = AssistConfig
    learns_by_gradients = False

    def build_bottom(self, settings: AssistConfig, **_: object) -> nn.Module:
        """Return a bottom model before the first round: every score is zero."""
        return AssistBottom(settings)

    def build_top(self, settings: AssistConfig, *, outputs: int, **_: object) -> nn.Module:
        """Return a top model before the first round."""
        return AssistTop(outputs)

    def epochs(self, settings: AssistConfig, *, asked: int) -> int:
        """Return the number of rounds; each is an epoch."""
        return settings.rounds

    def label_epsilon(self, settings: AssistConfig) -> float | None:
        """Return epsilon of a training row's label against secondaries; None if not bounded."""
        return settings.label_epsilon

    def require_outputs(self, settings: AssistConfig, outputs: int) -> None:
        """Refuse a width of scores that does not fit the labels.

        Raises:
            ConfigError: With the correct width.
        """
        if settings.outputs != outputs:
            raise ConfigError(
                f"model.outputs: is {settings.outputs}, and the label asks for {outputs}; write "
                f"model.outputs = {outputs}, which all parties plan by"
            )


_LONGEST: Final = 50.0
"""Largest step, in units of the longest residual; separable classes have no finite best step."""

_ACCURACY: Final = 1e-3
"""Accuracy of a step, in the same units."""


def constant_margin(targets: Shaped[Tensor, " rows"], head: TaskHead) -> Float[Tensor, " outputs"]:
    """Return the constant margin that fits the labels: their mean, log odds, or log shares."""
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

    The loss is convex in it. A step without a gain is 0.

    Args:
        margins: Margins of training rows.
        scores: The sum of all secondaries' scores of these rows, out of fold.
        targets: Their labels.
        head: The task.
        unit: Norm of the longest residual.
    """
    from scipy.optimize import minimize_scalar  # slow to load, and only a primary's

    wide, add = margins.double(), scores.double()
    labels = targets.double() if targets.is_floating_point() else targets

    def loss(step: float) -> float:
        return float(head.loss(wide + step * unit * add, labels))

    minimum = minimize_scalar(
        loss, bounds=(0.0, _LONGEST), method="bounded", options={"xatol": _ACCURACY}
    )
    return float(minimum.x) * unit if minimum.fun < loss(0.0) else 0.0
