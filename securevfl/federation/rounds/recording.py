"""What one party of a run receives and holds, recorded in its own folder for attacks on it.

Recording is off unless it is asked for by name. A record has nothing that its party does not have
anyway, yet it has all of it in one place: whoever reads it can try to infer labels and records.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer, Warned
from securevfl.data.tables import PartyTable
from securevfl.federation.checkpoint import read_state, write_state
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.session.peers import Handler, Handlers, Next, Reply
from securevfl.linkage.links import LinkTable
from securevfl.linkage.sampling import LinkSource

FILE: Final = "view.pt"
"""In a party's own folder."""

AVERAGE: Final = "AVERAGE"
"""Name of a primary's line of an average; other lines have the name of their message."""

LINKS: Final = "LINKS"
"""Name of a secondary's line of the records that it drew for a round."""

_MIB: Final = 2**20


@dataclass(eq=False)
class Recorder:
    """One party's record: lines of what came, in their order, and what the party holds."""

    folder: Path
    """The party's own."""
    run: str
    """The run's id."""
    most_mib: float
    """Bound on the size of all numbers together; later lines are left out."""
    observe: Observer
    """Hears once that the record is full."""
    _lines: list[dict[str, Any]] = field(default_factory=list, init=False)
    _held: dict[str, Any] = field(default_factory=dict, init=False)
    _bytes: int = field(default=0, init=False)
    _left_out: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Take up the record of a resumed run.

        Raises:
            ConfigError: If there is a record that is damaged or of another run.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        kept = read_state(self.path)
        if kept.get("run") != self.run:
            raise ConfigError(f"{self.path}: is the record of another run; remove it")
        self._lines, self._left_out = kept["lines"], kept["left_out"]
        self._bytes = sum(map(_size, self._lines))

    @property
    def path(self) -> Path:
        """Where it lies; its owner alone may read it."""
        return self.folder / FILE

    def take(self, kind: str, **values: Any) -> None:
        """Add a line, if there is room for it."""
        line = {"kind": kind, **{name: _plain(value) for name, value in values.items()}}
        if self._has_room(_size(line)):
            self._lines.append(line)

    def hold(self, **arrays: Any) -> None:
        """Keep what the party holds, if there is room for it."""
        held = {name: _plain(array) for name, array in arrays.items() if array is not None}
        if self._has_room(_size(held)):
            self._held |= held

    def hold_keys(self, table: PartyTable) -> None:
        """Keep what a party's rows are linked by: numbers in their own units, or a text a row."""
        if table.link_columns is None:
            self.hold(own_keys=table.keys)
        else:
            columns = table.link_columns.columns.values()
            rows = zip(*columns, strict=True)
            self.hold(link_keys=[" ".join(map(str, row)) for row in rows])

    def save(self) -> None:
        """Write the record.

        Raises:
            StorageError: If the disk takes no more.
        """
        content = {"run": self.run, "lines": self._lines, "held": self._held}
        write_state(self.path, {**content, "left_out": self._left_out})

    def _has_room(self, size: int) -> bool:
        if self._left_out or self._bytes + size > self.most_mib * _MIB:
            if not self._left_out:
                text = f"{self.path}: holds {self.most_mib:g} MiB and takes no more"
                self.observe(Warned(text=text))
            self._left_out += 1
            return False
        self._bytes += size
        return True

    def attend(self, secondary: Secondary, *, samples: bool) -> None:
        """Record every message that a secondary handles, and the records that it draws for rounds.

        Args:
            secondary: Before its handlers are asked for.
            samples: Whether it draws records afresh for each round.
        """
        secondary.overheard = self._overhear
        if samples:
            drawn = _RecordedLinks(secondary.data.links, self)
            secondary.data = replace(secondary.data, links=drawn)

    def _overhear(self, handlers: Handlers) -> Handlers:
        return {kind: replace(how, handle=self._hearing(how)) for kind, how in handlers.items()}

    def _hearing(self, how: Handler) -> Callable[[Any, Reply], Next]:
        def handle(message: Any, reply: Reply) -> Next:
            after = how.handle(message, reply)
            values = {
                data_field.name: getattr(message, data_field.name) for data_field in fields(message)
            }
            self.take(message.KIND.name, **values)
            return after

        return handle

    def hold_secondary(self, secondary: Secondary, *, batch: int) -> None:
        """Keep a secondary's records, links, and its clipped terms of all rows without noise.

        Args:
            secondary: At the run's end. Where it samples records, links and terms are each round's.
            batch: Rows that are computed at once.
        """
        data = secondary.data
        self.hold(features=data.features, keys=data.keys)
        if not isinstance(data.links, _RecordedLinks):
            rows = np.arange(data.primary_rows, dtype=np.int64)
            parts = [rows[start : start + batch] for start in range(0, len(rows), batch)]
            terms = torch.cat([secondary.term_without_noise(part) for part in parts])
            self.hold(links=data.links.link(rows).indices.astype(np.int32), terms=terms)


@dataclass(frozen=True, eq=False)
class _RecordedLinks:
    """Links that are drawn for each round, and recorded."""

    links: LinkSource
    recorder: Recorder

    def link(self, rows: Int64[np.ndarray, " chosen"]) -> LinkTable:
        """Return the links of a round's rows."""
        links = self.links.link(rows)
        self.recorder.take(LINKS, rows=rows, links=links.indices.astype(np.int32))
        return links


def _plain(value: Any) -> Any:
    """Return tensors, numbers and texts, which are all that a file of state holds."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _size(values: Mapping[str, Any]) -> int:
    size = 0
    for value in values.values():
        texts = (
            sum(map(len, value))
            if isinstance(value, list) and value and type(value[0]) is str
            else 0
        )
        size += value.numel() * value.itemsize if isinstance(value, Tensor) else 64 + texts
    return size


@contextmanager
def recording(
    name: str, folder: Path, *, run: str, most_mib: float | None, observe: Observer
) -> Iterator[Recorder | None]:
    """Record what a party receives until the block ends, also where it ends by an error.

    Args:
        name: Of the party.
        folder: Its own.
        run: The run's id.
        most_mib: Bound on the record's size; None records nothing.
        observe: Hears a warning before the first line.

    Raises:
        ConfigError: If there is a record of another run.
        StorageError: If the disk takes no more.
    """
    if most_mib is None:
        yield None
        return
    recorder = Recorder(folder, run, most_mib, observe)
    text = (
        f"{name}: all that it receives and holds is recorded in {recorder.path}, up to "
        f"{most_mib:g} MiB, so that attacks can be tried on it; remove the file after the audit"
    )
    observe(Warned(text=text))
    try:
        yield recorder
    finally:
        recorder.save()
