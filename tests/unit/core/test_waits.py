"""Every wait has its bound from one table, in which who is nearest to the culprit speaks first."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import securevfl
from securevfl.core.waits import Waits

PACKAGE = Path(securevfl.__file__).parent
ROOMS = ("federation", "ledger", "linkage", "runtime", "serving", "transport")
SETTINGS = {"join_timeout_s", "round_timeout_s", "idle_timeout_s", "silence_timeout_s", "wait_s"}
# Where settings become the table.
TABLE = {"config/federation.py"}
ROWS = {"primary_s", "for_primary_s", "helper_s", "secondary_s"}
# Bounds that are handed on, and those that a connection got of the table when it began.
HANDED_ON = {"_between_s", "_deadline_s", "_wait_s", "_work_s", "busy_timeout_s", "deadline_s"}
HANDED_ON |= {"between_s", "follow_s", "idle_s", "wait_s"}
# Helpers wait for the end of a session, whose primary shows that it lives; a launcher for its own
# processes, which have bounds of their own.
WITHOUT_END = {"_LONGER_THAN_A_RUN_S", "_LAUNCH_DEADLINE_S", "_LONGEST_S"}

SECONDS = st.floats(1e-3, 1e7)


def waits(join: float, back: float, one_round: float, idle: float) -> Waits:
    return Waits(join_s=join, return_s=back, round_s=one_round, idle_s=idle, silence_s=1.0)


@given(join=SECONDS, back=SECONDS, patience=SECONDS, one_round=SECONDS, idle=SECONDS)
def test_the_primary_speaks_before_those_that_wait_for_it(join, back, patience, one_round, idle):
    """For each wait of the primary, all that it may wait meanwhile is less than a caller's bound.

    And whoever waits for another caller speaks before the primary, which does not know whose turn
    it is there.
    """
    table = waits(join, back, one_round, idle)
    for wait in (table.answer, table.work):
        assert wait.helper_s < wait.secondary_s < wait.primary_s < wait.for_primary_s
    # A round: the message is taken in, then answered.
    assert table.answer.primary_s + table.answer.primary_s < table.answer.for_primary_s
    # The primary's waits count together until they come to ``work``; a round's may be the last.
    assert max(table.work.primary_s, table.answer.primary_s) < table.work.for_primary_s
    for own in (None, patience):
        # Two parties with patience of their own: one waits for all, the other to be welcomed.
        waited = max(table.joining(own).primary_s, back) + table.answer.primary_s
        assert waited < table.joining(own).for_primary_s


def calls(room: str) -> list[tuple[str, ast.Call]]:
    return [
        (f"{path.relative_to(PACKAGE)}:{node.lineno}", node)
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def leaves(value: ast.expr) -> set[str]:
    """Return the last names of what a bound may be."""
    if isinstance(value, ast.IfExp):
        return leaves(value.body) | leaves(value.orelse)
    if isinstance(value, ast.Attribute):
        return {value.attr}
    return {value.id if isinstance(value, ast.Name) else ast.unparse(value)}


def test_settings_of_waits_are_read_for_the_table_alone() -> None:
    """A wait with a bound of its own would be one that nobody has compared with the others."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in TABLE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in SETTINGS
        and ast.unparse(node.value).endswith("runtime")
    ]
    assert found == []


@pytest.mark.parametrize("room", ROOMS)
def test_every_bound_comes_from_the_table(room) -> None:
    """Or is handed on to where the wait is."""
    found = [
        f"{place}: {keyword.arg}={ast.unparse(keyword.value)}"
        for place, call in calls(room)
        for keyword in call.keywords
        if keyword.arg in {"between_s", "deadline_s", "follow_s"}
        and not leaves(keyword.value) <= ROWS | HANDED_ON | WITHOUT_END
    ]
    assert found == []


@pytest.mark.parametrize("room", ROOMS)
def test_each_end_takes_its_own_bound(room) -> None:
    """The primary's are the settings; a caller's are longer for it, and shorter for others."""
    due = {
        ("PrimaryChannels", "deadline_s"): {"primary_s"},
        ("CallerChannels", "deadline_s"): {"for_primary_s", "deadline_s"},
        ("CallerChannels", "between_s"): {"helper_s", "secondary_s", "between_s"},
    }
    found = [
        f"{place}: {keyword.arg}={ast.unparse(keyword.value)}"
        for place, call in calls(room)
        for keyword in call.keywords
        for bounds in [due.get((ast.unparse(call.func).rpartition(".")[2], keyword.arg or ""))]
        if bounds is not None and not leaves(keyword.value) <= bounds
    ]
    assert found == []
    for path in (PACKAGE / room).glob("*primary_party.py"):
        assert "for_primary_s" not in path.read_text(encoding="utf-8")
    for path in (PACKAGE / room).glob("*secondary_party.py"):
        assert ".primary_s" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_waits_without_an_end(room) -> None:
    """Neither for news, nor for a socket, a queue or a thread; ``", ".join(names)`` waits not."""
    found = [
        f"{place}: {ast.unparse(call)}"
        for place, call in calls(room)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in {"acquire", "get", "join", "result", "select", "wait", "wait_for"}
        and not call.args
        and not call.keywords
    ]
    assert found == []


def test_the_test_of_waits_notices_one() -> None:
    """A number of its own, and a wait without any."""
    number = ast.parse("star.receive(KIND, deadline_s=7.0)", mode="eval").body
    assert isinstance(number, ast.Call)
    assert not leaves(number.keywords[0].value) <= ROWS | HANDED_ON | WITHOUT_END
