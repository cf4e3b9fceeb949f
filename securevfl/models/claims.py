"""Hold a family's models to what they claim, on a small batch, before a run depends on it.

B = 2 rows, K = links of a row, F = features, D = key dimension, L and H = shape of the cut.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from securevfl.core.errors import ConfigError, PrivacyError, SecureVflError, in_one_line
from securevfl.models.family import AnyFamily, FamilySettings
from securevfl.models.split import Bottom, Top

_ROWS: Final = 2


def check_bottom(
    family: AnyFamily,
    settings: FamilySettings,
    bottom: nn.Module,
    *,
    num_features: int,
    key_dim: int,
    pooled: bool,
) -> None:
    """Refuse a bottom model that is not what its family says.

    Args:
        family: The family.
        settings: Its settings.
        bottom: The model, on the CPU.
        num_features: Feature columns of the secondary's table.
        key_dim: Key columns.
        pooled: Whether the release code averages K record-wise vectors.

    Raises:
        ConfigError: If it gives another shape than the cut's, or lacks what a bottom model has.
        PrivacyError: If it claims to treat each record alone and does not, or must and does not
            claim it: the sensitivity of a release would be larger than what is accounted for.
    """
    if not isinstance(bottom, Bottom):
        raise ConfigError(f"{_model_of(family, 'bottom')} lacks positions or recordwise")
    positions, width = family.cut_shape(settings)
    links = settings.neighbours
    shape = (_ROWS, links if pooled else positions, width)
    random = torch.Generator().manual_seed(0)
    features = torch.rand(_ROWS, links, num_features, generator=random)
    keys = torch.rand(_ROWS, links, key_dim, generator=random)
    present = torch.ones(_ROWS, links, dtype=torch.bool)
    present[1, -1] = False
    with _evaluated(bottom):
        out = _call(family, "bottom", shape, lambda: bottom(features, keys, present))
        if not bottom.recordwise:
            if pooled:
                raise PrivacyError(
                    f"{_model_of(family, 'bottom')} is not recordwise, and its vectors are to be "
                    f"clipped and averaged record by record"
                )
            return
        features[:, 0] += 1.0
        other = _call(family, "bottom", shape, lambda: bottom(features, keys, present))
    if not torch.allclose(out[:, 1:], other[:, 1:]) or bool(out[1, -1].any()):
        raise PrivacyError(
            f"{_model_of(family, 'bottom')} claims to be recordwise, and a record moves more than "
            f"its own position, or an absent link is not zero"
        )


def check_top(
    family: AnyFamily,
    settings: FamilySettings,
    top: nn.Module,
    *,
    num_features: int,
    key_dim: int,
    outputs: int,
) -> None:
    """Refuse a top model that is not what its family says.

    Args:
        family: The family.
        settings: Its settings.
        top: The model, on the CPU.
        num_features: Feature columns of the primary's table.
        key_dim: Key columns.
        outputs: Numbers that the task asks for.

    Raises:
        ConfigError: If it gives another number of outputs, or lacks what a top model has.
    """
    if not isinstance(top, Top):
        raise ConfigError(f"{_model_of(family, 'top')} lacks positions")
    features, keys = torch.zeros(_ROWS, num_features), torch.zeros(_ROWS, key_dim)
    aggregate = torch.zeros(_ROWS, *family.cut_shape(settings))
    similarities = None
    if family.needs_similarities(settings):
        similarities = torch.zeros(_ROWS, 1, settings.neighbours)
    with _evaluated(top):
        _call(family, "top", (_ROWS, outputs), lambda: top(features, keys, aggregate, similarities))


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Nothing of the model, and no random stream, is changed by what is computed here."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, training in modes:
            module.training = training


def _call(
    family: AnyFamily, half: str, shape: tuple[int, ...], model: Callable[[], object]
) -> Tensor:
    try:
        out = model()
    except SecureVflError:
        raise
    except Exception as error:  # noqa: BLE001 - a family of one's own may fail in any way
        raise ConfigError(
            f"{_model_of(family, half)} fails on a batch of {_ROWS} rows: {in_one_line(error)}"
        ) from None
    if not isinstance(out, Tensor) or tuple(out.shape) != shape:
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ConfigError(
            f"{_model_of(family, half)} gives {found} for a batch of {_ROWS} rows, and must give "
            f"{shape}"
        )
    return out


def _model_of(family: AnyFamily, half: str) -> str:
    return f"model.family: the {half} model of {family.name!r}"
