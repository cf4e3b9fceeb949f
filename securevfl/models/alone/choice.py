"""The local baseline: boosted trees, linear models and networks, and the choice among them.

The local baseline is chosen among a linear model, boosted trees and a perceptron on all of the
primary's inputs; models with similar validation losses are averaged, with weights from rows that
none of them was fitted to. The value of a federation is its improvement on that baseline.

A joint prediction is a mean of two models' margins (:mod:`securevfl.models.alone.margins`):
(1 - lambda) of the base, lambda of the joint model. lambda, and whether the joint model or the
local baseline is used, are chosen by the task's loss, paired by rows, on rows that none of the
models was fitted to. This is model selection, not a guarantee: on other rows the joint model may
still be the worse one.
"""

import itertools
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import safetensors.torch
import torch
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.files import require_unpackable
from securevfl.core.threads import few_threads
from securevfl.models.alone.margins import (
    CrossFitted,
    MarginModel,
    OwnInputs,
    fit_margins,
    out_of_fold,
    refit,
)
from securevfl.models.alone.perceptron import BaselineConfig, NetworkModel, fit_network
from securevfl.models.layers import MLP
from securevfl.models.tasks import Metrics, TaskHead

# The choice between the joint model and the local baseline.

Used = Literal["joint", "alone"]
"""Model whose predictions are used: the joint one, or the local baseline."""

_RULE_STEPS: Final = 20
"""Steps of lambda from 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Choice between the joint model and the local baseline, and the evidence for it."""

    used: Used
    """The chosen model."""
    scale: float
    """lambda, the joint model's weight against the base, in [0, 1]."""
    gain: float
    """Mean loss of the local baseline minus that of the joint model, per row."""
    error: float
    """One standard error of ``gain``; 0 for a single row."""
    rows: int
    """Number of rows that decided."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name, ``scale`` as ``lambda``."""
        fields = asdict(self)
        return {"lambda" if name == "scale" else name: value for name, value in fields.items()}


def decide(
    head: TaskHead,
    *,
    base: Float[Tensor, "rows outputs"],
    joint: Float[Tensor, "rows outputs"],
    alone: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
    scale: float | None = None,
) -> Decision:
    """Choose lambda, and whether the joint model is used.

    lambda is chosen by :func:`choose_scale`. The joint model is used if lambda is not 0 and the
    mean of loss(alone) - loss(joint) over the rows is more than one standard error of that mean.

    Args:
        head: The task.
        base: Margins of the base, for rows that it was not fitted to.
        joint: Margins of the joint model.
        alone: Margins of the local baseline.
        targets: The rows' labels, as the head takes them.
        scale: lambda, if it was chosen on more rows than these; None chooses it on these.

    References:
        A rule of this project's own; research/local_baseline/README.md has its measurements.
    """
    if scale is None:
        scale = choose_scale(head, base=base, joint=joint, targets=targets)
    losses = head.row_losses(mix_outputs(base, joint, scale), targets)
    gain, error = _gain(head.row_losses(alone, targets) - losses)
    return Decision(
        used="joint" if scale > 0 and gain > error else "alone",
        scale=scale,
        gain=gain,
        error=error,
        rows=len(targets),
    )


def choose_scale(
    head: TaskHead,
    *,
    base: Float[Tensor, "rows outputs"],
    joint: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
) -> float:
    """Return the lambda among 0, 0.05, ..., 1 with the smallest mean loss, the smallest of equals.

    Args:
        head: As in :func:`decide`.
        base: As in :func:`decide`.
        joint: As in :func:`decide`.
        targets: As in :func:`decide`.
    """
    means = {
        step: float(head.row_losses(mix_outputs(base, joint, step / _RULE_STEPS), targets).mean())
        for step in range(_RULE_STEPS + 1)
    }
    # A joint model with outputs that are not finite gets no weight.
    finite = {step: mean for step, mean in means.items() if mean < float("inf")}
    return min(finite, key=lambda step: finite[step], default=0) / _RULE_STEPS


def who_answers(
    head: TaskHead,
    *,
    joint: Float[Tensor, "rows outputs"],
    alone: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
) -> Used:
    """Return the model that is used at a given lambda, by the rule of :func:`decide`."""
    gain, error = _gain(head.row_losses(alone, targets) - head.row_losses(joint, targets))
    return "joint" if gain > error else "alone"


def _gain(differences: Float[Tensor, " rows"]) -> tuple[float, float]:
    """Return the mean of the differences and its standard error, which is 0 for a single row."""
    rows = len(differences)
    error = float(differences.std()) / rows**0.5 if rows > 1 else 0.0
    return float(differences.mean()), error


