"""A party's state files of a run, and its checkpoints among them."""

import hashlib
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.errors import ConfigError, SecureVflError, StorageError
from securevfl.core.files import require_unpackable

_DIGEST_BYTES: Final = hashlib.sha256().digest_size
STAGE: Final = "pretraining"
"""Begin of the files of the stage before rounds: the one whose steps can be resumed."""
_KINDS: Final = ("run", "epoch-*", "best-*", f"{STAGE}-*", "release", "labels")


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


_KEPT: Final = 2
_RUN: Final = "run.pt"


def has_begun(folder: Path) -> bool:
    """Return whether a run has begun in a party's folder, so that it can go on there."""
    return (folder / _RUN).exists()


def is_unused(folder: Path) -> bool:
    """Return whether no run has begun in a party's folder, so that nothing was released for one.

    A run's id is there before the first release, and a damaged file may be all that is left of it.
    """
    states = StateFolder(folder, settings_digest="").names()
    return not states and not (folder / "ledger.json").exists()


class Checkpoints:
    """The checkpoint files in one party's folder."""

    def __init__(self, folder: Path, *, settings_digest: str) -> None:
        self.files = StateFolder(folder, settings_digest=settings_digest)
        self.best: int | None = None
        """The best epoch so far, if going on needs its weights from the disk."""
        self._usable: dict[str, list[int]] = {"epoch": [], "best": [], STAGE: []}
        self._damaged: list[str] = []

    @property
    def folder(self) -> Path:
        """The party's own folder within the run folder."""
        return self.files.path

    @property
    def run(self) -> str:
        """The resumed run's id; empty until it is known."""
        return self.files.run

    def guard(self, history: History) -> None:
        """Tie what is saved from now on, and what is read, to a ledger."""
        self.files.guard(history)

    @property
    def holds_state(self) -> bool:
        """Whether there is more here than a run's id."""
        return bool(set(self.files.names()) - {_RUN})

    def begin(self, run: str) -> None:
        """Begin a fresh run in a folder that is unused: its files will carry its id."""
        self.files.run = run
        # A run that ended before it saved anything has left its id.
        (self.folder / _RUN).unlink(missing_ok=True)
        self.files.write(_RUN, {})

    def resume(self) -> list[str]:
        """Find the run to resume, and from where; call it before any message is sent.

        What cannot be read whole is left out, and stays until something takes its place.

        Returns:
            What to warn of: every file that is damaged, and what is taken instead.

        Raises:
            ConfigError: If nothing of a run is here, or there is something of another run or of
                other settings.
        """
        runs: dict[str, str] = {}
        rests_on: dict[int, int | None] = {}
        for name in self.files.names():
            try:
                run, _, state = self.files.examine(name)
            except DamagedError:
                self._damaged.append(name)
                continue
            runs[name] = run
            kind, _, number = name.removesuffix(".pt").partition("-")
            if number:
                self._usable[kind].append(int(number))
            if kind == "epoch":
                rests_on[int(number)] = state.get("rests_on")
        self.files.run = self._one_run(runs)
        for numbers in self._usable.values():
            numbers.sort()
        self._usable["epoch"] = [
            epoch
            for epoch in self._usable["epoch"]
            if rests_on[epoch] is None or rests_on[epoch] in self._usable["best"]
        ]
        return [self._warning(name) for name in self._damaged]

    def _one_run(self, runs: Mapping[str, str]) -> str:
        if not runs:
            what = (
                f"{self._damaged[0]} is damaged, and nothing else is here" if self._damaged else ""
            )
            raise ConfigError(
                f"run folder {self.folder.parent.parent}: holds nothing that "
                f"{self.folder.name!r} could go on with{what and f' ({what})'}. What was released "
                f"stays released; start another run with another --out, which is charged too"
            )
        run = runs.get(_RUN) or next(iter(runs.values()))
        others = [name for name, other in runs.items() if other != run]
        if others:
            raise ConfigError(
                f"checkpoint {self.folder / others[0]}: belongs to another run than what lies "
                f"beside it; move it out of the folder"
            )
        return run

    def _warning(self, name: str) -> str:
        kind, _, number = name.removesuffix(".pt").partition("-")
        unit = "iteration" if kind == STAGE else "epoch"
        usable = self._usable[STAGE if kind == STAGE else "epoch"]
        if number and usable:
            instead = f"; {unit} {usable[-1]} is taken instead"
        elif number:
            instead = f", and no {unit} before it is whole"
        else:
            instead = ""
        return f"checkpoint {self.folder / name}: is damaged{instead}"

    def epochs(self) -> list[int]:
        """Return the epochs that can be resumed, oldest first."""
        return list(self._usable["epoch"])

    def stage_steps(self) -> list[int]:
        """Return after how many steps the stage before rounds can be resumed, fewest first."""
        return list(self._usable[STAGE])

    def require_unused(self) -> None:
        """Refuse a fresh run where another one has left its work.

        Raises:
            ConfigError: If there are checkpoints in the folder.
        """
        # A run that ended before it saved anything has left nothing but its id.
        if self.holds_state:
            raise used_folder(self.folder)

    def save(self, epoch: int, state: dict[str, Any]) -> None:
        """Save an epoch, then drop those before the last two.

        Raises:
            StorageError: If the disk takes no more; what was saved before is still there.
        """
        self._save("epoch", epoch, {**state, "rests_on": self.best})

    def save_best(self, epoch: int, weights: dict[str, Any]) -> None:
        """Keep the weights that the finished model will have if none better come.

        They are saved before their epoch is: an epoch on the disk has its best one there too.
        """
        self._save("best", epoch, weights)

    def save_stage(self, iterations: int, state: dict[str, Any]) -> None:
        """Save the state after so many ``iterations`` of the stage before rounds."""
        self._save(STAGE, iterations, state)

    def load(self, epoch: int, into: Callable[[Any], object]) -> None:
        """Go back to a saved epoch, then forget later ones.

        Args:
            epoch: One of :meth:`epochs`.
            into: Takes the state.

        Raises:
            ConfigError: If the file is not there, damaged, of another run or of other settings, or
                does not fit what takes it.
            PrivacyError: If the ledger lacks releases that the file was made with.
        """
        self.best = self._load("epoch", epoch, into).get("rests_on")
        self.forget_after(epoch)

    def load_best(self, epoch: int, into: Callable[[Any], object]) -> None:
        """Go back to the weights of the epoch that was the best; see :meth:`load`."""
        self._load("best", epoch, into)

    def load_stage(self, iterations: int, into: Callable[[Any], object]) -> None:
        """Go back to the state after so many ``iterations`` of a stage; see :meth:`load`."""
        self._load(STAGE, iterations, into)
        self._forget(STAGE, after=iterations)

    def forget_after(self, epoch: int) -> None:
        """Remove this run's epochs after one that all parties go on from.

        Another party may lack them, and the next ones of that number come of other noise.
        """
        for kind in ("epoch", "best"):
            self._forget(kind, after=epoch)

    def _forget(self, kind: str, *, after: int) -> None:
        later = [number for number in self._usable[kind] if number > after]
        for number in later:
            self.files.remove(_name(kind, number))
            self._usable[kind].remove(number)

    def _save(self, kind: str, number: int, state: dict[str, Any]) -> None:
        name, known = _name(kind, number), self._usable[kind]
        self.files.write(name, state)
        known[:] = sorted({*known, number})
        # Whatever this one replaces goes only now that it is whole on the disk.
        gone = [file for file in self._damaged if file.startswith(f"{kind}-")]
        self._damaged = [file for file in self._damaged if file not in gone]
        for old in {*gone, *(_name(kind, epoch) for epoch in known[:-_KEPT])} - {name}:
            self.files.remove(old)
        del known[:-_KEPT]

    def _load(self, kind: str, number: int, into: Callable[[Any], object]) -> dict[str, Any]:
        name = _name(kind, number)
        path = self.folder / name
        try:
            state = self.files.read(name)
        except FileNotFoundError:
            raise ConfigError(f"checkpoint {path}: does not exist; run without --resume") from None
        except DamagedError as error:
            raise DamagedError(
                f"checkpoint {error}; go on with --resume from the one before it"
            ) from None
        with _must_fit(path):
            into(state)
        return state


