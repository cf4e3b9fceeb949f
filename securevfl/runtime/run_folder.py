"""The files of a run folder: figures, history, federation file, what was measured later."""

import contextlib
import csv
import io
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from securevfl.config.federation import FederationConfig
from securevfl.config.reading import read_federation
from securevfl.config.sections import PartySettings
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.core.formatting import toml_text
from securevfl.federation.rounds.primary import BY_ITSELF, VALIDATION
from securevfl.federation.session.party_files import PartyFiles
from securevfl.runtime.metrics_file import RunFigures

_WRITTEN: Final = (
    *("federation.toml", "metrics.json", "history.csv", "predictions.csv", "report.html"),
    *("links.json", "explanation.json", "identities.json", "similarities.svg"),
)
"""Names of a run's files."""

_OF_STUDIES: Final = ("links.json", "comparison.json", "sweep.json")

_FINISHED: Final = (
    *("metrics.json", "comparison.json", "sweep.json"),
    "parties/*/result.json",
)
"""Files that only a finished run, program or study has."""

_COUNTS = ("epoch", "bytes")
HISTORY_FIELDS = ("epoch", "loss", "train", "validation", "seconds", "epsilon", "bytes")

EXPLANATION: Final = "explanation.json"
"""File of what models make of links, for pictures: the primary's in the run folder, for others to
read; a secondary's in its own, for itself."""

OWN_FACTS: Final = "party.json"
"""File of a secondary's facts about its own part in a run, in its own folder, for its own page."""


def own_folders(folder: Path) -> list[Path]:
    """Return the folders of secondaries that can have a page of their own.

    Args:
        folder: A party's own, or a run's.
    """
    if (folder / OWN_FACTS).exists():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"parties/*/{OWN_FACTS}"))


