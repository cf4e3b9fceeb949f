"""Write the table of ``docs/errors.md``: ``python tools/make_errors_page.py``.

It is made of :mod:`securevfl.core.errors`: each class's exit code, what its docstring says of its
meaning and of what to do, and what other parties are sent.
"""

import inspect
import sys
from pathlib import Path

from page_parts import between

from securevfl.core import errors

PAGE = Path(__file__).resolve().parents[1] / "docs/errors.md"
BEGIN = "<!-- errors: written by tools/make_errors_page.py -->\n"
END = "<!-- end of errors -->\n"
_TO_DO = "To do:"


def error_types() -> list[type[errors.SecureVflError]]:
    """Return the errors that the module defines, in its order, without their base."""
    return [
        one
        for one in vars(errors).values()
        if inspect.isclass(one)
        and issubclass(one, errors.SecureVflError)
        and one is not errors.SecureVflError
    ]


def table() -> str:
    """Return the table in Markdown.

    Raises:
        LookupError: If the docstring of an error does not say what to do.
    """
    lines = ["| error, exit code | means | to do | others read |", "| --- | --- | --- | --- |"]
    for one in error_types():
        meaning, found, to_do = (one.__doc__ or "").partition(_TO_DO)
        if not found:
            raise LookupError(f"the docstring of {one.__name__} has no section {_TO_DO!r}")
        cells = (
            f"`{one.__name__}`, {one.exit_code}",
            *(" ".join(text.split()).replace("``", "`") for text in (meaning, to_do)),
            _shown_to_others(one),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown_to_others(one: type[errors.SecureVflError]) -> str:
    if one.TOLD is None:
        return "the line, unless it names a file"
    return one.TOLD or "the kind alone"


def written(page: str) -> str:
    """Return the page with today's table in it."""
    return between(page, BEGIN, END, table())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {len(error_types())} errors\n")
