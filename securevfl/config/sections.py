"""The ``[federation]``, ``[training]``, ``[base]`` and ``[runtime]`` tables."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from securevfl.core import checks
from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.rows import SplitKind
from securevfl.data.scaling import MAX_CATEGORIES, declared_range
from securevfl.data.sources.settings import AS_IT_IS, Reading
from securevfl.models.optimisers import Schedule
from securevfl.models.tasks import Rule

# The ``[base]`` table: the model of the primary alone, which the joint model is weighed with.

OWN = "python"
"""What stands in a federation file for an estimator that only Python can hand over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseSettings:
    """The ``[base]`` table: the local model that the joint model is weighed against."""

    estimator: Literal["best", "boosting", "linear", "none", "python"] = "best"
    """The model of the primary's own columns and numeric keys: ``boosting``, scikit-learn's
    histogram boosting; ``linear``, a ridge or logistic regression; ``best``, the best of these and
    a perceptron, or an average of those that are level on the validation rows; ``none``, as in the
    papers: outputs are those of the family alone, and nothing decides whether they are used.
    With a base, the joint model answers only where it is better than the primary's local baseline
    and than the same network without partners on validation rows. ``python`` stands in the file of
    a run for an estimator that :func:`securevfl.simulate` was handed."""

    described: str | None = None
    """Of ``python``: the estimator's class and parameters."""

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
    if not hasattr(base, "fit") or not hasattr(base, "get_params"):
        raise ConfigError(
            'base: must be "best", "boosting", "linear", "none" or an estimator of scikit-learn, '
            f"got {base!r:.60}"
        )
    return {"estimator": OWN, "described": described(base)}


def described(estimator: Any) -> str:
    """Return an estimator's class and parameters, by which the digest of a model knows it."""
    kind = type(estimator)
    # Every parameter, not those alone that are printed.
    params = json.dumps(estimator.get_params(), sort_keys=True, default=repr)
    return f"{kind.__module__}.{kind.__qualname__} {params}"


# The ``[federation]``, ``[training]`` and ``[runtime]`` tables.