def write_history(run_folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Write ``history.csv``: a row an epoch, with each of the validation rows' metrics.

    ``by_itself`` is the joint model's without its base.
    """
    of_validation = (VALIDATION, BY_ITSELF)
    metrics = dict.fromkeys(
        name for row in history for name in row if name.startswith(of_validation)
    )
    names = (*HISTORY_FIELDS, *metrics)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: row.get(name, "") for name in names} for row in history)
    files.write_text(run_folder / "history.csv", buffer.getvalue(), for_others=True)


def read_history(run_folder: Path) -> list[dict[str, Any]]:
    """Read ``history.csv``: one mapping an epoch, without what was not known.

    Raises:
        ConfigError: If the folder has none.
    """
    path = run_folder / "history.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [
                {name: _number(name, text) for name, text in row.items() if text}
                for row in csv.DictReader(file)
            ]
    except OSError:
        raise ConfigError(f"run folder {run_folder}: has no {path.name}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: was cut or changed ({error})") from None


def _number(name: str, text: str) -> float | int:
    return int(text) if name in _COUNTS else float(text)


def write_federation(run_folder: Path, config: FederationConfig) -> None:
    """Write ``federation.toml``: the settings that this run was made with."""
    files.write_text(run_folder / "federation.toml", toml_text(config.source), for_others=True)


def run_folder_for(
    config: FederationConfig,
    out: Path | None,
    *,
    reads: Iterable[Path] = (),
    resume: bool = False,
    may_begin: bool = False,
) -> Path:
    """Return the run folder: the one that was asked for, or a new one under ``runs/``.

    Args:
        config: The federation file.
        out: The folder; None: a new one.
        reads: Files that the command reads.
        resume: Whether the run in the folder goes on.
        may_begin: Whether it begins if there is none.

    Raises:
        ConfigError: If a run should be resumed, and there is none; or as
            :func:`require_own_folder`.
    """
    if resume and out is None:
        raise ConfigError("--resume: needs --out RUN, the folder of the run that should go on")
    if resume and out is not None and not (may_begin or (out / "parties").is_dir()):
        raise ConfigError(f"run folder {out}: holds no run to go on with; run without --resume")
    if out is not None:
        require_own_folder(config, out, reads=reads, resume=resume)
        return out
    return Path("runs") / f"{config.federation.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def require_own_folder(
    config: FederationConfig, folder: Path, *, reads: Iterable[Path] = (), resume: bool = False
) -> None:
    """Refuse a folder with files of another run, or with files that the run reads.

    A party that has begun a run refuses another one itself; of one that failed before it released
    anything, the folder may be used again.

    Args:
        config: The federation file of the run.
        folder: Its folder, which need not exist.
        reads: Files that it reads.
        resume: Whether what is there goes on.

    Raises:
        ConfigError: Naming what is there.
    """
    for name in () if resume else _WRITTEN:
        if (folder / name).exists():
            files.output_path(folder / name, reads)
    own = {party.name for party in config.parties}
    there = [path.name for path in folder.glob("parties/*") if path.name not in own]
    there += [] if resume else [name for name in _FINISHED if any(folder.glob(name))]
    if not there and _federation_in(folder) in (None, config.federation.name):
        return
    what = f"parties/{there[0]}" if there and there[0] not in _FINISHED else (*there, "files")[0]
    raise ConfigError(
        f"run folder {folder}: holds a run already ({what}), and a folder is one run's; choose "
        f"another --out, or go on with --resume"
    )


def _federation_in(folder: Path) -> str | None:
    """Return the name of the federation whose files are in a folder; None if nothing says it."""
    try:
        return str(files.read_toml(folder / "federation.toml")["federation"]["name"])
    except (FileNotFoundError, NotADirectoryError):
        figures = next(filter(Path.exists, (folder / name for name in _OF_STUDIES)), None)
        return None if figures is None else str(files.read_json(figures).get("federation"))
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def federation_of_run(run_folder: Path, federation: Path | None) -> FederationConfig:
    """Read the federation file of a run, or the one that replaces it.

    Args:
        run_folder: Of a run, with its ``federation.toml``.
        federation: Another file, for settings that have changed since; None: the run's own.

    Raises:
        ConfigError: If the folder has no such file, or a setting is wrong.
    """
    path = run_folder / "federation.toml" if federation is None else federation
    if not path.exists():
        raise ConfigError(
            f"run folder {run_folder}: has no federation.toml; is it the folder of a finished run?"
        )
    return read_federation(path)


def write_explanation(
    folder: Path, explanation: Mapping[str, Any], *, for_others: bool = False
) -> None:
    """Write ``explanation.json`` if there is anything to explain.

    Args:
        folder: The run's for the primary, its own in it for a secondary.
        explanation: What a model explains.
        for_others: Whether others may read it, as they may a run's figures.
    """
    if explanation:
        files.write_json(folder / EXPLANATION, explanation, for_others=for_others)


def write_figures(run_folder: Path, figures: RunFigures) -> None:
    """Write ``metrics.json``: the last of a run's files, since it says that the run is finished."""
    files.write_json(run_folder / "metrics.json", figures.as_json(), for_others=True)


def read_figures(run_folder: Path) -> dict[str, Any]:
    """Read ``metrics.json``.

    Raises:
        ConfigError: If it is not that of a finished run, or lacks figures.
    """
    path = run_folder / "metrics.json"
    if not path.exists():
        raise ConfigError(f"run folder {run_folder}: has no {path.name}; is it a finished run?")
    figures = files.read_json(path)
    needed = {"metric", "test_metrics", "evaluation", "privacy", "alone", "ended", "rows"}
    missing = sorted(needed - set(figures))
    if missing:
        raise ConfigError(
            f"{path}: has no {missing[0]!r}; it is of another version, or no run's figures"
        )
    return figures


CONTRIBUTION: Final = "contribution.json"

AUDIT: Final = "audit.json"
"""File of what attacks on a recorded run found, for the run folder's owner alone."""

MEASURED_FORMAT: Final = 1
"""Format version of the files that this program writes, and the only one that it reads."""


def read_measured(run_folder: Path, name: str, *, run: str) -> dict[str, Any] | None:
    """Read one of these files; None if it is missing, or of another run or version.

    Args:
        run_folder: Where it lies.
        name: Of the file.
        run: The run's id.
    """
    path = run_folder / name
    if not path.exists():
        return None
    content = files.read_json(path)
    if content.get("format") != MEASURED_FORMAT or content.get("run") != run:
        return None
    return content


@contextmanager
def simulated_files(
    config: FederationConfig,
    parties: Iterable[PartySettings],
    run_folder: Path,
    *,
    resume: bool,
) -> Iterator[dict[str, PartyFiles]]:
    """Hold the files of parties that share this process, by name.

    Args:
        config: The federation file.
        parties: Those with tables, the primary first.
        run_folder: Where they lie.
        resume: Whether the run continues with what lies there.
    """
    with ExitStack() as held:
        yield {
            party.name: held.enter_context(
                PartyFiles(
                    run_folder / "parties" / party.name,
                    config,
                    party=party.name,
                    resume=resume,
                    simulated=True,
                )
            )
            for party in parties
        }


class TemporaryFolder:
    """A temporary run folder, removed when no object refers to it, or Python ends.

    ``tempfile.TemporaryDirectory`` warns when it is left to that, and a result in memory always is.
    What a killed program has left is removed when the next folder is made: no process holds its
    lock, which parties that are still at work do too.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_NEW))
        held = None
        if files.LOCKS_ITSELF:
            _remove_left()
            held = os.open(self.path / _HELD, os.O_CREAT | os.O_RDWR, 0o600)
            files.lock(held, self.path / _HELD, shared=False)
            # It has this name from when it is locked.
            self.path = self.path.rename(
                self.path.with_name(f"{_LEFT}{self.path.name.removeprefix(_NEW)}")
            )
        self._removal = weakref.finalize(self, _remove, self.path, os.getpid(), held)

    def remove(self) -> None:
        """Remove it now."""
        self._removal()

    def __getstate__(self) -> dict[str, bytes]:
        """Return what is in it: another process has other folders, and this one may go before."""
        return {
            str(path.relative_to(self.path)): path.read_bytes()
            for path in sorted(self.path.rglob("*"))
            if path.is_file() and path.name != _HELD
        }

    def __setstate__(self, contents: Mapping[str, bytes]) -> None:
        self.__init__()  # type: ignore[misc]
        for name, content in contents.items():
            files.write_bytes(self.path / name, content)


_HELD: Final = ".held"
_NEW: Final = "securevfl-new-"
_LEFT: Final = "securevfl-run-"


def _remove_left() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_LEFT}*"):
        # One that cannot be opened or locked is in use, or another user's.
        with contextlib.suppress(OSError), (folder / _HELD).open("rb") as held:
            files.lock(held.fileno(), folder / _HELD, shared=False)
            if not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)


def _remove(path: Path, owner: int, held: int | None) -> None:
    if os.getpid() == owner:  # and not a process that was forked from it
        shutil.rmtree(path, ignore_errors=True)
        if held is not None:
            os.close(held)
