"""The file in which a party keeps its pretrained encoders."""

import io
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from securevfl.core import files
from securevfl.core.errors import ConfigError

_NAME: Final = "encoders.pt"


def save_encoders(party_folder: Path, encoders: dict[str, dict[str, Tensor]]) -> None:
    """Write a party's encoders to its own folder, atomically."""
    buffer = io.BytesIO()
    torch.save(encoders, buffer)
    files.write_bytes(party_folder / _NAME, buffer.getvalue())


def load_encoders(run_folder: Path, party: str) -> dict[str, dict[str, Tensor]]:
    """Read a party's encoders from the run folder of an earlier pretraining.

    Raises:
        ConfigError: If there are none.
    """
    path = run_folder.expanduser() / "parties" / party / _NAME
    try:
        encoders: dict[str, dict[str, Tensor]] = torch.load(
            path, map_location="cpu", weights_only=True
        )
    except OSError as error:
        raise ConfigError(
            f"pretraining.checkpoint: {path}: {error.strerror}; name the run folder of a finished "
            f"securevfl pretrain"
        ) from None
    except Exception as error:  # noqa: BLE001 - whatever torch meets in a damaged file
        raise ConfigError(
            f"pretraining.checkpoint: {path}: is damaged, or holds no encoders "
            f"({type(error).__name__}); restore it from a copy, or pretrain again"
        ) from None
    return encoders
