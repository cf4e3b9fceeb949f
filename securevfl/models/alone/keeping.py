"""Models of the primary alone as bytes: estimators by skops, the perceptron by safetensors.

Neither runs code when it is read. A file of skops names the types that it holds, and none is
loaded that is not of a list.
"""

import pkgutil
from collections.abc import Mapping
from typing import Any, Final

import safetensors.torch
import torch

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.files import require_unpackable
from securevfl.models.alone.choice import AverageModel, MarginModel, Model, NetworkModel
from securevfl.models.layers import MLP
from securevfl.models.tasks import TaskHead

_TRUSTED: Final = (
    "functools.partial",
    "numpy.dtype",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.utils.validation.check_array",
)
"""What boosting and the linear model hold, beside what skops trusts by itself."""


_NOT_OF_MODELS: Final = frozenset({"_testing", "conftest", "externals", "tests"})
"""Modules of scikit-learn that no estimator is made of."""


def model_bytes(model: Model) -> tuple[bytes, dict[str, Any]]:
    """Return a model as bytes, and what :func:`model_of` must know of it beside them.

    Raises:
        ConfigError: If an estimator can't be kept.
    """
    if isinstance(model, AverageModel):
        parts = {name: model_bytes(one) for name, one in model.parts.items()}
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
        about = {"kind": "network", "hidden": list(model.hidden), "epochs": model.epochs}
        return safetensors.torch.save(whole), about
    import skops.io  # It brings scikit-learn, which secondaries never use.

    try:
        content: bytes = skops.io.dumps(model.estimator)
    except Exception as error:
        raise ConfigError(
            f"base.estimator: {type(model.estimator).__name__} can't be kept: {error}"
        ) from error
    return content, {
        "kind": "estimator",
        "words_as_one": model.words_as_one,
        "types": types_of(content),
    }


def require_keepable(model: MarginModel, *, where: str = "base.estimator") -> None:
    """Refuse an estimator that no program would load again.

    Args:
        model: It.
        where: What the estimator is called in messages.

    Raises:
        ConfigError: Naming the types that are not scikit-learn's.
    """
    foreign = [name for name in model_bytes(model)[1]["types"] if not is_trusted(name)]
    if foreign:
        raise ConfigError(
            f"{where}: {type(model.estimator).__name__} can't be kept: of what it holds, "
            f"{', '.join(foreign[:5])} is not scikit-learn's own; take an estimator of scikit-learn"
        )


def types_of(content: bytes) -> list[str]:
    """Return the types that an estimator's bytes hold beside those that skops trusts by itself."""
    import skops.io

    return [name for name in skops.io.get_untrusted_types(data=content) if name not in _TRUSTED]


def is_trusted(name: str) -> bool:
    """Whether a type is loaded that a model's description names: a class of scikit-learn's own.

    A loader calls what it trusts, with arguments out of the file. So a function is not enough, nor
    a name that a module of scikit-learn has from elsewhere: ``check_output`` is one of them.
    """
    place, _, own = name.rpartition(".")
    parts = place.split(".")
    if parts[0] != "sklearn" or not _NOT_OF_MODELS.isdisjoint(parts):
        return False
    try:
        found = pkgutil.resolve_name(f"{place}:{own}")
    except (AttributeError, ImportError, ValueError):
        return False
    return isinstance(found, type) and found.__module__ == place


def model_of(content: bytes, about: Mapping[str, Any], head: TaskHead) -> Model:
    """Return the model that :func:`model_bytes` has made bytes of.

    Args:
        content: These; whoever reads them has compared their hash.
        about: What was returned beside them.
        head: The task.

    Raises:
        ConfigError: If an estimator holds types that are not scikit-learn's.
        KeyError: Like ValueError and TypeError, if something is missing or damaged.
    """
    if about["kind"] == "average":
        parts, begin = {}, 0
        for one in about["parts"]:
            end = begin + int(one["length"])
            part = model_of(content[begin:end], one, head)
            if isinstance(part, AverageModel) or len(content[begin:end]) != int(one["length"]):
                raise ValueError("a part is no single model, or is cut off")
            parts[str(one["name"])], begin = part, end
        weights = {str(one["name"]): float(one["weight"]) for one in about["parts"]}
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
            epochs=int(about["epochs"]),
        )
    import skops.io
    from skops.io.exceptions import UntrustedTypesFoundException

    foreign = [name for name in about["types"] if not is_trusted(name)]
    if foreign:
        raise ConfigError(
            f"model: asks for {foreign[0]}, which is not scikit-learn's; it is not loaded"
        )
    require_unpackable(content)
    try:
        estimator = skops.io.loads(content, trusted=[*_TRUSTED, *about["types"]])
    except UntrustedTypesFoundException as error:
        raise ConfigError(f"model: {error}") from None
    return MarginModel(estimator=estimator, head=head, words_as_one=bool(about["words_as_one"]))
