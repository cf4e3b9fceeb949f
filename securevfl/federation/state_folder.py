"""A party's state on disk: every file whole or damaged, and of one run under one set of settings.

A file is what :func:`torch.save` makes of a mapping, followed by its SHA-256: a bit that flipped, a
tail that is missing and a file of something else all show before anything of it is used.
"""

import hashlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from securevfl.core import files
from securevfl.core.errors import ConfigError, StorageError
from securevfl.core.files import require_unpackable

PRESENCE: Final = "presence.pt"
"""File in which the primary keeps which secondaries took part."""


_DIGEST_BYTES: Final = hashlib.sha256().digest_size
STAGE: Final = "pretraining"
"""Begin of the files of the stage before rounds: the one whose steps can be resumed."""
_KINDS: Final = ("run", "presence", "epoch-*", "best-*", f"{STAGE}-*", "release", "labels")


class DamagedError(ConfigError):
    """A file is not what was written; what it held is lost."""


@runtime_checkable
class History(Protocol):
    """A record of releases that can tell whether it was cut, such as a ledger."""

    @property
    def head(self) -> str:
        """Hash of the last entry."""
        ...

    def require_history(self, head: str) -> None:
        """Refuse if the entry of that hash is not in the record."""
        ...


def write_state(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` atomically; it is on the disk, under its name, when this returns.

    Args:
        path: The file; only its owner may read it.
        content: Tensors, numbers, text, and lists and mappings of them.

    Raises:
        StorageError: If the disk takes no more; what was there before is still there.
    """
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    data = buffer.getvalue()
    files.write_bytes(path, data + hashlib.sha256(data).digest())
    try:
        files.sync_folder(path.parent)
    except OSError as error:
        raise StorageError.of(path, error) from None


def read_state(path: Path) -> dict[str, Any]:
    """Read what :func:`write_state` wrote.

    Raises:
        DamagedError: If the file is not whole, or something else.
        FileNotFoundError: If there is none.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read ({error.strerror})") from None
    data, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        raise DamagedError(f"{path}: is damaged")
    try:
        require_unpackable(data)
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - a foreign file may raise anything
        raise DamagedError(f"{path}: is not a state that this program wrote") from None
    if not isinstance(content, dict) or not all(map(_is_plain, _tensors_in(content))):
        raise DamagedError(f"{path}: is not a state that this program wrote")
    return content


def _tensors_in(content: object) -> Iterator[Tensor]:
    left = [content]
    while left:
        match left.pop():
            case Tensor() as tensor:
                yield tensor
            case dict() as node:
                left += node.values()
            case list() | tuple() as node:
                left += node
            case _:
                pass


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage of its own, with as many numbers as its shape.

    A few bytes can say that they are a tensor of terabytes, which whoever computes with it makes.
    """
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.itemsize <= tensor.untyped_storage().nbytes()


class StateFolder:
    """The state files in one party's folder of a run.

    Every file names its run and the settings that it was written under. Nothing is read that
    belongs to another run or to other settings, and nothing of them is overwritten or removed.
    """

    def __init__(self, path: Path, *, settings_digest: str) -> None:
        self.path = path
        self.settings_digest = settings_digest
        self.run = ""
        """The resumed run's id; empty until it is known."""
        self._history: History | None = None
        self._own: set[str] = set()

    def guard(self, history: History) -> None:
        """Tie what is written from now on, and what is read, to a ledger.

        State was bought with releases. A resumed run whose ledger lacks some of them would spend
        that privacy again and not know it.
        """
        self._history = history

    def names(self) -> list[str]:
        """Return the names of all state files, damaged and foreign ones too, in order."""
        patterns = [f"{kind}.pt" for kind in _KINDS] + [
            "released/*.pt",
            "tested/*.pt",
            "answers/*.pt",
        ]
        paths = [path for pattern in patterns for path in self.path.glob(pattern)]
        return sorted(path.relative_to(self.path).as_posix() for path in paths)

    def holds(self, name: str) -> bool:
        """Return whether there is a file of that name."""
        return (self.path / name).exists()

    def write(self, name: str, state: Mapping[str, Any]) -> None:
        """Write one file; see :func:`write_state`.

        Raises:
            ConfigError: If a file of that name belongs to another run.
            StorageError: If the disk takes no more.
        """
        if name not in self._own:
            self._require_free(name)
        head = self._history.head if self._history else ""
        stamp = {"settings_digest": self.settings_digest, "run": self.run, "ledger_head": head}
        write_state(self.path / name, {**stamp, "state": dict(state)})
        self._own.add(name)

    def remove(self, name: str) -> None:
        """Remove one file of this run, or one that is damaged."""
        if name not in self._own:
            self._require_free(name)
        (self.path / name).unlink(missing_ok=True)
        self._own.discard(name)

    def read(self, name: str) -> dict[str, Any]:
        """Return what was written under that name.

        Raises:
            ConfigError: If it belongs to another run, or was written under other settings.
            DamagedError: If it is not whole.
            FileNotFoundError: If there is none.
            PrivacyError: If the ledger lacks releases that it was made with.
        """
        run, head, state = self.examine(name)
        self._require_own(name, run)
        self._own.add(name)
        if self._history is not None:
            self._history.require_history(head)
        return state

    def examine(self, name: str) -> tuple[str, str, dict[str, Any]]:
        """Return which run a file belongs to, the ledger's head at that time, and its content.

        Raises:
            ConfigError: If it was written under other settings.
            DamagedError: If it is not whole.
            FileNotFoundError: If there is none.
        """
        path = self.path / name
        content = read_state(path)
        digest, run, head, state = (
            content.get(key) for key in ("settings_digest", "run", "ledger_head", "state")
        )
        if not (
            isinstance(digest, str)
            and isinstance(run, str)
            and isinstance(head, str)
            and isinstance(state, dict)
        ):
            raise DamagedError(f"{path}: is not a state that this program wrote")
        if digest != self.settings_digest:
            raise ConfigError(
                f"checkpoint {path}: was written under other settings; "
                f"restore the federation file, or run without --resume"
            )
        return run, head, state

    def _require_free(self, name: str) -> None:
        """Refuse to lose what another run has written under that name."""
        try:
            run, _, _ = self.examine(name)
        except (FileNotFoundError, DamagedError):
            return
        self._require_own(name, run)

    def _require_own(self, name: str, run: str) -> None:
        if run != self.run:
            raise ConfigError(
                f"checkpoint {self.path / name}: belongs to another run than what lies beside it; "
                f"move it out of the folder"
            )
