"""The sentence to sign has all its parts, for every kind of promise."""

import itertools
import math
import re
from typing import Any

import pytest

from securevfl.core.errors import ConfigError
from securevfl.dp import Privacy
from securevfl.dp.labels import LabelTotal
from securevfl.dp.release_plan import ReleasePlan
from securevfl.dp.statement import (
    NO_PROMISE,
    WEAK_EPSILON,
    Statement,
    bounded_statement,
    of_labels,
    unbounded_statement,
)

UNITS = ("secondary-record", "entity", "linked-row")
ENCODERS = ("frozen", "dp-trained", "trained")
PARTIES = ((1, 0), (2, 0), (2, 1), (5, 0), (5, 2), (5, 4))


def said(**changes: Any) -> Statement:
    """Return README's promise, with changes."""
    promise: dict[str, Any] = {
        "unit": "secondary-record",
        "encoder": "frozen",
        "epsilon": 8.0,
        "delta": 1e-6,
        "parties": 2,
        "colluding": 0,
        "links_per_record": 1,
    }
    return bounded_statement(**(promise | changes))


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[a-z)])\. ", text)


def test_it_reads_as_documents_quote_it() -> None:
    """Word by word, so that a change of the wording is seen by whoever makes it."""
    assert said().text == (
        "Suppose the primary alone tries to find out from all noised sums and counts of this run "
        "whether any one record (linked to at most 1 of the primary's rows) is in any one "
        "secondary's table. "
        "Whatever else it knows, it can do no better than if its odds changed by at most a factor "
        "of 2,981 (epsilon = 8), except with a probability of 1 in 1,000,000 (delta = 1e-06). "
        "Not covered: groups of records, what many records have in common, what linkage shows, "
        "what secondaries learn of the primary's rows and labels, and other runs."
    )


@pytest.mark.parametrize("parties", [1, 2])
def test_symbols_say_that_their_limit_is_reached_in_every_row(parties: int) -> None:
    """Gaussian noise comes near it once in 1 / delta runs; and no average protects a symbol."""
    text = said(encoder="symbols", epsilon=2.0, delta=1e-5, parties=parties).text
    assert text.startswith(
        "Suppose the primary alone tries to find out from all symbols, noised sums and counts of "
    )
    assert (
        "by at most a factor of 7.4 (epsilon = 2), except with a probability of 1 in 100,000 "
        "(delta = 1e-05). Symbols come near this limit for nearly every record, and not in rare "
        "cases alone: from even odds a guess may be right in 89 % of cases. Not covered: "
    ) in text


