"""The ``[federation]``, ``[training]``, ``[base]`` and ``[runtime]`` tables."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from securevfl.core import checks, devices
from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.scaling import MAX_CATEGORIES, declared_range
from securevfl.data.sources.settings import AS_IT_IS, Reading, first_repeated
from securevfl.data.tables import SplitKind
from securevfl.models.optimisers import Schedule
from securevfl.models.tasks import Rule

OWN = "python"
"""Value in a federation file for an estimator that only Python can pass in."""

IN_MEMORY = "in memory"
"""Value in a federation file for a table that only Python can pass in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseSettings:
    """The ``[base]`` table: the local model that the joint model is weighed against."""

    estimator: Literal["best", "boosting", "linear", "none", "python"] = "best"
    """``best``: the local baseline. ``boosting`` and ``linear``: one of its models. ``none``, as in
    the papers: the network answers always. Otherwise the joint model answers only where it beats
    the local baseline and the network without partners. ``python`` stands in the file of a run on
    an estimator given to :func:`securevfl.simulate` or :func:`securevfl.train`."""

    described: str | None = None
    """Class and parameters of the estimator, for ``python``."""

    def __post_init__(self) -> None:
        if (self.estimator == OWN) != (self.described is not None):
            raise ConfigError(
                'described: goes with estimator = "python", which securevfl.simulate(base=...) '
                "writes; a federation file that trains names another estimator"
            )

    @property
    def exists(self) -> bool:
        """Whether there is a base."""
        return self.estimator != "none"

    def in_words(self) -> str:
        """Return what it does, for people."""
        if not self.exists:
            return "none: the joint model answers, whether it is better than a local model or not"
        return (
            f"{self.estimator} on the primary's own columns and keys; the joint model answers "
            "where it improves on the local baseline (linear, boosting, network or their average), "
            "else that one answers"
        )


