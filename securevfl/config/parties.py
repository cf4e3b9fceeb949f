"""The ``[[party]]`` tables of a federation file: who takes part, and with which columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.scaling import MAX_CATEGORIES, declared_range
from securevfl.data.sources.settings import AS_IT_IS, Reading

_NAME_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_LONGEST_NAME = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class PartySettings:
    """One ``[[party]]`` table."""

    name: str
    """Unique in the federation; also the party's folder in the run folder."""

    role: Literal["primary", "secondary", "coordinator", "dealer"]
    """The primary holds the labels, a secondary further columns; a coordinator and a dealer hold no
    table: both help to link, and a dealer makes the masks of ``encoder.labels = "shares"``."""

    data: str = ""
    """The party's table: a text file of separated cells (compressed or not), Parquet, Arrow,
    Feather, DuckDB or SQLite; or a ``NAME.source.toml`` file that says where the table lies, for
    what other parties need not read, such as a database's address. Looked for on the party's own
    machine only, relative to ``--data-root``, or to the federation file."""

    reading: Reading = AS_IT_IS
    """How a text file is written, or which table of a database is meant; see below. A source file
    says it itself."""

    key: tuple[str, ...] = ()
    """Columns that parties link by; the n-th of one party means the n-th of another."""

    label: str | None = None
    """The primary's label column."""

    positive: str | bool | int | float | None = None
    """Of a binary task, the label that probabilities, F1, thresholds and calibration are about:
    ``positive = "yes"``. Without it, it is the one that sorts last."""

    address: str | None = None
    """The primary's ``host:port``; secondaries only dial out."""

    identity: str | None = None
    """``ed25519:…``, the party's long-term public key (``securevfl identity create``)."""

    scaling: Literal["standard", "clamped", "bounds", "none"] = "standard"
    """``standard``: own mean and deviation; ``clamped``: the same, and no value further than five
    deviations from the mean, for tables with rare words or outliers; ``bounds``: declared ranges,
    the same for any data; ``none``: features as they are."""

    bounds: tuple[float, ...] | dict[str, tuple[float | str, ...]] | None = None
    """For ``scaling = "bounds"``: ``[low, high]`` of every column of numbers, or such a pair by
    column; of dates as texts, ``["2015-01-01", "2025-12-31"]``, with a time of day if that is to be
    a feature. Truth values, words and flags of missing values need none."""

    categories: dict[str, tuple[str, ...]] | None = None
    """Words of text columns by column, agreed without looking at the data. Other words are refused
    in training, unless ``other`` is in the list: then that word stands for them."""

    max_categories: int = MAX_CATEGORIES
    """Of a column of words without a list, so many of the most frequent words are features of their
    own; the rest is ``other``."""

    missing: Literal["fill", "refuse"] = "fill"
    """What becomes of an empty cell. ``fill``: a feature says that it is empty, and the middle of
    the column's declared bounds stands in, or without bounds its median (no word, no place in the
    year, halfway between true and false); ``refuse``: the table is refused."""

    missing_columns: tuple[str, ...] = ()
    """Columns whose cells may be empty, known without looking: they get the feature that says so
    whether a cell is empty or not. A promise about a secondary's records needs it; otherwise
    columns with empty cells are found."""

    exclude: tuple[str, ...] = ()
    """Columns that are neither keys nor features."""

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > _LONGEST_NAME or set(self.name) - _NAME_LETTERS:
            raise ConfigError(
                f"name: must be 1 to {_LONGEST_NAME} letters, digits, '-' or '_', got {self.name!r}"
            )
        checks.file_name(name=self.name)  # "con" is none on some systems, "--out" an option
        if self.is_helper:
            self._check_helper()
        else:
            self._check_table()
        if self.role == "primary":
            if self.address is None:
                raise ConfigError('address: the primary needs one, for example "127.0.0.1:7431"')
            parse_address(self.address)
        elif self.label is not None:
            raise ConfigError("label: only the primary holds labels")
        elif self.positive is not None:
            raise ConfigError("positive: only the primary holds labels")

    @property
    def is_helper(self) -> bool:
        """Whether the party has no table: it helps to link, or deals masks for votes."""
        return self.role in ("coordinator", "dealer")

    def _check_helper(self) -> None:
        if self.reading != AS_IT_IS:
            raise ConfigError(f"reading: a {self.role} has no table")
        columns = (self.bounds, self.categories, self.exclude, self.missing_columns)
        if self.data or self.key or any(columns):
            raise ConfigError(f"role: a {self.role} has no table; it takes a name and an identity")

    def _check_table(self) -> None:
        if not self.data:
            raise ConfigError("data: is missing; it names the party's table")
        if "://" in self.data:
            # Not shown: it may have a password in it.
            raise ConfigError(
                "data: an address has no place in a file that all parties read; write it into a "
                'file of this party alone, url = "…" in NAME.source.toml, and name that file'
            )
        if not self.key:
            raise ConfigError("key: must name at least one column")
        if len(set(self.key)) < len(self.key):
            raise ConfigError(f"key: names a column twice: {', '.join(self.key)}")
        if (self.scaling == "bounds") != (self.bounds is not None):
            raise ConfigError('bounds: goes with scaling = "bounds", and only with it')
        checks.within(1, checks.MOST_WIDTH, max_categories=self.max_categories)
        if self.missing == "refuse" and self.missing_columns:
            raise ConfigError('missing_columns: goes with missing = "fill"')
        pairs = self.bounds.values() if isinstance(self.bounds, dict) else [self.bounds]
        for pair in pairs:
            if pair is not None:
                try:
                    declared_range(pair)
                except DataError as error:
                    raise ConfigError(f"bounds: {error}") from None


def parse_address(address: str) -> tuple[str, int]:
    """Split ``host:port``; port 0 lets the system choose one.

    Raises:
        ConfigError: If it is not of that form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f'address: must be "host:port", got {address!r}')
    return host.strip("[]"), int(port)


def require_one_federation(parties: Sequence[PartySettings]) -> None:
    """Check that parties make a federation.

    Raises:
        ConfigError: Naming the field; one primary, at least one secondary, names that differ and
            keys of one dimension are needed.
    """
    names = [party.name for party in parties]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"party.name: two parties are called {name!r}")
    primaries = [party.name for party in parties if party.role == "primary"]
    if len(primaries) != 1:
        found = "none has" if not primaries else f"{' and '.join(primaries)} have"
        raise ConfigError(f'party.role: exactly one party must be "primary"; {found} that role')
    if not any(party.role == "secondary" for party in parties):
        raise ConfigError("[[party]]: at least one secondary is needed")
    for role in ("coordinator", "dealer"):
        helpers = [party.name for party in parties if party.role == role]
        if len(helpers) > 1:
            raise ConfigError(f"party.role: at most one party may be {role!r}; {helpers} are")
    dimensions = {party.name: len(party.key) for party in parties if not party.is_helper}
    if len(set(dimensions.values())) > 1:
        text = ", ".join(f"{name} has {count}" for name, count in dimensions.items())
        raise ConfigError(f"party.key: keys must have the same dimension at all parties; {text}")
