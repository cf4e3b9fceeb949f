"""Count names and sentences that readers stumble over: ``python tools/count_names.py [FOLDER]``.

Functions named by a bare participle, variables of no meaning, docstrings of fields that only
complete the field's name, comments that divide a module into chapters, assertions that a value is
there, and the files that name an optional part of a run outside its folder.
"""

import ast
import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]

PARTICIPLES: Final = frozenset(
    {
        *("bound", "drawn", "found", "given", "gone", "heard", "held", "kept", "known", "left"),
        *("made", "met", "sent", "shown", "spent", "split", "spread", "taken", "told", "written"),
    }
)
"""Participles that do not end in ``ed``."""

NOUNS: Final = frozenset({"embed", "feed", "seed", "speed", "split"})
"""Verbs and nouns that look like participles."""

VARIABLES: Final = frozenset({"one", "told", "heard", "said"})
"""Variables that say nothing of their value."""

UNFINISHED: Final = re.compile(r"\s*(Of|What|Which|Whether)\b")
"""Begin of a field's docstring that cannot be read without the field's name."""

PARTS: Final[Mapping[str, str]] = {
    "class_means": r"class.?means|ClassLabels|class_labels",
    "pretraining": r"pretrain",
    "psi": r"\bpsi\b|\bPsi\b|\bPSI\b",
}
"""Optional parts of a run, by their folder in ``stages``, and how code names them."""


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def modules(root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yield path and text of each module of the package."""
    for path in sorted((root / "securevfl").rglob("*.py")):
        yield path, path.read_text(encoding="utf-8")


def bare_participles(root: Path = ROOT) -> tuple[list[str], int]:
    """Return the functions whose name is a participle alone, and the number of all functions."""
    places, functions = [], 0
    for path, text in modules(root):
        for node in ast.walk(_parsed(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions += 1
                name = node.name.strip("_")
                ends = name.endswith("ed") or name in PARTICIPLES
                if ends and "_" not in name and name not in NOUNS:
                    places.append(f"{path.relative_to(root)}:{node.lineno}: {node.name}")
    return places, functions


def empty_variables(root: Path = ROOT) -> tuple[list[str], int]:
    """Return the uses of variables without a meaning, and the number of lines."""
    places, lines = [], 0
    for path, text in modules(root):
        lines += text.count("\n")
        for node in ast.walk(_parsed(text)):
            name = getattr(node, "id", getattr(node, "arg", None))
            if isinstance(node, ast.Name | ast.arg) and name in VARIABLES:
                places.append(f"{path.relative_to(root)}:{node.lineno}: {name}")
    return places, lines


def unfinished_docstrings(root: Path = ROOT) -> list[str]:
    """Return the docstrings of fields that only complete the field's name."""
    places = []
    for path, text in modules(root):
        for node in ast.walk(_parsed(text)):
            body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
            for field, after in itertools.pairwise(body):
                if (
                    isinstance(field, ast.Assign | ast.AnnAssign)
                    and isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and UNFINISHED.match(str(after.value.value))
                ):
                    place = f"{path.relative_to(root)}:{after.lineno}"
                    places.append(f"{place}: {after.value.value!s}")
    return places


def chapter_headings(root: Path = ROOT) -> dict[str, int]:
    """Return the modules that comments divide into chapters, with the number of these comments.

    A heading is a comment of one line at the margin, between empty lines.
    """
    headings: dict[str, int] = {}
    for path, text in modules(root):
        count = len(re.findall(r"(?<=\n\n)# [^\n]*\n(?=\n)", text))
        if count:
            headings[str(path.relative_to(root))] = count
    return headings


def presence_assertions(root: Path = ROOT) -> list[str]:
    """Return the assertions that a value is not None."""
    return [
        f"{path.relative_to(root)}:{number}"
        for path, text in modules(root)
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(r"\bassert .* is not None", line)
    ]


def scattered(root: Path = ROOT) -> dict[str, list[str]]:
    """Return, for each of ``PARTS``, the files of the package that name it outside its folder."""
    return {
        part: [
            str(path.relative_to(root))
            for path, text in modules(root)
            if path.parent.name != part and re.search(pattern, text)
        ]
        for part, pattern in PARTS.items()
    }


def main() -> None:
    """Print the figures."""
    root = Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT
    (participles, functions), (variables, lines) = bare_participles(root), empty_variables(root)
    headings = chapter_headings(root)
    rows = [
        f"bare participles: {len(participles)} of {functions} functions",
        f"variables of no meaning: {1000 * len(variables) / lines:.1f} per 1,000 lines",
        f"unfinished docstrings of fields: {len(unfinished_docstrings(root))}",
        f"chapter headings: {sum(headings.values())}, modules with three or more: "
        f"{sum(count >= 3 for count in headings.values())}",
        f"assertions that a value is there: {len(presence_assertions(root))}",
    ]
    rows += [f"files that name {part}: {len(paths)}" for part, paths in scattered(root).items()]
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
