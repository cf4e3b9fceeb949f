"""The ``[linkage]`` table of a federation file: what is compared, how it is hidden, who chooses."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.settings import read_settings
from securevfl.linkage.metrics.metric import Field
from securevfl.linkage.spec import CACHE_FOLDER, SECRET_FILE
from securevfl.linkage.stage.linkage_parts import METRICS, PROTECTIONS
from securevfl.linkage.text import DateOrder, Spelling

_MOST_CODE_BITS: Final = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkageSettings:
    """The ``[linkage]`` table."""

    metric: str = "euclidean"
    """How far keys are apart: numbers, places, ``levenshtein`` on all key columns as one text,
    ``mixed`` column by column (``fields``), ``bloom`` on Bloom codes. ``exact`` links keys that are
    equal as texts: "0123" is not 123."""

    protection: str
    """How keys are hidden while linking. ``none``: every secondary sees the primary's keys. ``psi``
    hides ids without another party."""

    choose: Literal["rows", "records"] = "rows"
    """Each row chooses its K nearest records, or each record its ``privacy.links_per_record``
    nearest rows. The latter halves what a record can change; it needs a frozen encoder with pooled
    rows."""

    max_distance: checks.NonNegative | None = None
    """Farther records are no links. In the metric's unit: edits (``levenshtein``), a share of 1
    (``mixed``), metres (``great-circle``), the keys' own unit (``euclidean``), differing bits where
    codes are compared (``bloom``). Default: any distance; 0 where rows have to be aligned and the
    key is one number, an id."""

    least_linked: checks.ClosedUnit = 0.05
    """Least share of the primary's rows that must be linked at each secondary, in [0, 1]; 0 allows
    all. Secondaries say how many are, behind noise where epsilon is promised, and with fewer the
    primary ends the run. Predictions do not ask."""

    truth: str | None = None
    """Column of true matches, for measuring links; never a feature."""

    fields: dict[str, dict[str, Any]] | None = None
    """For ``mixed``: kind, weight and scale by the primary's column names."""

    missing_similarity: checks.ClosedUnit = 0.5
    """For ``mixed``: similarity of a field that one side lacks, in [0, 1]."""

    ranges: tuple[tuple[float, ...], ...] | None = None
    """``[low, high]`` of every numeric key column, agreed without looking; values outside are
    refused. Protected linkage of numbers needs it."""

    fold: bool = False
    """For ``exact``: case, full-width letters and runs of blanks count as equal. Blanks at the ends
    never count."""

    strip_zeros: bool = False
    """Text keys without leading zeros: ``00025`` equals ``25``. check and init say whether it links
    more."""

    digits_only: bool = False
    """Digits of text keys alone: ``C-123`` equals ``123``."""

    dates: DateOrder | None = None
    """Text keys such as 28.03.1956 or 03/28/1956 equal 1956-03-28."""

    blocking: tuple[str, ...] | None = None
    """Rules over key columns for the pairs to compare, by default all (``levenshtein``, ``mixed``;
    needs ``securevfl[sql]``). Losses are measured and reported."""

    code_bits: int | None = None
    """Bits of a code (``bloom``): 1024 for texts and for each field, 2048 for a point."""

    code_concentration: checks.OpenUnit | None = None
    """Share of a code's bits that are set; default 0.35 for texts, 0.25 for numbers."""

    cell: checks.Positive | None = None
    """For ``shares`` and ``paillier``: width of a grid cell, in the keys' unit; links stay the
    same. The coordinator learns every cell; the primary how many records are near its rows, with
    ``links_per_record`` also in each cell: refused where epsilon is promised."""

    key_bits: Literal[2048, 3072, 4096] = 2048
    """Bits of the modulus (``paillier``)."""

    pad_to: checks.Keys | None = None
    """For ``psi``: how many different keys every secondary announces, more than any has. By default
    the primary learns how many there are."""

    most_keys: checks.Keys | None = None
    """For ``psi`` without ``pad_to``: the most keys that a secondary may announce, and so test.
    Default: 100 for each of the primary's rows, at least 100,000."""

    similarity_noise: checks.NonNegative | None = None
    """sigma of the noise on similarities, in units of sigma_0."""

    similarity_tau: checks.OpenUnit | None = None
    """FedSim's bound on one greedy attacker, from which sigma follows."""

    ELSEWHERE: ClassVar = {
        "secret": f"no path of one machine stands in a file that all parties share; leave it out, "
        f"and save the secret as {SECRET_FILE} in each data party's own --data-root",
        "cache": f"no path of one machine stands in a file that all parties share; leave it out, "
        f"and make a folder {CACHE_FOLDER} in your own --data-root, where links are then kept",
    }

    def __post_init__(self) -> None:
        for name, value, known in (
            ("metric", self.metric, METRICS),
            ("protection", self.protection, PROTECTIONS),
        ):
            if value not in known:
                allowed = ", ".join(map(repr, known))
                near = checks.did_you_mean(value, known)
                raise ConfigError(f"{name}: must be one of {allowed}; got {value!r}{near}")
        if self.code_bits is not None and (
            self.code_bits % 64 or not 64 <= self.code_bits <= _MOST_CODE_BITS
        ):
            raise ConfigError(
                f"code_bits: must be a multiple of 64 and at most {_MOST_CODE_BITS}, "
                f"got {self.code_bits}"
            )
        checks.require_limits(self)
        for pair in self.ranges or ():
            if len(pair) != 2 or not -1e150 < pair[0] < pair[1] < 1e150:
                raise ConfigError(f"ranges: must be [low, high] pairs, ascending; got {list(pair)}")
        if self.similarity_tau is not None and self.similarity_noise is not None:
            raise ConfigError("similarity_tau: give it or similarity_noise, not both")
        self._check_metric()
        self._check_protection()

    def _check_metric(self) -> None:
        if self.fields is not None:
            self._require_reader("fields", "fields: go")
        if self.fold:
            self._require_reader("fold", "fold: goes")
        if self.spelling.settings and "spelling" not in METRICS[self.metric].reads:
            first = next(iter(self.spelling.settings))
            raise ConfigError(f"{first}: goes with keys that are texts, not with {self.metric!r}")
        if self.blocking is not None:
            self._require_reader("blocking", "blocking: rules go")
            if self.protection != "none":
                raise ConfigError('blocking: goes with protection = "none" alone')
        self.field_list()

    def _require_reader(self, setting: str, sentence: str) -> None:
        """Refuse a setting that the metric does not read, in a sentence with those that do."""
        if setting not in METRICS[self.metric].reads:
            readers = [other.name for other in METRICS.values() if setting in other.reads]
            raise ConfigError(
                f"{sentence} with metric = {quote_choices(readers)}, not with {self.metric!r}"
            )

    def _check_protection(self) -> None:
        own = PROTECTIONS[self.protection]
        for name in ("cell", "pad_to", "most_keys"):
            if getattr(self, name) is not None and name not in own.reads:
                takers = [other.name for other in PROTECTIONS.values() if name in other.reads]
                raise ConfigError(f"{name}: goes with protection = {quote_choices(takers)} alone")
        own.check_settings(self.protection_settings)

    @property
    def protection_settings(self) -> dict[str, Any]:
        """Settings that go with the protection, by name."""
        return {name: getattr(self, name) for name in sorted(PROTECTIONS[self.protection].reads)}

    @property
    def spelling(self) -> Spelling:
        """How text keys are spelled before they are compared."""
        return Spelling(
            strip_zeros=self.strip_zeros, digits_only=self.digits_only, dates=self.dates
        )

    def field_list(self) -> tuple[Field, ...]:
        """Return the fields of ``mixed`` in the file's order.

        Raises:
            ConfigError: Naming the field that is impossible.
        """
        return tuple(
            read_settings(Field, {"name": name, **table}, where=f"fields.{name}")
            for name, table in (self.fields or {}).items()
        )


def parse_linkage(table: Mapping[str, Any]) -> LinkageSettings:
    """Read a parsed ``[linkage]`` table.

    Raises:
        ConfigError: Naming the field, the rule and the value.
    """
    if table.get("protection") is None:
        raise ConfigError(
            'linkage.protection: is missing; write protection = "none" to accept that '
            f"the primary's keys are shown to every secondary, or "
            f"{quote_choices(name for name in PROTECTIONS if name != 'none')}"
        )
    return read_settings(LinkageSettings, table, where="linkage")


def quote_choices(names: Iterable[str]) -> str:
    """Return names as a choice: ``"a", "b" or "c"``."""
    *most, last = (f'"{name}"' for name in names)
    return f"{', '.join(most)} or {last}" if most else last
