"""Privacy statement of a run in plain words: the adversary, what it cannot learn, and the bound.

:func:`bounded_statement` states the guarantee of a run with noise, :func:`unbounded_statement` the
lack of one, and :func:`of_labels` the separate guarantee of the primary's labels. The console,
reports, the calculator and documents show their text unchanged.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Final, assert_never

from securevfl.core import checks
from securevfl.dp.events import ScoreKind
from securevfl.dp.labels import LabelMechanism, LabelTotal
from securevfl.dp.privacy import UnitName
from securevfl.dp.regime import REGIMES, Encoder

WEAK_EPSILON: Final = 10.0
"""Above it (odds change by up to e^10, 22,026) a statement carries a warning."""

NO_PROMISE: Final = (
    "No noise is added: what the primary learns from the averages is not bounded; secret sharing "
    "hides the terms of each average, and nothing else protects."
)

_NO_PROMISE_ALONE: Final = (
    "No noise is added, and with one secondary there is nothing to average with: what the primary "
    "learns from that secondary's vectors is not bounded, and nothing protects them."
)
_REACHED: Final[Mapping[str, str]] = {
    "symbols": (
        "Symbols come near this limit for nearly every record, and not in rare cases alone: from "
        "even odds a guess may be right in {} of cases."
    ),
    "laplace": (
        "Laplace noise reaches this limit for half of the records that count most, and not in rare "
        "cases alone: from even odds a guess may be right in {} of cases."
    ),
}
_ALONE: Final = "With one secondary there is nothing to average with: only the noise protects it."

LABELS_SHOWN: Final = (
    "Labels are shown: every secondary can tell how the primary's training rows are labelled, and "
    "nothing is promised of that."
)
_HONEST: Final = "This holds against secondaries that send what the protocol says."

# Epsilons are shown with four digits, rounded up.
_SHOWN: Final = Context(prec=4, rounding=ROUND_CEILING)
_NAMES: Final = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
# The smallest relative change of odds that is shown, where anything was released.
_LEAST_SHOWN: Final = 1e-6
# From here on numbers are shown as powers of ten, since few people know larger names.
_NAMELESS: Final = 1e15


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """Privacy statement of a run, in words and in parts."""

    text: str
    """The whole statement, including the warning."""

    against: str | None
    """The adversary; None without a guarantee."""

    hides: str | None
    """Fact that the adversary tries to find out; None without a guarantee."""

    odds_factor: float | None
    """``e^epsilon`` of this run, the largest change of odds. None without a guarantee, and if it
    exceeds the largest float."""

    warning: str | None
    """Part of ``text``: why the bound is too weak to rely on; None if it is not."""


def unbounded_statement(*, parties: int) -> Statement:
    """Return the statement of a run without noise.

    Args:
        parties: Secondaries of the federation.
    """
    text = NO_PROMISE if parties > 1 else _NO_PROMISE_ALONE
    return Statement(text=text, against=None, hides=None, odds_factor=None, warning=text)


def bounded_statement(
    *,
    unit: UnitName,
    encoder: Encoder | ScoreKind,
    epsilon: float,
    delta: float,
    parties: int,
    colluding: int,
    links_per_record: int | None,
    releases_per_record: int | None = None,
    claimed: float | None = None,
    total_epsilon: float | None = None,
) -> Statement:
    """Return the guarantee of a run with noise.

    Except with a probability of at most delta, the releases are distributed as if from a run in
    which odds change by at most a factor of e^epsilon; so the text says "can do no better than if".
    Odds that are computed from the releases themselves may exceed the factor slightly more often
    than with probability delta.

    Args:
        unit: Unit of the guarantee.
        encoder: How bottom models depend on private data; a cap on a record's rows does not apply
            to a trained one. The name of a pure release: frozen, with scores or votes of records
            that leave so instead of vectors behind Gaussian noise.
        epsilon: Epsilon of this run by sound accounting, in nats, >= 0.
        delta: Failure probability, in (0, 1).
        parties: ``k``, secondaries of the federation.
        colluding: ``c``, how many of them may help the primary.
        links_per_record: ``m``; None if there is no cap.
        releases_per_record: ``N``, where secondaries count a record's releases; None: they do not.
        claimed: Epsilon by the papers' formula, if the noise was calibrated to it.
        total_epsilon: Epsilon of all runs on this table, this one included; infinite if one of them
            added no noise. None leaves it out.

    Raises:
        ConfigError: If a number is outside its range.

    References:
        docs/privacy.md, section 2; [DR14] Lemma 3.17.
    """
    checks.non_negative(epsilon=epsilon)
    checks.open_unit(delta=delta)
    if total_epsilon is not None and total_epsilon != math.inf:
        checks.non_negative(total_epsilon=total_epsilon)
    against, knowing, their = "the primary alone", "it knows, it", "its"
    if colluding:
        against = f"the primary together with any {colluding} of the {parties} secondaries"
        knowing, their = "they know, they", "their"
    symbols, reached = encoder == "symbols", _REACHED.get(encoder)
    # Of class sums too, which are each secondary's own.
    kind = f"noised {'sums' if parties > 1 or reached else 'vectors'}"
    kind = f"symbols, {kind}" if symbols else kind
    linked = "linked to any number of the primary's rows"
    if releases_per_record is not None:
        linked = f"released in at most {releases_per_record} of the primary's rows"
    elif (reached or REGIMES[encoder].caps_records) and links_per_record is not None:
        linked = f"linked to at most {links_per_record} of the primary's rows"
    hides = _hidden(unit, linked=linked, parties=parties, colluding=colluding)
    warning = _warning(epsilon=epsilon, total=total_epsilon, published=claimed is not None)
    sentences = [
        None if claimed is None else _claim(claimed),
        f"Suppose {against} tries to find out from all {kind} and counts of this run whether "
        f"{hides}.",
        f"Whatever else {knowing} can do no better than if {their} odds changed by at most a "
        f"factor of {_factor(epsilon)}, except with a probability of {_one_in(delta)} "
        f"(delta = {delta:g}).",
        None if reached is None else reached.format(suspicion_in_words(epsilon, against=1)),
        None if total_epsilon is None else _total(total_epsilon),
        _ALONE if parties == 1 and not symbols else None,
        _not_covered(unit, runs="other runs" if total_epsilon is None else "later runs"),
        warning,
    ]
    return Statement(
        text=" ".join(sentence for sentence in sentences if sentence is not None),
        against=against,
        hides=hides,
        odds_factor=_exp(epsilon),
        warning=warning,
    )


def of_labels(
    mechanism: LabelMechanism,
    run: LabelTotal,
    *,
    parties: int,
    table: LabelTotal | None = None,
) -> Statement:
    """Return the guarantee of a run for the primary's labels against secondaries.

    Args:
        mechanism: How labels reach secondaries.
        run: Privacy loss of this run's label releases.
        parties: Secondaries of the federation.
        table: Privacy loss of all runs on the table, this one included. None leaves it out.

    Raises:
        ConfigError: If a number is outside its range.

    References:
        docs/privacy.md, section 1; [DR14] Lemma 3.17.
    """
    if run.epsilon is None or run.together is None:
        return Statement(
            text=LABELS_SHOWN, against=None, hides=None, odds_factor=None, warning=LABELS_SHOWN
        )
    one_by_one = mechanism == "shares" and parties > 1
    against, knowing, their = f"all {parties} secondaries together", "they know, they", "their"
    suppose = "try"
    if one_by_one or parties == 1:
        against, knowing, their = "any one secondary", "it knows, it", "its"
        suppose = "tries"
    hides = "how any one of the primary's training rows is labelled"
    surely = (
        f", except with a probability of {_one_in(run.delta)} (delta = {run.delta:g})"
        if run.delta
        else ""
    )
    together = f"For all {parties} secondaries together the factor is {_factor(run.together)}."
    total = math.inf if table is None or table.epsilon is None else table.epsilon
    warning = _warning(epsilon=run.epsilon, total=None if table is None else total, published=False)
    sentences = [
        f"Suppose {against} {suppose} to find out {hides}.",
        f"Whatever else {knowing} can do no better than if {their} odds of one label against "
        f"another changed by at most a factor of {_factor(run.epsilon)}{surely}.",
        together if one_by_one else None,
        _HONEST if mechanism == "shares" else None,
        None if table is None else _labels_total(table, one_by_one=one_by_one),
        f"Not covered: labels of several rows together, what many labels have in common, which "
        f"rows train, which classes exist and whether a run starts (both follow from labels), "
        f"what later predictions show, and "
        f"{'other' if table is None else 'later'} runs.",
        warning,
    ]
    return Statement(
        text=" ".join(sentence for sentence in sentences if sentence is not None),
        against=against,
        hides=hides,
        odds_factor=_exp(run.epsilon),
        warning=warning,
    )


def odds_in_words(epsilon: float) -> str:
    """Return ``e^epsilon`` in words.

    Rounded to the nearest; from 10^15 on up to a power of ten. Below 10 with as many decimals as
    are needed to show a difference from 1.

    Args:
        epsilon: Finite, >= 0.

    Examples:
        >>> [odds_in_words(epsilon) for epsilon in (0.01, 1, 4, 8, 24, 50)]
        ['1.01', '2.7', '55', '2,981', '26 billion', '10^22']
    """
    checks.non_negative(epsilon=epsilon)
    factor = _exp(epsilon)
    # Two digits are enough of a number that has a name; they may round up to the next name.
    short = math.inf if factor is None else float(f"{factor:.1e}")
    if factor is None or short >= _NAMELESS:
        return f"10^{math.ceil(epsilon / math.log(10)):,}"
    for scale, name in _NAMES:
        if short >= scale:
            return f"{short / scale:.3g} {name}"
    if short >= 10:
        return f"{factor:,.0f}"
    above = max(math.expm1(epsilon), _LEAST_SHOWN)
    return f"{1 + above:.{max(1, math.ceil(-math.log10(above)))}f}" if epsilon else "1"


def suspicion_in_words(epsilon: float, *, against: int = 99) -> str:
    """Return the largest posterior of a suspicion, of 1 %, if odds change by ``e^epsilon``.

    In per cent, rounded up to two digits.

    Args:
        epsilon: Finite, >= 0.
        against: Odds against it before.

    Examples:
        >>> [suspicion_in_words(epsilon) for epsilon in (0, 0.1, 1, 8, 24)]
        ['1 %', '1.2 %', '2.7 %', '97 %', 'more than 99 %']
    """
    checks.non_negative(epsilon=epsilon)
    percent = 100 / (1 + against * math.exp(-epsilon))
    if percent > 99:
        return "more than 99 %"
    digits = 1 if percent < 10 else 0
    # A float's last bit must not lift 1 % to 1.1 %.
    return f"{math.ceil(percent * 10**digits - 1e-9) / 10**digits:g} %"


def _exp(epsilon: float) -> float | None:
    try:
        return math.exp(epsilon)
    except OverflowError:
        return None


def _factor(epsilon: float) -> str:
    """Return "2,981 (epsilon = 8)"; the factor is that of the epsilon that is shown."""
    shown = _SHOWN.create_decimal(repr(float(epsilon)))
    text = f"{shown:,.0f}" if shown >= 1000 else f"{float(shown):g}"
    return f"{odds_in_words(float(shown))} (epsilon = {text})"


def _one_in(probability: float) -> str:
    """Return a probability as "1 in 1,000,000", rounded up."""
    times = 1 / Decimal(repr(float(probability)))
    if times >= _NAMELESS:
        return f"1 in 10^{times.adjusted()}"
    step = Decimal(1) if times >= 10 else Decimal("0.1")
    return f"1 in {times.quantize(step, rounding=ROUND_FLOOR):,}".removesuffix(".0")


def _hidden(unit: UnitName, *, linked: str, parties: int, colluding: int) -> str:
    """Return the adversary's question about the tables of the secondaries that do not help it."""
    other = "other " if colluding else ""
    one_left = parties - colluding == 1
    match unit:
        case "secondary-record":
            table = f"the {other}secondary's table"
            if not one_left:
                anyone = "the table of any one other secondary"
                table = anyone if colluding else "any one secondary's table"
            return f"any one record ({linked}) is in {table}"
        case "entity":
            tables = "secondary's table" if one_left else "secondaries' tables"
            records = f"at most one record at each secondary, each {linked}"
            return f"any one entity ({records}) is in the {other}{tables}"
        case "linked-row":
            holders = "secondary" if one_left else "secondaries"
            return f"any one of the primary's rows is linked to records of the {other}{holders}"
        case _:
            assert_never(unit)