def mix_outputs(
    base: Float[Tensor, "rows outputs"], joint: Float[Tensor, "rows outputs"], scale: float
) -> Float[Tensor, "rows outputs"]:
    """Return (1 - lambda) base + lambda joint; a part with weight 0 may have any values."""
    if scale in (0, 1):
        return joint if scale else torch.clone(base)
    return base + scale * (joint - base)


# The local baseline: the primary's best model without partners.

CONSTANT: Final = "constant"
"""The only candidate of a primary without inputs: the mean label, or the class shares."""

AVERAGE: Final = "average"
"""The candidate that averages other candidates."""

LEVEL: Final = 2.0
"""Largest difference in validation loss of two level models, in standard errors."""

_STEPS: Final = 10
"""Steps of a weight in an average, from 0 to 1."""

_AS_GOOD: Final = 1.001
"""Largest loss of simpler weights that are preferred, over the smallest loss."""

Single = MarginModel | NetworkModel
"""A single model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AverageModel:
    """A weighted mean of models' margins."""

    parts: Mapping[str, Single]
    """Models by the candidates' names."""
    weights: Mapping[str, float]
    """Weight of each part; positive, with sum 1."""
    head: TaskHead

    def margins(self, inputs: OwnInputs) -> Float32[np.ndarray, "rows outputs"]:
        """Return the weighted mean of the parts' margins for rows."""
        return _mean(
            {name: part.margins(inputs) for name, part in self.parts.items()}, self.weights
        )


Model = Single | AverageModel
"""Model of a candidate."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One candidate for the local baseline."""

    model: Model
    validation: Metrics
    """Every metric of the validation rows."""
    threshold: float
    """Threshold of a binary task, chosen on the validation rows."""
    margins: Float32[np.ndarray, "rows outputs"] | None = None
    """Margins for all rows, out of fold on training rows; None if they were not needed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Alone:
    """The local baseline: its candidates, and the chosen one."""

    head: TaskHead
    candidates: Mapping[str, Candidate]
    """Candidates by name, simplest first: ``linear``, ``boosting``, ``network``, and ``average``
    if several of them are level; or ``constant``."""
    chosen: str
    """Name of the chosen candidate."""

    @property
    def best(self) -> Candidate:
        """The chosen candidate."""
        return self.candidates[self.chosen]

    @property
    def epochs(self) -> int:
        """Epochs of the network's training; 1 without a network."""
        network = self.candidates.get("network")
        return network.model.epochs if network and isinstance(network.model, NetworkModel) else 1

    def margins(self, inputs: OwnInputs) -> Float32[np.ndarray, "rows outputs"]:
        """Return the chosen model's margins for rows.

        They are not out of fold: for rows that it was fitted to, they are too good.
        """
        return self.best.model.margins(inputs)

    def measure(
        self, inputs: OwnInputs, targets: Shaped[np.ndarray, " rows"]
    ) -> dict[str, Metrics]:
        """Return every metric of labelled rows for each candidate.

        Args:
            inputs: The rows.
            targets: Their labels, as the head takes them.

        Raises:
            DataError: If the metric that training optimises is not defined for these labels.
        """
        known = torch.from_numpy(targets)
        return {
            name: self.head.metrics(
                torch.from_numpy(candidate.model.margins(inputs)),
                known,
                threshold=candidate.threshold,
            )
            for name, candidate in self.candidates.items()
        }


def fit_alone(
    inputs: OwnInputs,
    targets: Shaped[np.ndarray, " rows"],
    head: TaskHead,
    *,
    train: Int64[np.ndarray, " train"],
    validation: Int64[np.ndarray, " validation"],
    seed: int,
    network: BaselineConfig | None = None,
    fitted: Mapping[str, CrossFitted] | None = None,
    with_margins: bool = False,
) -> Alone:
    """Fit every candidate to the training rows, and choose one or average several.

    Validation rows are few, so they only decide which models are level with the best: within
    :data:`LEVEL` standard errors of the mean difference in loss, paired by rows. These are also
    fitted to folds of the training rows, and the weights of their average have the least mean loss
    over training rows, out of fold, and validation rows. A weight of 1 is that candidate. Other
    rows are not used. Of equal candidates the simplest is chosen.

    Args:
        inputs: All rows.
        targets: Their labels as the head takes them.
        head: The task; its metric chooses among models that are not averaged.
        train: Rows to train on.
        validation: Rows that choose: the models, the network's epoch, thresholds.
        seed: Run seed.
        network: The perceptron and its training; default: :class:`BaselineConfig`.
        fitted: Candidates that were already fitted to these training rows, by name; a new name is
            an additional candidate.
        with_margins: Whether the chosen candidate must have margins out of fold.

    Raises:
        DataError: If there are no training or validation rows, or the metric is not defined for
            one of them.

    References:
        van der Laan, Polley and Hubbard, Super Learner, 2007: weights that are positive and sum to
        1, chosen by loss out of fold.
    """
    fits = _Fits(
        inputs=inputs,
        targets=targets,
        head=head,
        train=train,
        validation=validation,
        seed=seed,
        network=network or BaselineConfig(),
        fitted=fitted or {},
    )
    with few_threads(inputs.values.size):
        return _chosen(fits, with_margins=with_margins)


