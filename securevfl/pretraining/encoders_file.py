"""The file in which a party keeps its pretrained encoders."""

from pathlib import Path
from typing import Final

from torch import Tensor

from securevfl.core.errors import ConfigError
from securevfl.federation.state_files import DamagedError, read_state, write_state

_NAME: Final = "encoders.pt"


def save_encoders(party_folder: Path, encoders: dict[str, dict[str, Tensor]]) -> None:
    """Write a party's encoders to its own folder, atomically."""
    write_state(party_folder / _NAME, encoders)


def load_encoders(run_folder: Path, party: str) -> dict[str, dict[str, Tensor]]:
    """Read a party's encoders from the run folder of an earlier pretraining.

    Raises:
        ConfigError: If there are none, or the file is damaged.
    """
    path = run_folder.expanduser() / "parties" / party / _NAME
    try:
        return read_state(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"pretraining.checkpoint: {path}: {error.strerror}; name the run folder of a finished "
            f"securevfl pretrain"
        ) from None
    except DamagedError as error:
        raise ConfigError(
            f"pretraining.checkpoint: {error}; restore it from a copy, or pretrain again"
        ) from None