@dataclass(frozen=True, kw_only=True, slots=True)
class FederationSettings:
    """The ``[federation]`` table."""

    name: str
    """What the federation is called in reports and logs, and its run folders by default: a plain
    file name."""

    task: Task
    """What the label is: a number, one of two classes, or one of several."""

    classes: int | None = None
    """How many classes the label of a multiclass task has. Only ``encoder.method = "auto"`` needs
    it; where it is written, the primary's label must have as many."""

    seed: int = 0
    """Run seed of initialisation, shuffling and dropout; noise never comes from it."""

    def __post_init__(self) -> None:
        checks.file_name(name=self.name)
        checks.at_least(0, seed=self.seed)
        if self.classes is not None:
            checks.within(2, checks.MOST_WIDTH, classes=self.classes)
            if self.task != "multiclass":
                raise ConfigError(
                    f"classes: only a multiclass task has it, and this one is {self.task}; "
                    f"leave it out"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """The ``[training]`` table."""

    epochs: int = 20
    """Passes over the primary's training rows, at most."""

    batch_size: int = 128
    """Rows of the primary in a round."""

    learning_rate: float | None = None
    """Step size of every party's optimizer. Default: 0.003; of ``fedhssl`` and its parts 0.001."""

    schedule: Schedule = "constant"
    """Step sizes from epoch to epoch: ``constant``, or ``cosine``, half a period of it
    from ``learning_rate`` down, which would reach 0 one epoch after the last of ``epochs`` ([SGDR]
    equation 5, by epochs)."""

    optimizer: Literal["adamw", "adam", "lamb", "sgd"] = "adamw"
    """Every party's optimizer."""

    weight_decay: float = 0.0
    """Decoupled weight decay of every party's optimizer."""

    metric: str | None = None
    """Which of the task's metrics chooses the best epoch, ends training by ``patience``, and stands
    first in results; the others are reported too. Default: rmse, auc (binary) or accuracy
    (multiclass)."""

    threshold: Rule = "half"
    """From which probability on a row of a binary task counts as one of the second class: ``half``,
    0.5; a number in (0, 1); or what is best on the validation rows of each epoch, ``f1`` by F1 and
    ``youden`` by the true positives' rate minus the false positives'. All metrics that need a
    decision go by it, and results name it."""

    iso_gradients: float = 0.0
    """lambda of the ISO noise on the gradients that the primary returns to secondaries ([FedHSSL]
    section VI); the longest in the batch sets its size, 0 adds none. It hides labels by a
    heuristic, and promises nothing."""

    patience: int = 10
    """Epochs without a better validation metric before training stops."""

    validation_fraction: float = 0.1
    """Share of the primary's rows that choose the best epoch."""

    test_fraction: float = 0.2
    """Share of the primary's rows that are held out to the end."""

    split: Literal["stratified", "random", "group", "time"] | None = None
    """How the primary's rows are split. ``stratified``: each class has its share of every part, and
    a class of few rows reaches training first, then testing, then validation; ``random``;
    ``group``: all rows of a group (one value of ``split_column``) are in one part, and the
    fractions are shares of the groups; ``time``: the rows with the latest ``split_column`` are for
    testing, those before them for validation. Default: stratified for classes, random for numbers.
    Where labels have an epsilon (``label_epsilon``) the default is random and ``stratified`` is
    refused: every party knows the seed, so a split by classes would show labels."""

    split_column: str | None = None
    """Column of the primary's table that ``group`` or ``time`` goes by: texts or whole numbers; or
    numbers or dates in ISO form. It may be a key and is never a feature; no value may be
    missing."""

    labelled_rows: int | None = None
    """How many training rows keep their labels; default: all. Pretraining uses the others too."""

    rows: Literal["all", "aligned"] = "all"
    """Which labelled training rows the joint model learns from: ``all``, where a secondary without
    a link gives zeros; or those that are ``aligned``, linked at every secondary. The primary then
    learns which these are, which no noise covers. Validation and test rows stay all of them."""

    empty_labels: Literal["refuse", "unlabelled"] = "refuse"
    """What an empty label cell is: a mistake, or a training row without a label, for pretraining.
    Validation and test rows are drawn from those that have one."""

    def split_of(self, task: Task) -> SplitKind:
        """Return how rows are split where the label is of that kind."""
        return self.split or ("random" if task == "regression" else "stratified")

    def __post_init__(self) -> None:
        times = {"epochs": self.epochs, "batch_size": self.batch_size, "patience": self.patience}
        checks.within(1, checks.MOST_TIMES, **times)
        if self.learning_rate is not None:
            checks.positive(learning_rate=self.learning_rate)
        checks.non_negative(weight_decay=self.weight_decay, iso_gradients=self.iso_gradients)
        if isinstance(self.threshold, float):
            checks.open_unit(threshold=self.threshold)
        checks.open_unit(
            validation_fraction=self.validation_fraction, test_fraction=self.test_fraction
        )
        if not self.validation_fraction + self.test_fraction < 1:
            raise ConfigError(
                "test_fraction plus validation_fraction must be below 1, got "
                f"{self.test_fraction} + {self.validation_fraction}"
            )
        if (self.split in ("group", "time")) != (self.split_column is not None):
            raise ConfigError('split_column: goes with split = "group" or "time", and only with it')
        if self.labelled_rows is not None:
            checks.at_least(1, labelled_rows=self.labelled_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionSettings:
    """The ``[prediction]`` table: what a trained model may be asked for.

    It can be changed later, for a saved model too.
    """

    epsilon: float | None = None
    """Epsilon of all predictions of the model together, at ``privacy.delta`` and apart from
    training; default: ``privacy.epsilon`` once more. Each request is charged to every party's
    ledger like a run."""

    rows: int | None = None
    """How many rows all predictions of the model may ask for, as every party counts in its own
    ledger; default: any number. Where nothing is promised, it is the one bound on how often a
    primary may ask, of any place that it likes."""

    least_secondaries: int | None = None
    """How few secondaries may answer where others are absent; default: with noise one more than
    ``privacy.colluding``; without it as few as a training round may have (``model.party_dropout``,
    ``runtime.least_secondaries``), and of frozen encoders all of them, or one with
    ``encoder.layout = "blocks"``. Where one alone answers, the primary sees its numbers by
    themselves, behind its own noise if there is any."""

    def __post_init__(self) -> None:
        if self.epsilon is not None:
            checks.positive(epsilon=self.epsilon)
        if self.rows is not None:
            checks.at_least(1, rows=self.rows)
        if self.least_secondaries is not None:
            checks.whole(least_secondaries=self.least_secondaries)
            checks.at_least(1, least_secondaries=self.least_secondaries)


OnLoss = Literal["stop", "wait", "continue"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSettings:
    """The ``[runtime]`` table: how long a party waits before it gives another one up."""

    join_timeout_s: float = 120.0
    """Seconds to wait until every party has joined."""

    round_timeout_s: float = 120.0
    """Seconds to wait for the next message of a round."""

    idle_timeout_s: float = 3600.0
    """Seconds to wait for the primary's next round, while heartbeats say that it is alive."""

    silence_timeout_s: float = 10.0
    """Seconds without a heartbeat after which a party counts as lost."""

    lowest_rate: float = 1000.0
    """Bytes a second that a party must take of what waits to be sent to it, over
    ``silence_timeout_s``; a slower one counts as lost. How long a whole round may take is
    ``round_timeout_s``."""

    largest_message_mib: int = 256
    """MiB of the largest message that a party takes in, where it does not know from the numbers of
    rows that more is due. Codes or cells of a secondary's records are one message: about 2 million
    records at 1,000 bits each."""

    on_loss: OnLoss = "stop"
    """What becomes of the run when a party is killed, hangs, is cut off or is too slow: ``stop``
    ends it, and ``--resume`` continues it; with ``wait`` all others keep what they have, wait
    until the party is there again, and continue from the last epoch that all have saved, or the
    last row that was released; with ``continue`` a secondary that is not back within
    ``continue_after_s`` is left out, and may come back whenever an epoch ends. What is done again
    is charged again, within the run's budget; with ``privacy.epsilon`` and an encoder that trains,
    ``wait`` and ``continue`` plan noise for one pass over the rows more, so that a run that is lost
    near its end still has room for its test rows."""

    wait_s: float = 3600.0
    """Seconds that a party which is lost may take to come back."""

    continue_after_s: float = 60.0
    """With ``on_loss = "continue"``: seconds that a lost secondary may take to come back before the
    others continue without it."""

    least_secondaries: int | None = None
    """With ``on_loss = "continue"``: the fewest secondaries that may continue; noise is made for so
    few from the first round on. Every secondary holds the primary to it. Default: all but one,
    but at least two more than ``privacy.colluding``. With noise it may be one more: that one's
    numbers are then hidden by its own noise alone."""

    most_losses: int = 20
    """After how many losses a run that waits, or continues, ends all the same."""

    def __post_init__(self) -> None:
        checks.one_of(get_args(OnLoss), on_loss=self.on_loss)
        checks.at_least(0, lowest_rate=self.lowest_rate)
        checks.within(
            1,
            checks.MOST_TIMES,
            most_losses=self.most_losses,
            largest_message_mib=self.largest_message_mib,
        )
        if self.least_secondaries is not None:
            checks.whole(least_secondaries=self.least_secondaries)
            checks.at_least(1, least_secondaries=self.least_secondaries)
            if self.on_loss != "continue":
                raise ConfigError(
                    'least_secondaries: goes with on_loss = "continue", and only with it; leave it '
                    "out"
                )
        checks.positive(
            join_timeout_s=self.join_timeout_s,
            round_timeout_s=self.round_timeout_s,
            idle_timeout_s=self.idle_timeout_s,
            silence_timeout_s=self.silence_timeout_s,
            wait_s=self.wait_s,
            continue_after_s=self.continue_after_s,
        )


# The ``[[party]]`` tables: who takes part, and with which columns.

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
        """Whether the party has no table: it helps to link, or deals masks for votes."""
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
        if not self.key:
            raise ConfigError("key: must name at least one column")
        if len(set(self.key)) < len(self.key):
            raise ConfigError(f"key: names a column twice: {', '.join(self.key)}; name each once")
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
            raise ConfigError(f"party.name: two parties are called {name!r}; rename one")
    primaries = [party.name for party in parties if party.role == "primary"]
    if len(primaries) != 1:
        found = "none has" if not primaries else f"{' and '.join(primaries)} have"
        raise ConfigError(f'party.role: exactly one party must be "primary"; {found} that role')
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