@pytest.mark.parametrize(
    ("unit", "encoder", "people"), [*itertools.product(UNITS, ENCODERS, PARTIES)]
)
@pytest.mark.parametrize("published", [False, True])
def test_every_promise_names_its_parts(
    unit: str, encoder: str, people: tuple[int, int], published: bool
) -> None:
    """Against whom, about what, how far, how surely, and what it does not cover."""
    parties, colluding = people
    claimed = {"claimed": 1.5} if published else {}
    statement = said(
        unit=unit,
        encoder=encoder,
        parties=parties,
        colluding=colluding,
        links_per_record=None if unit == "linked-row" else 7,
        **claimed,
    )
    text = statement.text

    # Against whom: who helps is named with how many could, and "alone" is said where nobody does.
    against = "the primary alone"
    if colluding:
        against = f"the primary together with any {colluding} of the {parties} secondaries"
    assert statement.against == against
    assert f"Suppose {against} tries to find out" in text
    assert ("alone" in text) == (colluding == 0)
    # What: the unit, and its cap where one counts. Helpers know what is in their own tables.
    assert statement.hides is not None
    assert f"whether {statement.hides}." in text
    subject = {
        "secondary-record": "any one record (",
        "entity": "any one entity (at most one record at each secondary, ",
        "linked-row": "any one of the primary's rows is linked to records of ",
    }
    assert statement.hides.startswith(subject[unit])
    capped = encoder != "trained" and unit != "linked-row"
    assert ("linked to at most 7 of the primary's rows" in text) == capped
    assert ("any number of the primary's rows" in text) == (
        encoder == "trained" and unit != "linked-row"
    )
    assert ("other secondar" in statement.hides) == (colluding > 0)
    if parties - colluding == 1:
        assert re.search(r"the (other )?secondary('s table)?$", statement.hides)
    # How far and how surely, in plain numbers; a bound, not a permission.
    assert "no better than if" in text
    assert "at most a factor of 2,981 (epsilon = 8), " in text
    assert "except with a probability of 1 in 1,000,000 (delta = 1e-06)" in text
    assert statement.odds_factor == math.exp(8)
    assert not re.search(r"\b(let|lets|allows?|tells?) ", text)
    # What it does not cover.
    ones = {"secondary-record": "records", "entity": "entities", "linked-row": "rows"}[unit]
    assert f"Not covered: groups of {ones}, what many {ones} have in common" in text
    for limit in ("linkage", "what secondaries learn of the primary's rows and labels", "runs"):
        assert limit in text[text.index("Not covered") :]
    # Of one secondary there is no average.
    assert ("nothing to average with" in text) == (parties == 1)
    assert ("all noised sums" in text) == (parties > 1)
    # What is no guarantee is called that, and warned of.
    assert ("not a guarantee" in text) == published
    assert (statement.warning is None) == (not published)
    if published:
        assert text.startswith("The papers' formula claims a factor of 4.5 (epsilon = 1.5). That")
    elif parties > 1:
        assert len(sentences(text)) == 3


@pytest.mark.parametrize(
    ("epsilon", "total", "warned"),
    [
        (WEAK_EPSILON, None, False),
        (WEAK_EPSILON * (1 + 1e-12), None, True),
        (24.0, None, True),
        (4.0, WEAK_EPSILON, False),
        (4.0, 12.1, True),
        (4.0, math.inf, True),
    ],
)
def test_a_weak_bound_carries_its_warning_within_the_text(
    epsilon: float, total: float | None, warned: bool
) -> None:
    """Above 10, in this run or in all; whoever quotes the text quotes the warning."""
    statement = said(epsilon=epsilon, total_epsilon=total)

    assert (statement.warning is not None) == warned
    assert ("too weak to rest a decision on" in statement.text) == warned
    if statement.warning is not None:
        assert statement.text.endswith(statement.warning)
        assert statement.warning.startswith("Warning: ")


def test_the_total_of_a_table_is_said_only_where_it_is_known() -> None:
    """Then the runs so far are covered, and later ones are not."""
    assert "all runs" not in said().text
    assert said().text.endswith("and other runs.")
    total = said(total_epsilon=9.2).text
    assert "For all runs on this table together the factor is 9,897 (epsilon = 9.2)." in total
    assert total.endswith("and later runs.")
    assert (
        "there is no bound: one of them added no noise, or was a program"
        in said(total_epsilon=math.inf).text
    )


