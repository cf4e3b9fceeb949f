"""Write the table of ``docs/messages.md``: ``python tools/make_message_table.py``.

It is made of the code: each message's kind, who sends it to whom, its docstring, and what stands
for each of its fields.
"""

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

from page_parts import between

import securevfl
from securevfl.transport.message import DeclaredMessage, TypedMessage

PAGE = Path(__file__).resolve().parents[1] / "docs/messages.md"
BEGIN = "<!-- messages: written by tools/make_message_table.py -->\n"
END = "<!-- end of messages -->\n"


def message_types() -> list[type[TypedMessage]]:
    """Return every message of the package, by code."""
    for module in pkgutil.walk_packages(securevfl.__path__, "securevfl."):
        if not module.ispkg and module.name.split(".")[-1] != "party":
            importlib.import_module(module.name)
    # A dataclass with slots replaces the class that it was made from, which lives on for a while.
    found = [
        one
        for one in [*TypedMessage.__subclasses__(), *DeclaredMessage.__subclasses__()]
        if getattr(sys.modules[one.__module__], one.__name__) is one
        and one.__module__.startswith("securevfl.")
        and hasattr(one, "KIND")
    ]
    return sorted(found, key=lambda one: (one.KIND.value, one.WAY))


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| message | from and to | content; channels of fields |", "| --- | --- | --- |"]
    for one in message_types():
        content = " ".join((inspect.getdoc(one) or "").split()).replace("``", "`")
        channels = "; ".join(
            f"{channel}: {'/'.join(f'`{name}`' for name in names.split())}"
            for channel, names in one.COVERS.items()
            if channel not in ("no record", "sizes and times")
        )
        if len(one.COVERS) == 1:
            channels = channels.partition(":")[0]
        told = f"{content} *{channels}*" if channels else content
        lines.append(f"| {one.KIND.value} {one.KIND.name} | {one.WAY} | {told} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Return the page with today's table in it."""
    return between(page, BEGIN, END, table())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {len(message_types())} messages\n")
