"""A run whose parties have kept their models: where these lie, and the parties' tables."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.data.tables import PartyTable
from securevfl.federation.kept_model import FOLDER, KeptModel, load_model


class TemporaryFolder:
    """A run folder that is removed when nobody can predict with it any more, or Python ends.

    ``tempfile.TemporaryDirectory`` warns when it is left to that, and a result in memory always is.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="securevfl-"))
        self._removal = weakref.finalize(self, _remove, self.path, os.getpid())

    def remove(self) -> None:
        """Remove it now."""
        self._removal()

    def __getstate__(self) -> dict[str, bytes]:
        """Return what is in it: another process has other folders, and this one may go before."""
        return {
            str(path.relative_to(self.path)): path.read_bytes()
            for path in sorted(self.path.rglob("*"))
            if path.is_file()
        }

    def __setstate__(self, contents: Mapping[str, bytes]) -> None:
        self.__init__()  # type: ignore[misc]
        for name, content in contents.items():
            files.write_bytes(self.path / name, content)


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a process that was forked from it
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptRun:
    """Where the models of a run lie, and where its parties' tables are."""

    config: FederationConfig
    """The federation file."""
    place: Path | TemporaryFolder
    """The run folder."""
    data_root: Path = field(default_factory=Path)
    """Where relative data paths start."""
    tables: Mapping[str, PartyTable] | None = field(default=None, repr=False)
    """The parties' tables by name, where they are in memory; None: they are read."""
    device: str = "cpu"
    """``"cpu"`` or ``"cuda"``, where parties compute."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.place.path if isinstance(self.place, TemporaryFolder) else self.place

    def model(self, party: str) -> KeptModel:
        """Read a party's model.

        Raises:
            ConfigError: As :func:`securevfl.federation.kept_model.load_model`.
        """
        return load_model(self.folder / "parties" / party / FOLDER, self.config, party=party)