def base_source(base: Any) -> dict[str, str]:
    """Return the ``[base]`` table for what Python was handed: a name, or an estimator.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(base, str):
        return {"estimator": base}
    names = '"best", "boosting", "linear", "none"'
    return {"estimator": OWN, "described": describe_estimator(base, f"base: must be {names}")}


def describe_estimator(estimator: Any, rule: str) -> str:
    """Return an estimator's class and parameters, by which the digest of a model knows it.

    Raises:
        ConfigError: If it is none; ``rule`` says what else may be there.
    """
    if not hasattr(estimator, "fit") or not hasattr(estimator, "get_params"):
        raise ConfigError(f"{rule} or an estimator of scikit-learn, got {estimator!r:.60}")
    kind = type(estimator)
    # Every parameter, not those alone that are printed.
    params = json.dumps(estimator.get_params(), sort_keys=True, default=repr)
    return f"{kind.__module__}.{kind.__qualname__} {params}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FederationSettings:
    """The ``[federation]`` table."""

    name: str
    """Its name in reports, logs and default run folders: a plain file name."""

    task: Task
    """The label is a number, one of two classes, or one of several."""

    classes: Annotated[int, partial(checks.within, 2, checks.MOST_WIDTH)] | None = None
    """Classes of a multiclass label, which must have as many. Only ``encoder.method = "auto"``
    needs it."""

    seed: checks.FromZero = 0
    """Seed of initialisation, shuffling and dropout, never of noise."""

    def __post_init__(self) -> None:
        checks.file_name(name=self.name)
        checks.require_limits(self)
        if self.classes is not None and self.task != "multiclass":
            raise ConfigError(
                f"classes: only a multiclass task has it, and this one is {self.task}; leave it out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """The ``[training]`` table."""

    epochs: checks.Times = 20
    """Passes over the training rows, at most."""

    batch_size: checks.Times = 128
    """Rows of the primary in a round."""

    learning_rate: checks.Positive | None = None
    """Step size of every optimizer; default 0.003, for ``fedhssl`` and its parts 0.001."""

    schedule: Schedule = "constant"
    """Step sizes over epochs: ``constant``, or ``cosine``, half a period down from
    ``learning_rate`` that ends before 0 ([SGDR] equation 5)."""

    optimizer: Literal["adamw", "adam", "lamb", "sgd"] = "adamw"
    """Every party's optimizer."""

    weight_decay: checks.NonNegative = 0.0
    """Decoupled weight decay."""

    precision: devices.Precision = "float32"
    """Precision of networks' matrix products; ``bfloat16`` is for GPUs. All else, frozen encoders
    too, stays float32."""

    metric: str | None = None
    """The metric that chooses the best epoch and stands first in results. Default: rmse, auc
    (binary) or accuracy (multiclass)."""

    threshold: Rule = "auto"
    """The probability from which a binary row counts as positive: ``half`` (0.5), a number, or the
    best on each epoch's validation rows, by F1 (``f1``) or by true minus false positives' rate
    (``youden``). ``auto``: ``f1`` if less than a fifth of them are positive, else ``half``."""

    label_epsilon: checks.Positive | None = None
    """Epsilon of a training row's class against all secondaries: networks train on classes drawn
    once by randomised response, without a base."""

    patience: checks.Times = 10
    """Epochs without a better validation metric before training stops."""

    validation_fraction: checks.OpenUnit | None = None
    """Share of the rows that choose the best epoch. Default: 0.1; below 1,600 rows the share that
    160 rows are, up to 0.2."""

    test_fraction: checks.OpenUnit = 0.2
    """Share of the rows that are held out to the end."""

    split: Literal["stratified", "random", "group", "time"] | None = None
    """How rows are split. ``stratified``: classes keep their shares; a rare class reaches training
    first. ``group``: rows of one ``split_column`` value stay together. ``time``: the latest rows
    test, those before validate. Default: stratified for classes, random for numbers and under
    ``label_epsilon``."""

    split_column: str | None = None
    """The primary's column for ``group`` (texts or whole numbers) or ``time`` (numbers or ISO
    dates), without missing values. It may be a key and is never a feature."""

    labelled_rows: checks.Count | None = None
    """How many training rows keep their labels, by default all. Pretraining uses the others too."""

    rows: Literal["all", "aligned"] = "all"
    """Labelled rows that train: ``all``, where a missing link gives zeros, or ``aligned``, those
    linked at every secondary. The primary then learns which these are, uncovered by noise.
    Validation and test rows stay all."""

    empty_labels: Literal["refuse", "unlabelled"] = "refuse"
    """An empty label is a mistake, or a training row for pretraining alone."""

    def split_of(self, task: Task) -> SplitKind:
        """Return how rows are split where the label is of that kind."""
        return self.split or ("random" if task == "regression" else "stratified")

    def __post_init__(self) -> None:
        checks.require_limits(self)
        if isinstance(self.threshold, float):
            checks.open_unit(threshold=self.threshold)
        if not (self.validation_fraction or 0.0) + self.test_fraction < 1:
            raise ConfigError(
                "test_fraction plus validation_fraction must be below 1, got "
                f"{self.test_fraction} + {self.validation_fraction}"
            )
        if (self.split in ("group", "time")) != (self.split_column is not None):
            raise ConfigError('split_column: goes with split = "group" or "time", and only with it')


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionSettings:
    """The ``[prediction]`` table: what a trained model may be asked for.

    It can be changed later, for a saved model too.
    """

    epsilon: checks.Positive | None = None
    """Epsilon of all predictions of the model together, at ``privacy.delta`` and apart from
    training. Default: ``privacy.epsilon`` once more."""

    releases_per_record: checks.Count | None = None
    """N: rows of all predictions that one record is released in; then it takes no part. All
    requests together cost what N rows cost. Default where records choose behind noise, unsampled:
    ``privacy.links_per_record``. Elsewhere every request is charged."""

    rows: checks.Count | None = None
    """Rows that all predictions of the model may ask for, counted in every ledger; default: any
    number. Without a promise it is the only bound on what a primary may ask."""

    least_secondaries: checks.Count | None = None
    """Fewest secondaries that may answer. Default with noise: ``privacy.colluding`` plus one;
    without noise as few as a training round may have."""

    def __post_init__(self) -> None:
        checks.require_limits(self)


