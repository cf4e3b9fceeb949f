"""What mkdocs does to a page beside its plugins; ``mkdocs.yml`` names this file."""

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

_PUBLIC = re.compile(r"^::: public names of ([\w.]+)$", re.MULTILINE)
_RESEARCH = re.compile(r"\[([^\]]+)\]\(\.\./(research/[\w./-]+)(?:#[\w-]+)?\)")
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):(?=<code>)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Write the reference of a package's public names where a line asks for it; mend links.

    Packages load their names on first use, so mkdocstrings, which reads and runs nothing, has to be
    told where each is defined. The pages of research/ are not part of the site: a link to one
    becomes the page's path in the repository.
    """

    def reference(line: re.Match[str]) -> str:
        return "\n\n".join(
            f"::: {home}\n    options:\n      heading: {name}\n      toc_label: {name}"
            for name, home in public_names(line[1]).items()
        )

    return _RESEARCH.sub(r"\1 (`\2` in the repository)", _PUBLIC.sub(reference, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Drop the roles of Sphinx that docstrings put before names in code type."""
    return _ROLE.sub("", html)


def public_names(package: str) -> dict[str, str]:
    """Return the public names of a package with where each is defined.

    They are what the package imports for type checkers; packages within it have their own pages.
    """
    path = ROOT.joinpath(*package.split("."), "__init__.py")
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body):
                for line in body:
                    if isinstance(line, ast.ImportFrom) and line.module not in (
                        package,
                        "securevfl.lab",
                    ):
                        names = {one.asname or one.name: one.name for one in line.names}
                        found |= {name: f"{line.module}.{home}" for name, home in names.items()}
            case _:
                pass
    return found
