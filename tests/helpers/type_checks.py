"""Types of every call in securevfl are checked while tests run; shapes, where there are any."""

import dataclasses
from collections.abc import Callable
from typing import Any, ForwardRef, Literal, get_args, get_origin

import jaxtyping

_with_shapes = jaxtyping.jaxtyped


def check_shapes_where_there_are_any() -> None:
    """Let jaxtyping's import hook leave functions without arrays to the type checker alone.

    Around each call jaxtyping binds all arguments, keeps the sizes of axes and checks twice. That
    is a third of the time of tests in one process, and four of five functions name no array. Of
    these beartype checks the same types, by itself.
    """
    # The hook writes ``@jaxtyping.jaxtyped(typechecker=...)`` on every function and class.
    jaxtyping.jaxtyped = _checked  # type: ignore[assignment]


def _checked(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    whole = _with_shapes(typechecker=typechecker)

    def decorate(checked: Any) -> Any:
        if not isinstance(checked, type):
            return whole(checked) if _needs_jaxtyping(checked) else typechecker(checked)
        if dataclasses.is_dataclass(checked) and "__init__" in vars(checked):
            if _needs_jaxtyping(checked.__init__):
                return whole(checked)
            setattr(checked, "__init__", typechecker(checked.__init__))  # noqa: B010
        return checked

    return decorate


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
