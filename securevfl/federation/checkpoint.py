"""A party's checkpoints: the last two epochs and the best one, written atomically.

Two epochs are kept because parties save one after another: after a crash some may hold epoch
N and others N - 1, and the federation resumes from the newest epoch that all of them hold.
"""

import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.federation.config import FederationConfig

_KEPT_EPOCHS = 2


class Checkpoints:
    """The checkpoint files in one party's folder."""

    def __init__(self, folder: Path, *, settings_digest: str) -> None:
        self.folder = folder
        self.settings_digest = settings_digest

    def epochs(self) -> list[int]:
        """Return the epochs that can be resumed, oldest first."""
        return sorted(int(path.stem.split("-")[1]) for path in self.folder.glob("epoch-*.pt"))

    def save(self, epoch: int, state: dict[str, Any]) -> None:
        """Save an epoch and drop the ones before the last."""
        files.write_bytes(self.folder / f"epoch-{epoch}.pt", self._dump(state))
        for old in self.epochs()[:-_KEPT_EPOCHS]:
            (self.folder / f"epoch-{old}.pt").unlink()

    def save_best(self, state: dict[str, Any]) -> None:
        """Keep ``state`` as the weights that the finished model will have."""
        files.write_bytes(self.folder / "best.pt", self._dump(state))

    def load(self, epoch: int) -> dict[str, Any]:
        """Return the state of a saved epoch and forget later ones.

        Raises:
            ConfigError: If the file was written by a federation with other settings.
        """
        for later in self.epochs():
            if later > epoch:
                (self.folder / f"epoch-{later}.pt").unlink()
        return self._read(self.folder / f"epoch-{epoch}.pt")

    def load_best(self) -> dict[str, Any]:
        """Return the best epoch's state; see :meth:`load`."""
        return self._read(self.folder / "best.pt")

    def save_released(self, aggregates: torch.Tensor) -> None:
        """Keep what a frozen run released: it can't be released again within its budget."""
        files.write_bytes(self.folder / "released.pt", self._dump({"aggregates": aggregates}))

    def load_released(self) -> torch.Tensor | None:
        """Return what was released before, or None if nothing was; see :meth:`load`."""
        if not (self.folder / "released.pt").exists():
            return None
        aggregates: torch.Tensor = self._read(self.folder / "released.pt")["aggregates"]
        return aggregates

    def _dump(self, state: dict[str, Any]) -> bytes:
        buffer = io.BytesIO()
        torch.save({"settings_digest": self.settings_digest, "state": state}, buffer)
        return buffer.getvalue()

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise ConfigError(f"checkpoint {path}: does not exist; run without --resume") from None
        if content["settings_digest"] != self.settings_digest:
            raise ConfigError(
                f"checkpoint {path}: was written under other settings; "
                f"restore the federation file, or run without --resume"
            )
        state: dict[str, Any] = content["state"]
        return state


def require_resumable(
    config: FederationConfig, checkpoints: Checkpoints, common: Collection[int]
) -> None:
    """Check that there is something to go on from.

    Args:
        config: The federation file.
        checkpoints: The primary's.
        common: Epochs that every party whose model trains has saved.

    Raises:
        ConfigError: If there is not.
    """
    if common or (config.privacy.encoder == "frozen" and checkpoints.load_released() is not None):
        return
    raise ConfigError(
        f"run folder {checkpoints.folder.parent.parent}: there is nothing that every party has "
        f"saved; start afresh with another --out"
    )
