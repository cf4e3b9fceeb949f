"""What is loaded on first use: optional parts of runs, and public names of packages.

Optional parts have a manifest for each folder of ``securevfl.stages``: ``STAGE`` names the folder's
additions as ``module:object``. A process loads only the parts that its run uses.
"""

import ast
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")

_FOLDER: Final = "securevfl.stages"


@dataclass(frozen=True, kw_only=True)
class StageManifest:
    """The manifest of a stage; a value is a ``module:object`` in the stage's folder."""

    metrics: Mapping[str, str] = field(default_factory=dict)
    """Metrics of keys (:class:`~securevfl.linkage.metrics.metric.Metric`) by name."""

    protections: Mapping[str, str] = field(default_factory=dict)
    """Protections of linkage by name (:mod:`~securevfl.linkage.protections.protection`)."""

    families: Mapping[str, str] = field(default_factory=dict)
    """Model families by name (:class:`~securevfl.models.family.Family`)."""

    learners: Mapping[str, str] = field(default_factory=dict)
    """Functions by family that return a party's learner
    (:meth:`~securevfl.models.family.Family.build_learner`)."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """Readers of tables (:class:`~securevfl.data.sources.pieces.TableSource`) by suffix of a
    file, or ``"url"``."""

    rows: Mapping[str, str] = field(default_factory=dict)
    """Functions by library that return its rows in memory as a frame, and None of anything else."""

    policy: str | None = None
    """Rules and disclosure (:class:`~securevfl.config.stage_policy.StagePolicy`); None for none."""

    run: str | None = None
    """Part of a run (:class:`~securevfl.federation.stage.RunStage`), where the policy applies."""

    session: str | None = None
    """Function that runs a party's session in place of a run; None for a stage without one."""


@cache
def stages() -> Mapping[str, StageManifest]:
    """Return the manifest of every stage, by the name of its folder."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(importlib.import_module(_FOLDER).__path__)
    )
    folders = {name: importlib.import_module(f"{_FOLDER}.{name}") for name in names}
    return {name: getattr(folder, "STAGE", StageManifest()) for name, folder in folders.items()}


def load_part(stage: str, reference: str) -> Any:
    """Return the object that a manifest's ``module:object`` names."""
    module, name = reference.split(":")
    return getattr(importlib.import_module(f"{_FOLDER}.{stage}.{module}"), name)


def _references(kind: str) -> dict[str, tuple[str, str]]:
    """Return the stage and the ``module:object`` of each part of one kind, by the part's name."""
    return {
        name: (stage, reference)
        for stage, manifest in stages().items()
        for name, reference in getattr(manifest, kind).items()
    }


def part_names(kind: str) -> set[str]:
    """Return the names of all parts of one kind, such as ``"families"``, without loading any."""
    return set(_references(kind))


def load_session() -> Any:
    """Return the function that runs a party's session in place of a run."""
    sessions = {name: manifest.session for name, manifest in stages().items()}
    return next(load_part(name, session) for name, session in sessions.items() if session)


def load_parts(kind: str) -> dict[str, Any]:
    """Return all parts of one kind, such as ``"metrics"``, by their names."""
    return {name: load_part(*reference) for name, reference in _references(kind).items()}


class Parts(MutableMapping[str, T]):
    """Parts of one kind by name: the core's, then those of stages, each loaded on first use.

    A manifest may name a class, which stands for an instance of it.

    Args:
        kind: The field of :class:`StageManifest` that names them.
        core: Those of the core.
    """

    def __init__(self, kind: str, core: Mapping[str, T]) -> None:
        self._kind = kind
        self._loaded = dict(core)

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded and name in (references := _references(self._kind)):
            part = load_part(*references[name])
            self._loaded[name] = part() if isinstance(part, type) else part
        return self._loaded[name]

    def __setitem__(self, name: str, part: T) -> None:
        self._loaded[name] = part

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaded or name in _references(self._kind)

    def __iter__(self) -> Iterator[str]:
        stage_parts = _references(self._kind)
        own = [name for name in self._loaded if name not in stage_parts]
        return iter((*own, *stage_parts))

    def __len__(self) -> int:
        return len({*self._loaded, *_references(self._kind)})


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
