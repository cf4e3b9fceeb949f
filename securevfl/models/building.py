"""Build a family's models and check that they match the family's description.

B = 2 rows, K = links of a row, F = features, D = key dimension, L and H = shape of the cut.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from securevfl.core import errors
from securevfl.models.family import AnyFamily, Bottom, FamilySettings, Top

Forward: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A bottom model's function of features, keys, and the mask of present links."""


def row_by_row(bottom: nn.Module) -> Forward:
    """Return a bottom model's function that computes each row as a separate batch.

    ``torch.func.vmap`` gives the model one row at a time and computes all rows at once. A model
    that depends on a value (``if x.sum() > 0``, ``x.item()``), or writes values into a buffer,
    raises ``RuntimeError`` for any values.

    Args:
        bottom: A :class:`securevfl.models.family.Bottom`. Dropout is
            independent between rows, as in a batch.
    """

    def alone(features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        row: Tensor = bottom(features.unsqueeze(0), keys.unsqueeze(0), present.unsqueeze(0))
        return row.squeeze(0)

    each = vmap(alone, randomness="different")

    def together(features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # Some layers, attention above all, then run row after row; that is slower, not wrong.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            out: Tensor = each(features, keys, present)
            return out

    return together


_ROWS: Final = 2

# Trial of rows in one batch and one by one.
_TRIED_ROWS: Final = 5
_DRAWS: Final = 2
_EXTREME: Final = 1e4

# Another order of float32 additions changes a result by some 1e-6 of the largest input.
_ROUNDING: Final = 1e-4


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
    """Return a family's bottom model, checked but not initialised.

    Arguments are those of :meth:`Family.build_bottom` and of :func:`check_bottom`.

    Raises:
        ConfigError: If building fails, or the result does not match the family's description.
        PrivacyError: If it mixes records although it must not, or claims not to.
    """
    with _blame_family(family, "bottom", "can't be built"):
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
    """Return a family's top model, checked but not initialised.

    Arguments are those of :meth:`Family.build_top`.

    Raises:
        ConfigError: If building fails, or the result does not match the family's description.
    """
    with _blame_family(family, "top", "can't be built"):
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
    """Refuse a bottom model that does not match its family's description.

    Args:
        family: The family.
        settings: Its settings.
        bottom: The model, on the CPU.
        num_features: Feature columns of the secondary's table.
        key_dim: Key columns.
        pooled: Whether the release code averages K record-wise vectors.

    Raises:
        ConfigError: If its output does not have the shape of the cut, or an attribute is missing.
        PrivacyError: If it wrongly claims to treat each record separately, or must do so and does
            not claim it: a release would have a larger sensitivity than accounted for.
    """
    if not _has_all_of(Bottom, bottom):
        raise errors.ConfigError(f"{_model_of(family, 'bottom')} lacks positions or recordwise")
    positions, width = family.cut_shape(settings)
    links = settings.neighbours
    shape = (_ROWS, links if pooled else positions, width)
    random = torch.Generator().manual_seed(0)
    features = torch.rand(_ROWS, links, num_features, generator=random)
    keys = torch.rand(_ROWS, links, key_dim, generator=random)
    present = torch.ones(_ROWS, links, dtype=torch.bool)
    present[1, -1] = False
    with _evaluation_mode(bottom):
        out = _call(family, "bottom", shape, lambda: bottom(features, keys, present))
        if not bottom.recordwise:
            if pooled:
                raise errors.PrivacyError(
                    f"{_model_of(family, 'bottom')} is not recordwise, but its vectors are "
                    f"clipped and averaged record by record"
                )
            return
        features[:, 0] += 1.0
        other = _call(family, "bottom", shape, lambda: bottom(features, keys, present))
    if not torch.allclose(out[:, 1:], other[:, 1:]) or bool(out[1, -1].any()):
        raise errors.PrivacyError(
            f"{_model_of(family, 'bottom')} claims to be recordwise, but a record changes "
            f"other positions than its own, or an absent link is not zero"
        )


def require_no_batch_norm(bottom: nn.Module, *, encoder: str) -> None:
    """Refuse a bottom model with a layer that normalises over the rows of a batch.

    Args:
        bottom: The model.
        encoder: ``privacy.encoder``, for the message.

    Raises:
        PrivacyError: Naming the layer.
    """
    for name, module in bottom.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            raise errors.PrivacyError(
                f"the bottom model's layer {name!r} is a {type(module).__name__}, which mixes the "
                f"rows of a batch: one record then changes all of them, and the guarantee of "
                f"encoder = {encoder!r} would not hold; use LayerNorm or GroupNorm"
            )


def require_rows_apart(
    family: AnyFamily,
    settings: FamilySettings,
    bottom: nn.Module,
    *,
    num_features: int,
    key_dim: int,
    encoder: str,
    learns: bool,
    noises_updates: bool,
) -> None:
    """Refuse a bottom model that lets rows of a batch depend on each other.

    Five rows, one of them 10^4 times as large and one without links, must give the same results in
    one batch and one by one, to within 10^-4 of the row's largest number, and again after another
    batch. This is a trial: it does not notice mixing that happens for rare values only, and does
    not compare models that draw at random without a dropout layer. The model must also run by
    :func:`row_by_row`, for any values; with a dp-trained encoder, its gradients too.

    Args:
        family: The family.
        settings: Its settings.
        bottom: The model, on the CPU; it is not changed.
        num_features: Feature columns of the secondary's table.
        key_dim: Key columns.
        encoder: ``privacy.encoder``, for the message.
        learns: Whether the model trains.
        noises_updates: Whether each row's gradient is clipped, and their sum noised.

    Raises:
        PrivacyError: If it mixes rows, keeps state between batches, or cannot be computed row by
            row.
        ConfigError: If it fails on these rows.
    """
    for draw in range(_DRAWS):
        with _blame_family(family, "bottom", "can't be copied"):
            model = copy.deepcopy(bottom)
        rows = _prepare_inputs(model, settings.neighbours, num_features, key_dim, seed=draw)
        for training in (False, True):
            model.train(training)
            for module in model.modules():
                if isinstance(module, nn.modules.dropout._DropoutNd):
                    module.eval()
            with _blame_family(family, "bottom", f"fails on a batch of {_TRIED_ROWS} rows"):
                problem = _seen_by_others(model, rows)
            if problem:
                raise errors.PrivacyError(
                    f"{_model_of(family, 'bottom')} {problem}: one record then changes other rows, "
                    f"and the guarantee of encoder = {encoder!r} would not hold; compute each row "
                    f"from its own links only"
                )
        _require_vectorised(
            family, model.train(learns), rows, encoder=encoder, gradients=noises_updates
        )


def _prepare_inputs(
    model: nn.Module, links: int, num_features: int, key_dim: int, *, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Perturb a model's weights; return features, keys and a mask of links for a trial."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        # Weights that start at zero would hide dependences.
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=random)
    size = torch.ones(_TRIED_ROWS, 1, 1)
    size[1] = _EXTREME
    features = torch.randn(_TRIED_ROWS, links, num_features, generator=random) * size
    keys = torch.randn(_TRIED_ROWS, links, key_dim, generator=random) * size
    present = torch.rand(_TRIED_ROWS, links, generator=random) < 0.7
    present[:2], present[2] = True, False
    # As in a run, absent records are zeros.
    return features * present.unsqueeze(-1), keys * present.unsqueeze(-1), present


def _seen_by_others(model: nn.Module, rows: tuple[Tensor, Tensor, Tensor]) -> str | None:
    """Return in words how a model's rows depend on each other; None if they do not.

    A model that draws at random without a dropout layer is not compared.
    """

    def run_model(*some: Tensor, seed: int = 0) -> Tensor:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            out: Tensor = model(*some)
            return out

    together = run_model(*rows)
    run_model(*(part.flip(0) for part in rows))
    again = run_model(*rows)
    if not torch.equal(again.nan_to_num(), together.nan_to_num()):
        return "keeps state between batches"
    if not torch.equal(run_model(*rows, seed=1).nan_to_num(), together.nan_to_num()):
        return None
    for row in range(_TRIED_ROWS):
        own = tuple(part[row : row + 1] for part in rows)
        alone, batched = run_model(*own)[0], together[row]
        largest = max(1.0, *(float(part.abs().max()) for part in (*own[:2], alone) if part.numel()))
        near = torch.allclose(alone, batched, rtol=0.0, atol=_ROUNDING * largest, equal_nan=True)
        if not near:
            return "mixes the rows of a batch"
    return None


def _require_vectorised(
    family: AnyFamily,
    model: nn.Module,
    rows: tuple[Tensor, Tensor, Tensor],
    *,
    encoder: str,
    gradients: bool,
) -> None:
    """Refuse a model whose rows, or gradients of rows, ``torch.func`` cannot compute."""
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def taught(weights: dict[str, Tensor], *row: Tensor) -> Tensor:
        batch = tuple(part.unsqueeze(0) for part in row)
        total: Tensor = functional_call(model, weights, batch).sum()
        return total

    try:
        with torch.random.fork_rng(devices=[]):
            with torch.no_grad():
                row_by_row(model)(*rows)
            if gradients:
                vmap(grad(taught), in_dims=(None, 0, 0, 0), randomness="different")(weights, *rows)
    except Exception as error:
        if errors.OutOfMemoryError.stands_behind(error):
            raise
        raise errors.PrivacyError(
            f"{_model_of(family, 'bottom')} can't be computed row by row, which the "
            f"guarantee of encoder = {encoder!r} needs; use no `if`, .item() or shape that "
            "depends on values, and no layer that torch.func.vmap lacks: "
            f"{errors.in_one_line(error)}"
        ) from error


def check_top(
    family: AnyFamily,
    settings: FamilySettings,
    top: nn.Module,
    *,
    num_features: int,
    key_dim: int,
    outputs: int,
) -> None:
    """Refuse a top model that does not match its family's description.

    Args:
        family: The family.
        settings: Its settings.
        top: The model, on the CPU.
        num_features: Feature columns of the primary's table.
        key_dim: Key columns.
        outputs: Outputs of the task.

    Raises:
        ConfigError: If it has another number of outputs, or an attribute is missing.
    """
    if not _has_all_of(Top, top):
        raise errors.ConfigError(f"{_model_of(family, 'top')} lacks positions")
    features, keys = torch.zeros(_ROWS, num_features), torch.zeros(_ROWS, key_dim)
    aggregate = torch.zeros(_ROWS, *family.cut_shape(settings))
    similarities = None
    if family.needs_similarities(settings):
        similarities = torch.zeros(_ROWS, 1, settings.neighbours)
    with _evaluation_mode(top):
        _call(family, "top", (_ROWS, outputs), lambda: top(features, keys, aggregate, similarities))


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluate a model in the block, without changing it or any random stream."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, training in modes:
            module.training = training


def _has_all_of(protocol: type[Any], model: nn.Module) -> bool:
    # Not isinstance: from Python 3.12 on that does not find the submodules of a torch module.
    return all(hasattr(model, name) for name in protocol.__annotations__)


def _call(
    family: AnyFamily, half: str, shape: tuple[int, ...], model: Callable[[], object]
) -> Tensor:
    with _blame_family(family, half, f"fails on a batch of {_ROWS} rows"):
        out = model()
    if not isinstance(out, Tensor) or tuple(out.shape) != shape:
        output = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise errors.ConfigError(
            f"{_model_of(family, half)} gives {output} for a batch of {_ROWS} rows, expected "
            f"{shape}"
        )
    return out


@contextmanager
def _blame_family(family: AnyFamily, half: str, what: str) -> Iterator[None]:
    """Raise an error of a family's code as one line that names the family."""
    try:
        yield
    except errors.SecureVflError:
        raise
    except Exception as error:
        if errors.OutOfMemoryError.stands_behind(error):
            raise  # not the model's fault
        raise errors.ConfigError(
            f"{_model_of(family, half)} {what}: {errors.in_one_line(error)}"
        ) from error


def _model_of(family: AnyFamily, half: str) -> str:
    return f"model.family: the {half} model of {family.name!r}"