def _chosen(fits: "_Fits", *, with_margins: bool) -> Alone:
    """Fit every candidate, and choose; :func:`fit_alone` says how."""
    inputs, targets, head = fits.inputs, fits.targets, fits.head
    train, validation = fits.train, fits.validation
    known = targets[validation]
    candidates: dict[str, Candidate] = {}
    models: dict[str, Single] = {}
    losses: dict[str, Shaped[np.ndarray, " validation"]] = {}
    names = dict.fromkeys(("linear", "boosting", "network", *fits.fitted))
    for name in names if inputs.values.shape[1] else (CONSTANT,):
        models[name] = fits.model(name)
        shown = models[name].margins(inputs.take(validation))
        candidates[name] = _candidate(models[name], head, shown, known)
        losses[name] = _losses(head, shown, known)
    chosen, *others = candidates
    for name in others:
        if head.is_better(
            head.headline(candidates[name].validation), head.headline(candidates[chosen].validation)
        ):
            chosen = name
    level = level_with_best(losses, also=chosen)
    if len(level) == 1 and not with_margins:
        return Alone(head=head, candidates=candidates, chosen=chosen)
    margins = {name: fits.margins(name, models[name]) for name in level}
    for name in level:
        candidates[name] = replace(candidates[name], margins=margins[name])
    if len(level) == 1:
        return Alone(head=head, candidates=candidates, chosen=chosen)
    rows = np.concatenate([train, validation])
    weights = best_weights(
        {name: margin[rows] for name, margin in margins.items()}, targets[rows], head
    )
    if len(weights) == 1:
        return Alone(head=head, candidates=candidates, chosen=next(iter(weights)))
    average = AverageModel(
        parts={name: models[name] for name in weights}, weights=weights, head=head
    )
    mean = _mean({name: margins[name] for name in weights}, weights)
    whole = _candidate(average, head, mean[validation], known)
    candidates[AVERAGE] = replace(whole, margins=mean)
    return Alone(head=head, candidates=candidates, chosen=AVERAGE)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Fits:
    """Single models of one table, fitted to its training rows or to folds of them.

    Fields are the arguments of :func:`fit_alone`.
    """

    inputs: OwnInputs
    targets: Shaped[np.ndarray, " rows"]
    head: TaskHead
    train: Int64[np.ndarray, " train"]
    validation: Int64[np.ndarray, " validation"]
    seed: int
    network: BaselineConfig
    fitted: Mapping[str, CrossFitted]

    def model(self, name: str) -> Single:
        """Return a candidate, fitted to all training rows."""
        if name in self.fitted:
            return self.fitted[name].model
        if name == "network":
            return self._perceptron(self.train, self.network)
        inputs, targets = self.inputs.take(self.train), self.targets[self.train]
        return fit_margins(name, inputs, targets, self.head, seed=self.seed)

    def margins(self, name: str, model: Single) -> Float32[np.ndarray, "rows outputs"]:
        """Return a candidate's margins of all rows, out of fold on training rows."""
        if name in self.fitted:
            return self.fitted[name].margins

        def again(rows: Int64[np.ndarray, " some"]) -> Single:
            if isinstance(model, MarginModel):
                return refit(model, self.inputs.take(rows), self.targets[rows])
            # The epochs after its best one were patience.
            return self._perceptron(rows, replace(self.network, epochs=model.best_epoch))

        return out_of_fold(
            model, again, self.inputs, self.targets, self.head, train=self.train, seed=self.seed
        )

    def _perceptron(self, rows: Int64[np.ndarray, " some"], config: BaselineConfig) -> NetworkModel:
        return fit_network(
            self.inputs,
            self.targets,
            self.head,
            train=rows,
            validation=self.validation,
            seed=self.seed,
            config=config,
        )


