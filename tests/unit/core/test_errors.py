"""What other organisations are told of an error: never a path, a record or what was spent."""

import ast
import errno
import re
from pathlib import Path

import pytest
import torch

import securevfl
from securevfl import SecureVflError
from securevfl.core import errors
from securevfl.core.errors import (
    BudgetExceededError,
    ConfigError,
    OutOfMemoryError,
    PartyLostError,
    PrivacyError,
    ProtocolError,
    StorageError,
    of_this_machine,
)
from securevfl.transport.message import failure_kind, public_reason

PACKAGE = Path(securevfl.__file__).parent
CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, SecureVflError)
]
# Names of variables that hold a file or a folder of this machine.
LOCAL = re.compile(r"path|folder|file|target|\bout\b", re.IGNORECASE)
PLACES = [
    "/home/jane/secret place/table.csv",
    "secret/table",
    "..\\secret",
    "C:\\secret\\x",
    "~/secret",
    "secret.pt",
    "/secret",
]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("place", PLACES)
def test_no_class_tells_a_path(kind, place):
    """Whatever error quotes a place of this machine, the others read nothing of it."""
    for text in (f"{place}: no space left", f"run folder {place}: holds a run", f"see {place}"):
        told = public_reason(kind(text))
        assert "secret" not in told
        assert told.startswith(kind.__name__)


def _quoting_sites() -> list[tuple[str, str]]:
    """Each raise of one of our errors whose text quotes a local place, with that place put in."""
    sites = []
    names = {kind.__name__ for kind in CLASSES}
    for source in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name not in names or not node.args or not isinstance(node.args[0], ast.JoinedStr):
                continue
            quoted = [
                ast.unparse(part.value)
                for part in node.args[0].values
                if isinstance(part, ast.FormattedValue)
            ]
            if not any(LOCAL.search(expression) for expression in quoted):
                continue
            text = "".join(
                str(part.value)
                if isinstance(part, ast.Constant)
                else "/home/jane/secret"
                if LOCAL.search(ast.unparse(part.value))
                else "0"
                for part in node.args[0].values
            )
            sites.append((name, text))
    return sites


def test_no_raise_in_the_package_tells_a_path():
    """Every text of ours that quotes a file or a folder is withheld from the others."""
    sites = _quoting_sites()
    assert len(sites) > 25
    for name, text in sites:
        if "/home/jane/secret" in text:
            assert "secret" not in public_reason(getattr(errors, name)(text)), text


def test_the_budget_is_nobody_elses_business():
    """What was spent before, on which runs, stays at home."""
    error = BudgetExceededError(
        "rental: round 7 would bring epsilon to 9.1, over 8 (7.4 is spent, 3.1 of it in 2 "
        "earlier runs)"
    )
    told = public_reason(error)
    assert told == "BudgetExceededError: its privacy budget does not cover this run"


def test_settings_and_the_protocol_are_told():
    """What all parties hold, or what one of them did, helps the others to mend it."""
    for error in (
        ConfigError("model.neighbours: 50 is more than the 20 records of this table"),
        PrivacyError("privacy.colluding: 3 of 3 secondaries leave nobody to add noise"),
        ProtocolError("rental: sent SHARE of round 1 where SHARE of round 2 was due"),
        ConfigError("rental: its key is ed25519:ab/cd+ef=, and the two are pinned differently"),
    ):
        assert public_reason(error) == f"{type(error).__name__}: {error}"


def test_what_nobody_foresaw_tells_its_kind_alone():
    """The text of another library's error may quote anything."""
    assert "1234" not in public_reason(KeyError("income 1234"))
    told = public_reason(StorageError.of("/home/jane/secret", OSError(28, "No space left")))
    assert told == "StorageError: it cannot write to its own disk"


def _of_torch() -> BaseException:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    return raised.value


def _while_writing() -> BaseException:
    """As of torch's writer, which closes a file that could not grow."""
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 28")
    error.__context__ = MemoryError()
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        _while_writing(),
        _of_torch(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("could not create a primitive"),
    ],
    ids=["python", "write", "torch", "system", "thread", "kernel"],
)
def test_used_up_memory_is_no_mistake_of_the_program(error: BaseException) -> None:
    """Whoever says it: the others read that this party lacks memory, and wait for it."""
    known = of_this_machine(error)
    assert isinstance(known, OutOfMemoryError)
    assert "Make room" in str(known)
    assert public_reason(error) == "OutOfMemoryError: it has run out of memory"
    assert failure_kind(error) == "lost"


def test_anothers_used_up_memory_is_not_this_partys() -> None:
    """Who hears of it says that it was the other one."""
    heard = PartyLostError("bank-1: OutOfMemoryError: it has run out of memory")
    assert of_this_machine(heard) is None
    assert public_reason(heard) == f"PartyLostError: {heard}"


def test_a_full_disk_is_known_by_what_the_system_says() -> None:
    """With the file that it names; other errors are not this machine's."""
    full = OSError(errno.ENOSPC, "No space left on device", "/home/jane/log.jsonl")
    assert str(of_this_machine(full)).startswith("/home/jane/log.jsonl: cannot be written")
    assert public_reason(full) == "StorageError: it cannot write to its own disk"
    assert failure_kind(full) == "lost"
    for other in (OSError(errno.ENOENT, "No such file"), RuntimeError("shape mismatch")):
        assert of_this_machine(other) is None
        assert failure_kind(other) == "failed"


def test_a_text_is_one_line_that_a_terminal_may_show() -> None:
    """A message of another party, or a file, may have put its own words into it."""
    error = ConfigError("a.b\n\x1b[2J\ud800: must be 1")
    assert str(error) == "a.b  [2J : must be 1"
    assert error.for_others() == "ConfigError: a.b  [2J : must be 1"
    assert len(str(ConfigError("x" * 10_000))) == 2000


def test_what_looks_like_a_path_hides_neither_a_culprit_nor_shows_a_path() -> None:
    """A liar's own words may; what stands before them is told."""
    said = "s0: MEMORIES of round 0: has 'zz\\x1b', which is none of its fields"
    more = "(its own log says more)"
    assert ProtocolError(said).for_others() == f"ProtocolError: s0: MEMORIES of round 0 {more}"
    for path in ("ledger /home/jane/t: is in use", "table jane.csv: has no rows", "a/b: c: d"):
        assert ConfigError(path).for_others() == f"ConfigError {more}"
