"""Rules that hold for every module, checked on the source itself."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from helpers.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "securevfl"

# Calls that put something onto a wire, into the sum of all parties, or into the launcher's pipe.
SENDING = frozenset(
    {
        "abort",
        "broadcast",
        "carry",
        "release",
        "return_gradient",
        "send",
        "sum_to",
        "tell",
    }
)
# The wire's own machinery moves bytes that others have decided to send, and decides nothing.
MACHINERY = frozenset(
    {
        "connection.py",
        "dialling.py",
        "accepting.py",
        "framing.py",
        "socket_loop.py",
    }
)


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> set[str]:
    """Return every dotted name that a module imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def attributes(path: Path) -> set[str]:
    """Return every dotted name that a module spells out, such as ``torch.distributed.send``."""
    return {ast.unparse(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module and the methods of its classes with their names."""

    def inside(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield f"{prefix}{child.name}", child
            elif isinstance(child, ast.ClassDef):
                yield from inside(child, f"{prefix}{child.name}.")

    return inside(tree(path), "")


HANDING_OVER = PACKAGE / "runtime" / "handing_over.py"
"""What a launcher hands to its own children, in a file without a name, and to nobody else."""


def sends(function: ast.FunctionDef) -> bool:
    """Whether a function calls something that sends, or passes ``sum_to`` its words."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in SENDING
        for node in ast.walk(function)
    )


def test_every_module_has_a_docstring() -> None:
    """The first thing that a reader sees says what the module is."""
    assert len(modules()) > 100
    silent = [name_of(path) for path in modules() if not ast.get_docstring(tree(path))]
    assert silent == []


def test_no_module_needs_one_that_needs_it() -> None:
    """Modules have an order in which each needs earlier ones alone, functions' imports included."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules()}

    def needed(path: Path) -> set[str]:
        found = imported(path)
        return {*found, *(one.rpartition(".")[0] for one in found)} & {*names}

    order = [
        *TopologicalSorter({name: needed(path) for name, path in names.items()}).static_order()
    ]
    assert len(order) == len(names)


@pytest.mark.parametrize("forbidden", ["torch.distributed", "pickle", "cloudpickle", "dill"])
def test_imported_nowhere(forbidden: str) -> None:
    """Parties speak by their own typed messages, over their own star.

    Python hands its memory to its own children.
    """
    exceptions = {"pickle": HANDING_OVER}
    for path in modules():
        if path == exceptions.get(forbidden):
            continue
        spelled = {*imported(path), *attributes(path)}
        guilty = [n for n in spelled if n == forbidden or n.startswith(f"{forbidden}.")]
        assert guilty == [], name_of(path)


def test_checkpoints_hold_no_programs() -> None:
    """Every ``torch.load`` reads weights only: without that it runs what a file says."""
    loads = [
        (name_of(path), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords})
        for path in modules()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert loads
    assert [name for name, options in loads if options.get("weights_only") != "True"] == []


def test_whatever_sends_says_what_it_reveals() -> None:
    """A public function of mpc or federation that sends something has a ``Reveals:`` section.

    A private one is a step of a public one, whose docstring speaks for it.
    """
    silent, speaking = [], 0
    for folder in (
        "mpc",
        "federation",
        "transport",
        "linkage",
        "ledger",
        "runtime",
        "lab",
        "desk",
        "stages",
    ):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            if path.name in MACHINERY:
                continue
            for name, function in functions(path):
                if any(part.startswith("_") for part in name.split(".")) or not sends(function):
                    continue
                speaking += 1
                if "Reveals:" not in (ast.get_docstring(function) or ""):
                    silent.append(f"{name_of(path)}: {name}")
    assert silent == []
    assert speaking > 10


def test_protocols_of_exchange_say_what_they_reveal() -> None:
    """Each way between parties is described where it is declared, for both ends."""
    found = {}
    for file in (
        "federation/rounds/exchanges.py",
        "federation/session/peers.py",
        "transport/star.py",
    ):
        for name, function in functions(PACKAGE / file):
            if name.split(".")[-1] in {*SENDING, "add", "add_up", "ask", "total"}:
                found[name] = "Reveals:" in (ast.get_docstring(function) or "")
    assert found.keys() >= {
        "Exchange.release",
        "Exchange.return_gradient",
        "Peers.ask",
        "Peers.tell",
        "Peers.total",
        "Reply.add",
        "Reply.send",
        "PrimaryTransport.send",
        "SecondaryTransport.send",
    }
    assert [name for name, described in found.items() if not described] == []


def test_library_never_prints() -> None:
    """Only commands talk to the user."""
    for path in modules():
        if "cli" in path.parts or "command" in path.name:
            continue
        calls = [
            node.lineno
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ]
        assert calls == [], name_of(path)


# Programs in the package that are run by their module's name.


def test_imports_point_one_way() -> None:
    """The contracts of pyproject.toml hold."""
    program = Path(sys.executable).parent / "lint-imports"
    if not program.exists():
        pytest.skip("import-linter is not installed; make lint runs it")
    done = subprocess.run(
        [program, "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert ", 0 broken" in done.stdout


def test_no_import_is_hidden_from_the_linter() -> None:
    """``of_an_extra`` is for what may be missing, and ``core/stages`` for names of packages.

    The latter loads what an ``__init__`` file imports for type checkers: the linter reads that.
    ``core/stages.py`` loads what a stage's manifest names, in the stage's own folder.
    """
    seen, guilty = 0, []
    for path in modules():
        if path.name in ("__init__.py", "errors.py", "stages.py"):
            continue
        texts = {
            target.id: node.value.value
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree(path)):
            match node:
                case ast.Call(
                    func=ast.Name(id=called) | ast.Attribute(attr=called), args=[what, *_]
                ):
                    pass
                case _:
                    continue
            if called not in ("import_module", "__import__", "of_an_extra"):
                continue
            seen += 1
            name = what.value if isinstance(what, ast.Constant) else None
            name = texts.get(what.id) if isinstance(what, ast.Name) else name
            if not isinstance(name, str) or name.partition(".")[0] in ("", "securevfl"):
                guilty.append(f"{name_of(path)}:{node.lineno}")
    assert seen > 0
    assert guilty == []
