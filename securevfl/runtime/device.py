"""The torch device that a run computes on."""

import torch

from securevfl.core.errors import ConfigError


def device_named(name: str) -> torch.device:
    """Return the torch device called ``name``.

    Raises:
        ConfigError: If it is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f'device: must be "cpu" or "cuda", got {name!r}') from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f'device: must be "cpu" or "cuda", got {name!r}')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, and torch finds no GPU; use --device cpu")
    return device
