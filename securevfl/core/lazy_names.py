"""Public names of a package, imported on first use."""

import ast
import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path


def on_first_use(
    package: str, file: str, names: Sequence[str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose names are loaded on first use.

    The module of each name is given once, by the package's imports for type checkers.

    Args:
        package: The package, ``__name__``.
        file: Its source, ``__file__``.
        names: All public names, ``__all__``.
    """

    @functools.cache
    def homes() -> dict[str, tuple[str | None, str]]:
        """Return the module and the name there of each public name."""
        return {
            alias.asname or alias.name: (imported.module, alias.name)
            for typed in ast.parse(Path(file).read_text(encoding="utf-8")).body
            if isinstance(typed, ast.If) and ast.unparse(typed.test) == "TYPE_CHECKING"
            for imported in typed.body
            if isinstance(imported, ast.ImportFrom)
            for alias in imported.names
        }

    def load(name: str) -> object:
        # Commands and parties use no public name, and so read no source.
        if name not in names or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, own = homes()[name]
        try:
            return import_module(f"{home}.{own}")
        except ModuleNotFoundError as error:
            if error.name != f"{home}.{own}":
                raise
        return getattr(import_module(str(home)), own)

    return load, lambda: list(names)
