"""Types of calls in securevfl are checked while tests run; shapes, where there are any.

Of every function the first calls in each file of tests are checked; of one that is defined within
another, its first definitions.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, ForwardRef, Literal, get_args, get_origin

import jaxtyping

_with_shapes = jaxtyping.jaxtyped

FIRST_CALLS = 4
"""Calls of one function on arrays that one file of tests has checked."""
_FIRST_PLAIN_CALLS = 64
"""Calls of one function without arrays, whose checks cost microseconds."""

ENTRANCES = ("simulate", "train", "compare", "contribution")
"""Functions whose types are for readers: they refuse what a user gives them in words of their
own."""

_file: Path | None = None
_defined: Counter[CodeType] = Counter()
"""How often this file has defined each function within another one."""


def begin_test(file: Path) -> None:
    """Check the first calls of every function again, if a test is the first of its file."""
    global _file
    if file != _file:
        _file = file
        _defined.clear()


def check_shapes_where_there_are_any() -> None:
    """Let jaxtyping's import hook leave functions without arrays to the type checker alone.

    Around each call jaxtyping binds all arguments, keeps the sizes of axes and checks twice: a
    third of the time of tests in one process. Four of five functions name no array, and of these
    beartype checks the same types, by itself. All are called thousands of times in one file.
    """
    # The hook writes ``@jaxtyping.jaxtyped(typechecker=...)`` on every function and class.
    jaxtyping.jaxtyped = _checked  # type: ignore[assignment]


def _checked(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    whole = _with_shapes(typechecker=typechecker)

    def decorate(checked: Any) -> Any:
        if not isinstance(checked, type):
            if checked.__qualname__ in ENTRANCES:
                return checked
            if "<locals>" in checked.__qualname__ and not _is_new(checked):
                return checked
            if not _needs_jaxtyping(checked):
                return _checked_at_first(checked, typechecker, calls=_FIRST_PLAIN_CALLS)
            return _checked_at_first(checked, whole, calls=FIRST_CALLS)
        if dataclasses.is_dataclass(checked) and "__init__" in vars(checked):
            setattr(checked, "__init__", decorate(checked.__init__))  # noqa: B010
        return checked

    return decorate


def _checked_at_first(plain: Callable[..., Any], check: Callable[[Any], Any], *, calls: int) -> Any:
    """Wrap a function: its first calls in a file go by the checked form, made when it is called."""
    checked = functools.cache(lambda: check(plain))
    left, file = calls, _file

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal left, file
        if file is not _file:
            left, file = calls, _file
        if not left:
            return plain(*args, **kwargs)
        left -= 1
        return checked()(*args, **kwargs)

    return call


def _is_new(inner: FunctionType) -> bool:
    """Whether this file has defined a function few times: making its check takes milliseconds."""
    _defined[inner.__code__] += 1
    return _defined[inner.__code__] <= FIRST_CALLS


def _needs_jaxtyping(function: Callable[..., Any]) -> bool:
    """Whether annotations name arrays, or are strings, whose names jaxtyping may leave open."""
    return any(map(_is_array_or_text, function.__annotations__.values()))


def _is_array_or_text(hint: Any) -> bool:
    if isinstance(hint, str | ForwardRef):
        return True
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    if get_origin(hint) is Literal:
        return False
    parts = hint if isinstance(hint, list) else get_args(hint)
    return any(map(_is_array_or_text, parts))