Engine = Literal["masked", "crypten"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MpcSettings:
    """The ``[mpc]`` table: what parties compute on shares, and with what."""

    engine: Engine | None = None
    """Engine that averages rows. ``crypten``: secondaries share words as CrypTen tensors and add up
    shares. ``masked``: words under pairwise masks, which CrypTen adds up; the same sum. Default:
    ``crypten`` with a dealer and two secondaries or more, else ``masked``."""

    programs: Literal["unpromised", "always"] = "unpromised"
    """When ``securevfl mpc`` may run a program between the parties: where this file promises no
    epsilon, or always. No epsilon covers what a program reveals."""

    program: str = ""
    """SHA-256 of the only program that may run, with the name of its function; ``securevfl mpc``
    fills it in, so that parties compare it as they compare this file."""


OnLoss = Literal["stop", "wait"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSettings:
    """The ``[runtime]`` table: how long a party waits before it gives another one up."""

    join_timeout_s: checks.Positive = 120.0
    """Wait until every party has joined."""

    round_timeout_s: checks.Positive = 120.0
    """Wait of the primary for a round's messages; others wait thrice as long for it."""

    idle_timeout_s: checks.Positive = 3600.0
    """Longest work without a message, or time without room; others wait ``round_timeout_s`` longer
    for the primary."""

    silence_timeout_s: checks.Positive = 10.0
    """Time without a heartbeat after which a party is lost."""

    lowest_rate: checks.NonNegative = 1000.0
    """Bytes a second that a party must read of what waits for it, over ``silence_timeout_s``; a
    slower one is lost."""

    largest_message_mib: checks.Times = 256
    """MiB of the largest message taken in, unless row counts say that more is due."""

    on_loss: OnLoss = "stop"
    """``stop``: a lost party ends the run, and ``--resume`` continues it. ``wait``: the others
    wait. Repeats are charged, within the budget. With epsilon and a trained encoder ``wait`` plans
    noise for one more pass."""

    wait_s: checks.Positive = 3600.0
    """Time that a lost party may take to come back."""

    most_losses: checks.Times = 20
    """More losses than this end the run."""

    def __post_init__(self) -> None:
        checks.require_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartySettings:
    """One ``[[party]]`` table."""

    name: str
    """Unique in the federation; also the party's folder in the run folder."""

    role: Literal["primary", "secondary", "coordinator", "dealer"]
    """The primary has the labels, a secondary further columns. Coordinator and dealer have no
    table: both help to link, and a dealer makes the masks of ``encoder.labels = "shares"``."""

    data: str = ""
    """The party's table: text file, Parquet, Arrow, Feather, workbook, DuckDB or SQLite; or a
    ``NAME.source.toml``, which others need not read. A path below its own ``--data-root``, by
    default this file's folder."""

    reading: Reading = AS_IT_IS
    """How a text file is written, or which table of a database is meant."""

    key: tuple[str, ...] = ()
    """Columns that parties link by; the n-th of one party means the n-th of another."""

    label: str | None = None
    """The primary's label column."""

    positive: str | bool | int | float | None = None
    """The label that a binary task's probabilities and metrics are about. Default: the
    rarer of two words, and 1, true or yes; where labels have an epsilon, the one that sorts
    last."""

    address: str | None = None
    """The primary's ``host:port``; secondaries only dial out."""

    identity: str | None = None
    """``ed25519:…``, the party's public key (``securevfl identity create``)."""

    scaling: Literal["standard", "clamped", "bounds", "none"] = "standard"
    """``standard``: own mean and deviation. ``clamped``: the same, cut at five deviations, for rare
    words and outliers. ``bounds``: declared ranges, the same for any data. ``none``: as they
    are."""

    bounds: tuple[float, ...] | dict[str, tuple[float | str, ...]] | None = None
    """For ``scaling = "bounds"``: ``[low, high]`` of all columns of numbers, or such a pair by
    column. Dates are texts: ``["2015-01-01", "2025-12-31"]``, with a time of day where that is a
    feature. Truth values, words and flags of missing values need none."""

    categories: dict[str, tuple[str, ...]] | None = None
    """Words by text column, agreed without looking. Other words are refused, unless ``other`` is in
    the list and takes them in."""

    max_categories: checks.Width = MAX_CATEGORIES
    """Most frequent words that become features where no list is given; the rest is ``other``."""

    missing: Literal["fill", "refuse"] = "fill"
    """Treatment of empty cells. ``fill``: a feature flags them, and the middle of the declared
    bounds stands in, else the median; 0 for words and places in the year, 0.5 for truth values.
    ``refuse``: the table is refused."""

    missing_columns: tuple[str, ...] = ()
    """Columns that may have empty cells, known without looking; each gets the feature that says so.
    A promise about a secondary's records needs it. Otherwise they are found."""

    exclude: tuple[str, ...] = ()
    """Columns that are neither keys nor features."""

    def __post_init__(self) -> None:
        checks.plain_name(name=self.name)
        checks.file_name(name=self.name)  # "con" is a device on some systems, "--out" an option
        if self.is_helper:
            self._check_helper()
        else:
            self._check_table()
        if self.role == "primary":
            if self.address is None:
                raise ConfigError('address: the primary needs one, for example "127.0.0.1:7431"')
            parse_address(self.address)
        elif self.label is not None:
            raise ConfigError("label: only the primary holds labels; leave it out")
        elif self.positive is not None:
            raise ConfigError("positive: only the primary holds labels; leave it out")

    @property
    def is_helper(self) -> bool:
        """Whether the party has no table: it helps to link, or deals masks for class sums."""
        return self.role in ("coordinator", "dealer")

    def _check_helper(self) -> None:
        if self.reading != AS_IT_IS:
            raise ConfigError(f"reading: a {self.role} has no table; leave it out")
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
        try:
            checks.below_root(data=self.data)
        except ConfigError as error:
            raise ConfigError(
                f'{error}; for a table elsewhere write file = "…" into NAME.source.toml there, and '
                f"name that file"
            ) from None
        if not self.key:
            raise ConfigError("key: must name at least one column")
        if first_repeated(self.key) is not None:
            raise ConfigError(f"key: names a column twice: {', '.join(self.key)}; name each once")
        if (self.scaling == "bounds") != (self.bounds is not None):
            raise ConfigError('bounds: goes with scaling = "bounds", and only with it')
        checks.require_limits(self)
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
    if (twice := first_repeated(names)) is not None:
        raise ConfigError(f"party.name: two parties are called {twice!r}; rename one")
    primaries = [party.name for party in parties if party.role == "primary"]
    if len(primaries) != 1:
        holders = "none has" if not primaries else f"{' and '.join(primaries)} have"
        raise ConfigError(f'party.role: exactly one party must be "primary"; {holders} that role')
    if not any(party.role == "secondary" for party in parties):
        raise ConfigError(
            '[[party]]: at least one secondary is needed; add one with role = "secondary"'
        )
    for role in ("coordinator", "dealer"):
        helpers = [party.name for party in parties if party.role == role]
        if len(helpers) > 1:
            raise ConfigError(
                f"party.role: at most one party may be {role!r}, and {' and '.join(helpers)} are"
            )
    dimensions = {party.name: len(party.key) for party in parties if not party.is_helper}
    if len(set(dimensions.values())) > 1:
        text = ", ".join(f"{name} has {count}" for name, count in dimensions.items())
        raise ConfigError(f"party.key: keys must have the same dimension at all parties; {text}")
