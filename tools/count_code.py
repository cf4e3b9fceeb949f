"""Count the package's code: ``python tools/count_code.py [FOLDER]``; ``--json``, ``--list`` too.

A line of code holds a token that is neither a comment nor part of a docstring. Imports are lines of
import statements. The core is all but ``desk``, ``lab``, ``serving``, ``stages``
and ``testing``.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
WINGS: Final = ("desk", "lab", "serving", "stages", "testing")
"""Rooms that are counted by themselves."""

SHARED_NAMES: Final = frozenset(
    {
        *(
            "__init__",
            "family",
            "labels",
            "messages",
            "parties",
            "policy",
            "primary",
            "rows",
            "run",
        ),
        *("secondary", "settings", "stage"),
    }
)
"""Names that several modules may have: those of the parts of a stage among them."""

MOST_PARAMETERS: Final = 10
"""Most parameters of a function that is no command."""

SMELLS: Final = re.compile(
    r"\b(whoever|whatever|of which|what it is|goes on|is none|told|tells|hears|beside|by itself"
    r"|nobody|somebody|anybody)\b"
)
"""Words of sentences that are usually riddles: a smell, no proof."""

_BLANK: Final = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)


@dataclass(frozen=True, kw_only=True)
class Count:
    """What a part of the package comes to."""

    code: int
    files: int
    imports: int

    @property
    def import_share(self) -> float:
        """Share of code lines that are imports."""
        return self.imports / max(1, self.code)


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def code_lines(source: str) -> set[int]:
    """Return the numbers of lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _BLANK:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(_parsed(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def import_lines(source: str) -> int:
    """Return how many lines import statements take."""
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(_parsed(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
    )


def modules(root: Path = ROOT) -> Iterator[Path]:
    """Yield the package's modules."""
    return (path for path in sorted((root / "securevfl").rglob("*.py")))


def room_of(path: Path, root: Path = ROOT) -> str:
    """Return the package that a module belongs to; its own name at the top."""
    return path.relative_to(root / "securevfl").with_suffix("").parts[0]


def counts(root: Path = ROOT) -> dict[str, Count]:
    """Return the count of every room, and of the core."""
    code, files, imports = Counter[str](), Counter[str](), Counter[str]()
    for path in modules(root):
        source = path.read_text(encoding="utf-8")
        room = room_of(path, root)
        own, own_imports = len(code_lines(source)), import_lines(source)
        for part in (room, *(() if room in WINGS else ("core of the package",))):
            code[part] += own
            files[part] += 1
            imports[part] += own_imports
    return {
        name: Count(code=code[name], files=files[name], imports=imports[name])
        for name in sorted(files)
    }


def repeated_names(root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Return names of classes, and of modules, that the package has more than once."""
    classes, names = Counter[str](), Counter[str]()
    for path in modules(root):
        names[path.stem] += path.stem not in SHARED_NAMES
        tree = _parsed(path.read_text(encoding="utf-8"))
        classes.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return (
        sorted(name for name, times in classes.items() if times > 1),
        sorted(name for name, times in names.items() if times > 1),
    )


def first_paragraphs(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield place and first paragraph of every docstring, those of attributes included."""
    bodies = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in modules(root):
        for node in ast.walk(_parsed(path.read_text(encoding="utf-8"))):
            for one in node.body if isinstance(node, bodies) else []:
                if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
                    text = " ".join(str(one.value.value).strip().split("\n\n")[0].split())
                    yield f"{path.relative_to(root)}:{one.lineno}", text


def long_signatures(root: Path = ROOT) -> list[str]:
    """Return the functions with more than ``MOST_PARAMETERS`` parameters, ``self`` left out."""
    found = []
    for path in modules(root):
        for node in ast.walk(_parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not _is_command(node):
                names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
                count = len([n for n in names if n not in {"self", "cls"}])
                count += len(node.args.kwonlyargs)
                if count > MOST_PARAMETERS:
                    place = f"{path.relative_to(root)}:{node.lineno}"
                    found.append(f"{place}: {node.name} has {count}")
    return found


def _is_command(function: ast.FunctionDef) -> bool:
    """Whether a decorator makes a function a command, whose parameters are its options."""
    decorators = [ast.unparse(one) for one in function.decorator_list]
    return any(".command(" in one or ".callback(" in one for one in decorators)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true", help="list docstrings that smell, too")
    asked = parser.parse_args()
    found, (classes, names) = counts(asked.folder), repeated_names(asked.folder)
    if asked.json:
        figures = {name: asdict(count) for name, count in found.items()}
        json.dump({"rooms": figures, "classes": classes, "modules": names}, sys.stdout)
        return
    for name, count in found.items():
        sys.stdout.write(
            f"{name:22} {count.code:7,} lines of code, {count.files:4} files, "
            f"{count.import_share:5.1%} imports\n"
        )
    sys.stdout.write(f"class names used twice: {', '.join(classes) or 'none'}\n")
    sys.stdout.write(f"module names used twice: {', '.join(names) or 'none'}\n")
    for line in long_signatures(asked.folder):
        sys.stdout.write(f"{line} parameters\n")
    paragraphs = [*first_paragraphs(asked.folder)]
    smelly = [f"{place}: {text}\n" for place, text in paragraphs if SMELLS.search(text)]
    sys.stdout.writelines(smelly if asked.list else [])
    share = len(smelly) / max(1, len(paragraphs))
    sys.stdout.write(f"docstrings that smell: {len(smelly)} of {len(paragraphs)} ({share:.1%})\n")


if __name__ == "__main__":
    main()
