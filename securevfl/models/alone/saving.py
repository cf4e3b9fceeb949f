"""Models of the local baseline as bytes: estimators by skops, perceptrons by safetensors.

Neither format runs code when it is read; skops loads only types of a list.
"""

import pkgutil
from collections.abc import Mapping
from typing import Any, Final

import safetensors.torch
import torch

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.files import require_unpackable
from securevfl.models.alone.choice import AverageModel, Model
from securevfl.models.alone.margins import MarginModel, NetworkModel
from securevfl.models.layers import MLP
from securevfl.models.tasks import TaskHead

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
    """Return a model's bytes, and the description that :func:`model_of` needs.

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
    """Return the types in an estimator's bytes, without those that are always trusted."""
    import skops.io

    return [name for name in skops.io.get_untrusted_types(data=content) if name not in _TRUSTED]


def is_trusted(name: str) -> bool:
    """Return whether a type named in a model's description may be loaded: a class of scikit-learn.

    A loader calls trusted types with arguments from the file. So functions are refused, and names
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
        KeyError: If something is missing or damaged; or ValueError or TypeError.
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
