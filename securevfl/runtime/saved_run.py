"""Where the models of a run lie, and where its parties' tables are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from securevfl.config.federation import FederationConfig
from securevfl.config.sections import PartySettings
from securevfl.data.tables import PartyTable
from securevfl.federation.saved_model import FOLDER, SavedModel, load_model
from securevfl.runtime.run_folder import TemporaryFolder
from securevfl.runtime.run_tables import read_party


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedRun:
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

    def model(self, party: str) -> SavedModel:
        """Read a party's model.

        Raises:
            ConfigError: As :func:`securevfl.federation.saved_model.load_model`.
        """
        return load_model(self.folder / "parties" / party / FOLDER, self.config, party=party)

    def table(self, party: PartySettings) -> PartyTable:
        """Return a party's table as in training, from memory or read again."""
        table = (self.tables or {}).get(party.name)
        return read_party(self.config, party, self.data_root) if table is None else table
