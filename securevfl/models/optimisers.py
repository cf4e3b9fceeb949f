"""Optimizers by name, and learning-rate schedules."""

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from securevfl.core import checks
from securevfl.core.errors import of_an_extra

Schedule = Literal["constant", "cosine"]
"""Schedules of :func:`learning_rate_in`."""


def learning_rate_in(epoch: int, *, first: float, schedule: Schedule, epochs: int) -> float:
    """Return the step size of an epoch.

    Args:
        epoch: Counted from 1.
        first: Step size of the first epoch.
        schedule: ``constant``, or ``cosine``: half a cosine period, which would reach 0 one epoch
            after the last.
        epochs: Maximum number of epochs.

    References:
        [SGDR] Loshchilov and Hutter 2017 (arXiv:1608.03983v5), equation 5, by epochs, without
        restarts and with 0 as the least rate.
    """
    if schedule == "constant":
        return first
    return first * (1 + math.cos(math.pi * (epoch - 1) / epochs)) / 2


OPTIMIZERS = ("adamw", "adam", "lamb", "sgd")
"""Names that :func:`build_optimizer` accepts."""

_Kind = TypeVar("_Kind", bound=torch.optim.Optimizer)


class PacedOptimizer:
    """An optimizer whose step size depends on the epoch alone, even after a party was absent."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        learning_rate: float,
        schedule: Schedule = "constant",
        epochs: int = 1,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: Takes the steps.
            learning_rate: Step size of the first epoch.
            schedule: Schedule of :func:`learning_rate_in`.
            epochs: Maximum number of epochs.
        """
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._schedule = schedule
        self._epochs = epochs

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The optimised parameters."""
        return [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]

    def step(self, *, epoch: int) -> None:
        """Take a step in an epoch, counted from 1."""
        rate = learning_rate_in(
            epoch, first=self._learning_rate, schedule=self._schedule, epochs=self._epochs
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for :meth:`load_state_dict`."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._optimizer.load_state_dict(dict(state))


def build_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """Return a new optimizer.

    Args:
        name: One of :data:`OPTIMIZERS`.
        parameters: The parameters to optimise.
        learning_rate: Step size, > 0.
        weight_decay: Decay: decoupled for ``adamw``, ``lamb`` and ``sgd``, an L2 penalty for
            ``adam``.

    Raises:
        ConfigError: For an unknown name, an invalid number, or ``lamb`` without the package that
            has it.

    References:
        [LAMB] You et al. 2020 (arXiv:1904.00962v5), Algorithm 2, from the library
        ``pytorch-optimizer``; FeT's published training uses it.
    """
    checks.one_of(OPTIMIZERS, optimizer=name)
    checks.positive(learning_rate=learning_rate)
    checks.non_negative(weight_decay=weight_decay)
    if name == "lamb":
        return _lamb(parameters, learning_rate, weight_decay)
    # A fused kernel for all tensors, since these models have many small ones.
    if name == "sgd":
        return without_compiler(torch.optim.SGD)(
            parameters, lr=learning_rate, momentum=0.9, weight_decay=weight_decay, fused=True
        )
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return without_compiler(kind)(
        parameters, lr=learning_rate, weight_decay=weight_decay, fused=True
    )


@cache
def without_compiler(kind: type[_Kind]) -> type[_Kind]:
    """Return an optimizer class whose methods do not load torch's compiler on first use.

    The compiler takes each party's process more than a second to load, and no party uses it. The
    methods are torch's own, without the wrappers that exclude them from compilation.
    """
    wrapped = ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad")
    methods = {
        name: getattr(method := getattr(kind, name), "__wrapped__", method) for name in wrapped
    }
    # One of the wrappers also excludes the step from gradients.
    methods["step"] = torch.no_grad()(methods["step"])
    return type(kind.__name__, (kind,), methods)


def _lamb(
    parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    # Imported here: it takes a second to load, and only this optimizer needs it.
    of_lamb = of_an_extra("pytorch_optimizer", use='training.optimizer: "lamb"')
    optimizer: torch.optim.Optimizer = of_lamb.Lamb(
        list(parameters), lr=learning_rate, weight_decay=weight_decay
    )
    return optimizer
