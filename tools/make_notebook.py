"""Write ``examples/orders.ipynb`` from ``docs/orders.md``: the same text, code and commands.

    python tools/make_notebook.py

Python blocks become cells, and so do commands, with an exclamation mark before each.
"""

import json
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs/orders.md"
NOTEBOOK: Final = ROOT / "examples/orders.ipynb"

_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_LINK: Final = re.compile(r"\]\((\w+)\.md")


def notebook(page: str) -> dict[str, Any]:
    """Return the page as a notebook, in version 4.5 of the format."""
    cells: list[dict[str, Any]] = []
    end = 0
    for fence in _FENCE.finditer(page):
        _add_text(cells, page[end : fence.start()])
        language, block = fence.groups()
        lines = block.rstrip("\n").splitlines()
        if language == "python":
            # Run here, and not saved as a file of its own.
            _add_code(cells, lines)
        elif all(line.startswith("securevfl ") for line in lines):
            _add_code(cells, [f"!{line}" for line in lines])
        elif lines != ["python make_tables.py"]:
            _add_text(cells, fence.group(0))
        end = fence.end()
    _add_text(cells, page[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _add_text(cells: list[dict[str, Any]], text: str) -> None:
    told = text.replace(
        "Save this as `make_tables.py` in an empty folder, and run it with", "Run it with"
    )
    told = _LINK.sub(r"](../docs/\1.md", told.strip())
    if told:
        cells.append(_cell(cells, "markdown", told.splitlines()))


def _add_code(cells: list[dict[str, Any]], lines: list[str]) -> None:
    cells.append({**_cell(cells, "code", lines), "execution_count": None, "outputs": []})


def _cell(cells: list[dict[str, Any]], kind: str, lines: list[str]) -> dict[str, Any]:
    source = [f"{line}\n" for line in lines[:-1]] + lines[-1:]
    return {"id": f"cell-{len(cells)}", "cell_type": kind, "metadata": {}, "source": source}


def as_text(content: dict[str, Any]) -> str:
    """Return a notebook as its file holds it."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the notebook."""
    page = PAGE.read_text(encoding="utf-8")
    NOTEBOOK.write_text(as_text(notebook(page)), encoding="utf-8")


if __name__ == "__main__":
    main()