@pytest.mark.parametrize("parties", [1, 2])
def test_without_noise_nothing_is_promised_and_that_is_the_warning(parties: int) -> None:
    """With one secondary there is no sum to hide in either."""
    statement = unbounded_statement(parties=parties)

    assert statement.text.startswith("No noise is added")
    assert "is not bounded" in statement.text
    assert statement.warning == statement.text
    assert (statement.text == NO_PROMISE) == (parties > 1)
    assert ("nothing to average with" in statement.text) == (parties == 1)
    assert (statement.against, statement.hides, statement.odds_factor) == (None, None, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": math.nan},
        {"epsilon": math.inf},
        {"epsilon": -1.0},
        {"delta": 0.0},
        {"total_epsilon": math.nan},
        {"total_epsilon": -1.0},
    ],
)
def test_what_is_no_bound_makes_no_sentence(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must"):
        said(**wrong)


def test_repeated_rounds_count_in_this_run() -> None:
    """What a resumed run has spent is said where it is more than was planned."""
    plan = ReleasePlan(
        privacy=Privacy(epsilon=3.0),
        parties=2,
        min_active=2,
        rounds=1,
        rows_per_round=10,
        row_releases=10,
        releases_per_row=1,
        links=1,
    )
    tau = plan.noise_share_std()

    assert "(epsilon = 3)" in plan.statement(tau).text
    assert "(epsilon = 3)" in plan.statement(tau, spent=1.0).text
    assert "(epsilon = 4.5)" in plan.statement(tau, spent=4.5).text


SHARED = {"mechanism": "shares", "run": LabelTotal(epsilon=2.0, together=4.5, delta=1e-6)}


def of(**changes: Any) -> Statement:
    """Return what is said of labels whose sums are shared among four secondaries."""
    return of_labels(**({"parties": 4} | SHARED | changes))


def test_the_sentence_of_labels() -> None:
    """Word by word, for each way in which labels reach secondaries."""
    rest = (
        "Not covered: labels of several rows together, what many labels have in common, which rows "
        "train, which classes exist and whether a run starts (both follow from labels), what later "
        "predictions show, and other runs."
    )
    assert of().text == (
        "Suppose any one secondary tries to find out how any one of the primary's training rows is "
        "labelled. Whatever else it knows, it can do no better than if its odds of one label "
        "against another changed by at most a factor of 7.4 (epsilon = 2), except with a "
        "probability of 1 in 1,000,000 (delta = 1e-06). For all 4 secondaries together the factor "
        "is 90 (epsilon = 4.5). This holds against secondaries that send what the protocol says. "
        + rest
    )
    once = LabelTotal(epsilon=2.0, together=2.0, delta=0.0)
    assert of(mechanism="randomised", run=once).text == (
        "Suppose all 4 secondaries together try to find out how any one of the primary's training "
        "rows is labelled. Whatever else they know, they can do no better than if their odds of "
        "one label against another changed by at most a factor of 7.4 (epsilon = 2). " + rest
    )
    shown = LabelTotal(epsilon=None, together=None, delta=0.0)
    assert of(mechanism="plaintext", run=shown).text == of(mechanism="plaintext", run=shown).warning
    assert of(mechanism="plaintext", run=shown).odds_factor is None
    assert of().odds_factor == math.exp(2)


def test_the_sentence_of_labels_over_runs() -> None:
    """All runs on the table, the same for one secondary and for all; and what is too weak."""
    both = of(table=LabelTotal(epsilon=3.0, together=8.0, delta=1e-6)).text
    assert (
        "For all runs on this table together the factor is 20 (epsilon = 3), and for all "
        "secondaries together 2,981 (epsilon = 8)." in both
    )
    assert both.endswith("and later runs.")
    lost = of(table=LabelTotal(epsilon=None, together=None, delta=1e-6))
    assert "there is no bound: one of them showed labels" in lost.text
    assert lost.warning is not None
    weak = of(run=LabelTotal(epsilon=WEAK_EPSILON + 1, together=30.0, delta=1e-6))
    assert weak.warning is not None
    assert weak.text.endswith(weak.warning)
    assert of().warning is None


def test_where_releases_are_counted_their_number_is_said_and_not_the_cap_on_links() -> None:
    """A record that is linked to 2 rows a request may be released in 5 of all requests."""
    privacy = Privacy(epsilon=4.0, delta=1e-6, encoder="frozen", links_per_record=2)
    plan = ReleasePlan(
        privacy=privacy,
        parties=2,
        min_active=2,
        rounds=1,
        rows_per_round=10,
        row_releases=10,
        releases_per_row=1,
        links=2,
        pooled=True,
        contested=False,
        releases_per_record=5,
    )
    text = plan.statement(plan.noise_share_std()).text
    assert "any one record (released in at most 5 of the primary's rows) is in" in text
    assert "at most 2" not in text