def used_folder(party_folder: Path) -> ConfigError:
    """Return the refusal of a fresh run in the folder of another one."""
    return ConfigError(
        f"run folder {party_folder.parent.parent}: holds a run already, and what it released stays "
        f"released; choose another --out, or go on with --resume"
    )


def last_common(
    config: FederationConfig, checkpoints: Checkpoints, others: Iterable[Collection[int]]
) -> int:
    """Return the last epoch that all can go on from; 0 begins the run's first epoch again.

    Args:
        config: The federation file.
        checkpoints: The primary's.
        others: Epochs that each secondary can go on from.

    Raises:
        ConfigError: If all have lost epochs that they had.
    """
    common, furthest = set(checkpoints.epochs()), max(checkpoints.epochs(), default=0)
    for epochs in others if config.regime.saves_epochs else ():
        common &= set(epochs)
        furthest = max(furthest, *epochs, 0)
    # Nobody begins a second epoch before everybody has saved the first.
    if common or furthest < 2:
        return max(common, default=0)
    raise ConfigError(
        f"run folder {checkpoints.folder.parent.parent}: there is nothing that every party has "
        f"saved, though one has epoch {furthest}; start afresh with another --out"
    )


def _name(kind: str, number: int) -> str:
    return f"{kind}-{number}.pt"


@contextmanager
def _must_fit(path: Path) -> Iterator[None]:
    try:
        yield
    except SecureVflError:
        raise
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError):
        raise ConfigError(
            f"checkpoint {path}: does not fit this party's model, as if its table had other "
            f"columns now; restore the table, or start afresh with another --out"
        ) from None
