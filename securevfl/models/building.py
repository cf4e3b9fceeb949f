"""Build a family's models, and hold them to what they claim before a run depends on it.

B = 2 rows, K = links of a row, F = features, D = key dimension, L and H = shape of the cut.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from securevfl.core.errors import ConfigError, PrivacyError, SecureVflError, in_one_line
from securevfl.models.family import AnyFamily, FamilySettings
from securevfl.models.split import Bottom, Top

_ROWS: Final = 2


def bottom_of(
    family: AnyFamily,
    settings: FamilySettings,
    *,
    num_features: int,
    key_dim: int,
    feature_names: Sequence[str],
    frozen: bool,
    pooled: bool,
) -> nn.Module:
    """Return a family's bottom model, checked and not yet initialised.

    Arguments are those of :meth:`Family.build_bottom` and of :func:`check_bottom`.

    Raises:
        ConfigError: If the family fails to build it, or builds another.
        PrivacyError: If it does not treat each record alone where it must or claims to.
    """
    with _blamed(family, "bottom", "can't be built"):
        bottom = family.build_bottom(
            settings,
            num_features=num_features,
            key_dim=key_dim,
            feature_names=feature_names,
            frozen=frozen,
        )
    check_bottom(
        family, settings, bottom, num_features=num_features, key_dim=key_dim, pooled=pooled
    )
    return bottom


def top_of(
    family: AnyFamily,
    settings: FamilySettings,
    *,
    num_features: int,
    key_dim: int,
    feature_names: Sequence[str],
    outputs: int,
    classes: bool,
) -> nn.Module:
    """Return a family's top model, checked and not yet initialised.

    Arguments are those of :meth:`Family.build_top`.

    Raises:
        ConfigError: If the family fails to build it, or builds another.
    """
    with _blamed(family, "top", "can't be built"):
        top = family.build_top(
            settings,
            num_features=num_features,
            key_dim=key_dim,
            feature_names=feature_names,
            outputs=outputs,
            classes=classes,
        )
    check_top(family, settings, top, num_features=num_features, key_dim=key_dim, outputs=outputs)
    return top


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
    with _blamed(family, half, f"fails on a batch of {_ROWS} rows"):
        out = model()
    if not isinstance(out, Tensor) or tuple(out.shape) != shape:
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ConfigError(
            f"{_model_of(family, half)} gives {found} for a batch of {_ROWS} rows, and must give "
            f"{shape}"
        )
    return out


@contextmanager
def _blamed(family: AnyFamily, half: str, what: str) -> Iterator[None]:
    """Say in one line whose code failed: a family of somebody else's may fail in any way."""
    try:
        yield
    except SecureVflError:
        raise
    except Exception as error:
        raise ConfigError(f"{_model_of(family, half)} {what}: {in_one_line(error)}") from error


def _model_of(family: AnyFamily, half: str) -> str:
    return f"model.family: the {half} model of {family.name!r}"