def _candidate(
    model: Model,
    head: TaskHead,
    margins: Float32[np.ndarray, "rows outputs"],
    targets: Shaped[np.ndarray, " rows"],
) -> Candidate:
    """Return a candidate with its metrics, from its margins for the validation rows."""
    outputs, known = torch.from_numpy(margins), torch.from_numpy(targets)
    threshold = head.choose_threshold(outputs, known)
    return Candidate(
        model=model,
        validation=head.metrics(outputs, known, threshold=threshold),
        threshold=threshold,
    )


def level_with_best(
    losses: Mapping[str, Shaped[np.ndarray, " rows"]], *, also: str
) -> tuple[str, ...]:
    """Return the names of the models that are level with the one of smallest mean loss.

    Args:
        losses: Losses of the same rows, by model.
        also: A model that is level at any loss: the best by another metric.
    """
    least = min(losses, key=lambda name: float(losses[name].mean()))
    names = []
    for name, own in losses.items():
        worse = own - losses[least]
        error = float(worse.std(ddof=1)) / len(worse) ** 0.5 if len(worse) > 1 else 0.0
        if name == also or float(worse.mean()) <= LEVEL * error:
            names.append(name)
    return tuple(names)


def best_weights(
    margins: Mapping[str, Float32[np.ndarray, "rows outputs"]],
    targets: Shaped[np.ndarray, " rows"],
    head: TaskHead,
) -> dict[str, float]:
    """Return the positive weights, in tenths, whose average has the smallest mean loss.

    Among weights whose loss is within a thousandth of the smallest, the first are taken: fewer
    models, then simpler ones.

    Args:
        margins: Margins for rows that the models were not fitted to, by model, simplest first.
        targets: The rows' labels, as the head takes them.
        head: The task.

    Returns:
        Weights by name, without those that are 0.
    """
    losses: list[tuple[float, dict[str, float]]] = []
    for weights in _simplex(len(margins)):
        some = {name: weight for name, weight in zip(margins, weights, strict=True) if weight > 0}
        mean = _mean({name: margins[name] for name in some}, some)
        losses.append((float(_losses(head, mean, targets).mean()), some))
    enough = min(loss for loss, _ in losses) * _AS_GOOD
    return next(weights for loss, weights in losses if loss <= enough)


def _simplex(parts: int) -> Sequence[tuple[float, ...]]:
    """Return all weights of ``parts`` models in steps, those of fewer models first."""
    steps = itertools.product(range(_STEPS, -1, -1), repeat=parts)
    whole = [some for some in steps if sum(some) == _STEPS]
    whole.sort(key=lambda some: sum(weight > 0 for weight in some))
    return [tuple(weight / _STEPS for weight in some) for some in whole]


def _mean(
    margins: Mapping[str, Float32[np.ndarray, "rows outputs"]], weights: Mapping[str, float]
) -> Float32[np.ndarray, "rows outputs"]:
    total = sum(weights[name] * margin.astype(np.float64) for name, margin in margins.items())
    return np.asarray(total, dtype=np.float32)


def _losses(
    head: TaskHead,
    margins: Float32[np.ndarray, "rows outputs"],
    targets: Shaped[np.ndarray, " rows"],
) -> Shaped[np.ndarray, " rows"]:
    return head.row_losses(torch.from_numpy(margins), torch.from_numpy(targets)).numpy()


# Serialisation: estimators by skops, the perceptron by safetensors. Neither runs code when it is
# read; skops loads only types of a list.

_TRUSTED: Final = (
    "functools.partial",
    "numpy.dtype",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.utils.validation.check_array",
)
"""Types in the package's own estimators, in addition to those that skops trusts."""


_NOT_OF_MODELS: Final = frozenset({"_testing", "conftest", "externals", "tests"})
"""Modules of scikit-learn that contain no estimators."""


def model_bytes(model: Model) -> tuple[bytes, dict[str, Any]]:
    """Return a model as bytes, and the description with which :func:`model_of` reads them.

    Raises:
        ConfigError: If an estimator can't be serialised.
    """
    if isinstance(model, AverageModel):
        parts = {name: model_bytes(part) for name, part in model.parts.items()}
        average: dict[str, Any] = {
            "kind": "average",
            "parts": [
                {**of_part, "name": name, "weight": model.weights[name], "length": len(content)}
                for name, (content, of_part) in parts.items()
            ],
        }
        return b"".join(content for content, _ in parts.values()), average
    if isinstance(model, NetworkModel):
        tensors = {
            "mean": torch.from_numpy(model.mean),
            "deviation": torch.from_numpy(model.deviation),
            **{f"network.{name}": value for name, value in model.network.state_dict().items()},
        }
        whole = {name: value.contiguous() for name, value in tensors.items()}
        about = {
            "kind": "network",
            "hidden": list(model.hidden),
            "best_epoch": model.best_epoch,
            "epochs": model.epochs,
        }
        return safetensors.torch.save(whole), about
    import skops.io  # It brings scikit-learn, which secondaries never use.

    try:
        content: bytes = skops.io.dumps(model.estimator)
    except Exception as error:
        raise ConfigError(
            f"base.estimator: {type(model.estimator).__name__} can't be saved: {error}"
        ) from error
    return content, {
        "kind": "estimator",
        "words_as_one": model.words_as_one,
        "types": types_of(content),
    }