def _claim(epsilon: float) -> str:
    return (
        f"The papers' formula claims a factor of {_factor(epsilon)}. That is not a guarantee; "
        f"sound accounting of the same noise says the following, if no other channel breaks it."
    )


def _total(epsilon: float) -> str:
    if epsilon == math.inf:
        why = "one of them added no noise, or was a program"
        return f"For all runs on this table together there is no bound: {why}."
    return f"For all runs on this table together the factor is {_factor(epsilon)}."


def _labels_total(table: LabelTotal, *, one_by_one: bool) -> str:
    if table.epsilon is None or table.together is None:
        return "For all runs on this table together there is no bound: one of them showed labels."
    each = f"For all runs on this table together the factor is {_factor(table.epsilon)}"
    together = f", and for all secondaries together {_factor(table.together)}"
    return f"{each}{together if one_by_one else ''}."


def _not_covered(unit: UnitName, *, runs: str) -> str:
    ones = {"secondary-record": "records", "entity": "entities", "linked-row": "rows"}[unit]
    shared = ", a record that several rows share" if unit == "linked-row" else ""
    return (
        f"Not covered: groups of {ones}, what many {ones} have in common{shared}, what linkage "
        f"shows, what secondaries learn of the primary's rows and labels, and {runs}."
    )


def _warning(*, epsilon: float, total: float | None, published: bool) -> str | None:
    weak = f"too weak to rest a decision on (epsilon is above {WEAK_EPSILON:g})."
    warnings = ["Warning: the papers' figure is not a guarantee."] if published else []
    if epsilon > WEAK_EPSILON:
        warnings.append(f"Warning: this bound is {weak}")
    elif total is not None and total > WEAK_EPSILON:
        warnings.append(f"Warning: the bound for all runs together is {weak}")
    return " ".join(warnings) or None
