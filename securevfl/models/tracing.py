"""Whether a model is being written down for another program, where values decide nothing."""

import torch


def is_traced() -> bool:
    """Return whether torch records what is computed, so that shortcuts by values would stay."""
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return tracing