def require_keepable(model: MarginModel, *, where: str = "base.estimator") -> None:
    """Refuse an estimator that could not be loaded again.

    Args:
        model: The fitted estimator.
        where: Name of the setting in messages.

    Raises:
        ConfigError: Naming the types that are not scikit-learn's.
    """
    foreign = [name for name in model_bytes(model)[1]["types"] if not is_trusted(name)]
    if foreign:
        raise ConfigError(
            f"{where}: {type(model.estimator).__name__} can't be saved: it contains "
            f"{', '.join(foreign[:5])}, not of scikit-learn; use an estimator of scikit-learn"
        )


def types_of(content: bytes) -> list[str]:
    """Return the types in an estimator's bytes, except those that are always trusted."""
    import skops.io

    return [name for name in skops.io.get_untrusted_types(data=content) if name not in _TRUSTED]


def is_trusted(name: str) -> bool:
    """Return whether a type named in a model's description may be loaded: a class of scikit-learn.

    A loader calls what it trusts, with arguments from the file. So functions are refused, and names
    that a module of scikit-learn imports from elsewhere, such as ``check_output``.
    """
    place, _, own = name.rpartition(".")
    parts = place.split(".")
    if parts[0] != "sklearn" or not _NOT_OF_MODELS.isdisjoint(parts):
        return False
    try:
        resolved = pkgutil.resolve_name(f"{place}:{own}")
    except (AttributeError, ImportError, ValueError):
        return False
    return isinstance(resolved, type) and resolved.__module__ == place


def model_of(content: bytes, about: Mapping[str, Any], head: TaskHead) -> Model:
    """Return the model from the bytes of :func:`model_bytes`.

    Args:
        content: The bytes, after a check of their hash.
        about: Their description.
        head: The task.

    Raises:
        ConfigError: If an estimator holds types that are not scikit-learn's.
        KeyError: If something is missing or damaged, like ValueError and TypeError.
    """
    if about["kind"] == "average":
        parts, begin = {}, 0
        for part_facts in about["parts"]:
            end = begin + int(part_facts["length"])
            part = model_of(content[begin:end], part_facts, head)
            if isinstance(part, AverageModel) or len(content[begin:end]) != int(
                part_facts["length"]
            ):
                raise ValueError("a part is no single model, or is cut off")
            parts[str(part_facts["name"])], begin = part, end
        weights = {
            str(part_facts["name"]): float(part_facts["weight"]) for part_facts in about["parts"]
        }
        return AverageModel(parts=parts, weights=weights, head=head)
    if about["kind"] == "network":
        tensors = safetensors.torch.load(content)
        mean, deviation = tensors.pop("mean"), tensors.pop("deviation")
        hidden = tuple(about["hidden"])
        widths = {f"hidden[{i}]": width for i, width in enumerate(hidden)}
        checks.within(1, checks.MOST_WIDTH, **widths)
        checks.within(0, checks.MOST_LAYERS, layers_of_hidden=len(hidden))
        network = MLP(len(mean), hidden, head.outputs).double()
        try:
            network.load_state_dict(
                {name.removeprefix("network."): value for name, value in tensors.items()}
            )
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        return NetworkModel(
            network=network.eval(),
            hidden=hidden,
            mean=mean.numpy(),
            deviation=deviation.numpy(),
            head=head,
            best_epoch=int(about["best_epoch"]),
            epochs=int(about["epochs"]),
        )
    import skops.io
    from skops.io.exceptions import UntrustedTypesFoundException

    foreign = [name for name in about["types"] if not is_trusted(name)]
    if foreign:
        raise ConfigError(
            f"model: contains {foreign[0]}, which is not of scikit-learn and is not loaded"
        )
    require_unpackable(content)
    try:
        estimator = skops.io.loads(content, trusted=[*_TRUSTED, *about["types"]])
    except UntrustedTypesFoundException as error:
        raise ConfigError(f"model: {error}") from None
    return MarginModel(estimator=estimator, head=head, words_as_one=bool(about["words_as_one"]))
