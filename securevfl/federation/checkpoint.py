"""A party's checkpoints: the last two epochs and the last two best ones, written atomically.

Two are kept because parties save one after another: after a crash some may hold epoch N and others
N - 1, and the federation resumes from the newest epoch that all of them hold. What was the best
epoch until then must still be there too, though some have seen a better one since.
"""

import io
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.federation.rounds import EpochMark
from securevfl.federation.secondary import Secondary

_KEPT = 2


@runtime_checkable
class History(Protocol):
    """A record of releases that can tell whether it was cut; :class:`federation.ledger.Ledger`."""

    @property
    def head(self) -> str:
        """Hash of the last entry."""
        ...

    def require_history(self, head: str) -> None:
        """Refuse if the entry of that hash is not in the record."""
        ...


class Checkpoints:
    """The checkpoint files in one party's folder."""

    def __init__(self, folder: Path, *, settings_digest: str) -> None:
        self.folder = folder
        self.settings_digest = settings_digest
        self._history: History | None = None

    def guard(self, history: History) -> None:
        """Tie what is saved from now on, and what is read, to a ledger.

        Weights were bought with releases. A resumed run whose ledger lacks some of them would
        spend that privacy again and not know it.
        """
        self._history = history

    def begin(self, run: str) -> None:
        """Begin a fresh run in a folder that is unused."""
        files.write_text(self.folder / "run.txt", run)

    @property
    def run(self) -> str:
        """Id of the run that goes on here; empty if none was begun."""
        path = self.folder / "run.txt"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def epochs(self) -> list[int]:
        """Return the epochs that can be resumed, oldest first."""
        return self._saved("epoch")

    def require_unused(self) -> None:
        """Refuse a fresh run where another one has left its work.

        Raises:
            ConfigError: If there are checkpoints in the folder.
        """
        kinds = ("epoch", "best", "pretraining")
        if any(self._saved(kind) for kind in kinds) or self._released.exists():
            raise used_folder(self.folder)

    def save(self, epoch: int, state: dict[str, Any]) -> None:
        """Save an epoch and drop the ones before the last."""
        self._save("epoch", epoch, state)

    def save_best(self, epoch: int, state: dict[str, Any]) -> None:
        """Keep ``state`` as the weights that the finished model will have if none better come."""
        self._save("best", epoch, state)

    def load(self, epoch: int) -> dict[str, Any]:
        """Return the state of a saved epoch and forget later ones.

        Raises:
            ConfigError: If the file was written by a federation with other settings.
            PrivacyError: If the ledger lacks releases that the file was made with.
        """
        state = self._read(self._path("epoch", epoch))
        for kind in ("epoch", "best"):
            for later in self._saved(kind):
                if later > epoch:
                    self._path(kind, later).unlink()
        return state

    def load_best(self, epoch: int) -> dict[str, Any]:
        """Return the weights of the epoch that was the best; see :meth:`load`."""
        return self._read(self._path("best", epoch))

    def pretrained(self) -> list[int]:
        """Return after how many iterations pretraining can be resumed, fewest first."""
        return self._saved("pretraining")

    def save_pretraining(self, iterations: int, state: dict[str, Any]) -> None:
        """Save the state after so many iterations of pretraining."""
        self._save("pretraining", iterations, state)

    def load_pretraining(self, iterations: int) -> dict[str, Any]:
        """Return the state after so many iterations of pretraining; see :meth:`load`."""
        return self._read(self._path("pretraining", iterations))

    def save_released(self, aggregates: torch.Tensor) -> None:
        """Keep what a frozen run released: it can't be released again within its budget."""
        files.write_bytes(self._released, self._dump({"aggregates": aggregates}))

    def load_released(self) -> torch.Tensor | None:
        """Return what was released before, or None if nothing was; see :meth:`load`."""
        if not self._released.exists():
            return None
        aggregates: torch.Tensor = self._read(self._released)["aggregates"]
        return aggregates

    @property
    def _released(self) -> Path:
        return self.folder / "released.pt"

    def _path(self, kind: str, epoch: int) -> Path:
        return self.folder / f"{kind}-{epoch}.pt"

    def _saved(self, kind: str) -> list[int]:
        return sorted(int(path.stem.split("-")[1]) for path in self.folder.glob(f"{kind}-*.pt"))

    def _save(self, kind: str, epoch: int, state: dict[str, Any]) -> None:
        files.write_bytes(self._path(kind, epoch), self._dump(state))
        for old in self._saved(kind)[:-_KEPT]:
            self._path(kind, old).unlink()

    def _dump(self, state: dict[str, Any]) -> bytes:
        buffer = io.BytesIO()
        head = self._history.head if self._history else ""
        content = {"settings_digest": self.settings_digest, "ledger_head": head, "state": state}
        torch.save(content, buffer)
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
        if self._history is not None:
            self._history.require_history(content["ledger_head"])
        state: dict[str, Any] = content["state"]
        return state


class EpochKeeper:
    """Saves a secondary's epochs, and brings the best one back."""

    def __init__(self, secondary: Secondary, checkpoints: Checkpoints) -> None:
        self._secondary = secondary
        self._checkpoints = checkpoints

    def __call__(self, mark: EpochMark) -> None:
        """Do what the mark says."""
        if mark.restore_best:
            self._secondary.bottom.load_state_dict(self._checkpoints.load_best(mark.epoch))
            return
        self._checkpoints.save(mark.epoch, self._secondary.state())
        if mark.best:
            self._checkpoints.save_best(mark.epoch, self._secondary.weights())


def used_folder(party_folder: Path) -> ConfigError:
    """Return the refusal of a fresh run in the folder of another one."""
    return ConfigError(
        f"run folder {party_folder.parent.parent}: holds a run already, and what it released stays "
        f"released; choose another --out, or go on with --resume"
    )


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
    if common or checkpoints.pretrained():
        return
    if config.privacy.encoder == "frozen" and checkpoints.load_released() is not None:
        return
    raise ConfigError(
        f"run folder {checkpoints.folder.parent.parent}: there is nothing that every party has "
        f"saved; start afresh with another --out"
    )
