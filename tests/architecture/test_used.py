"""What the package defines is used by the package or by what stands on it, not by tests alone."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "securevfl"

# Methods that torch's modules and functions are called by, CrypTen's communicators and providers.
_TORCH = {"forward", "setup_context", "get_extra_state", "set_extra_state"}
_CRYPTEN = {
    *("get_rank", "get_world_size", "get_name", "reduce", "all_reduce", "broadcast_obj"),
    *("generate_additive_triple", "generate_binary_triple", "wrap_rng", "B2A_rng"),
}
# Notebooks show a result by its own HTML.
CALLED_BY_LIBRARIES = frozenset({*_TORCH, *_CRYPTEN, "reducer_override", "_repr_html_"})


def trees(folders: Iterable[Path]) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield names of functions, methods and classes, but for those that a decorator registers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("__"):
            decorators = {ast.unparse(one) for one in node.decorator_list}
            if not any(one.startswith("app.") for one in decorators):
                yield node.name


def used(tree: ast.Module) -> Iterator[str]:
    """Yield names that are read: as names, attributes or words of a list of public names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (
                re.findall(r"\w+", node.value) if re.fullmatch(r"[\w.:]+", node.value) else ()
            )


def test_nothing_is_there_for_tests_alone() -> None:
    """A name that only tests use is dead weight, or a helper that belongs to them."""
    above = [ROOT / name for name in ("research", "examples")]
    names = {name for _, tree in trees([PACKAGE, *above]) for name in used(tree)}
    idle = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in trees([PACKAGE])
        for name in defined(tree)
        if name not in names | CALLED_BY_LIBRARIES
    ]
    assert idle == []
    assert len(names) > 1000
