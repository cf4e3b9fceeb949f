"""What Python's memory hands to the processes of its own parties: tables, and code by its name.

It goes through a file without a name, which one process of this machine may read, and only where a
launcher has started that. Nothing that another party sends is ever read so.

Where some of it is defined in the script that runs, the process reads that script too, under the
name ``__mp_main__``, as :mod:`multiprocessing` does: what stands under ``if __name__ ==
"__main__":`` does not run again.
"""

import io
import pickle  # noqa: TID251 - between this user's processes, never parties
import sys
from collections.abc import Mapping
from multiprocessing import spawn
from pathlib import Path
from typing import Any, Final

from securevfl.core.errors import ConfigError, SecureVflError, in_one_line
from securevfl.launch.child import is_launched
from securevfl.models.family import AnyFamily
from securevfl.models.registry import registration

# What multiprocessing calls a main program's place.
_SCRIPT: Final = "init_main_from_path"
_MODULE: Final = "init_main_from_name"
_scripts_being_read: Final[list[str]] = []


def dump(in_memory: Mapping[str, Any], family: AnyFamily) -> bytes:
    """Return what :func:`load` reads in the process of a party.

    Args:
        in_memory: Fields of the party's :class:`securevfl.runtime.run_options.PartyJob` that are in
            no file.
        family: The federation's, which the process registers as this one did.

    Raises:
        ConfigError: If the process could not import some of it, saying what to write.
    """
    content = io.BytesIO()
    by_name = _ByName(content)
    try:
        by_name.dump((registration(family), dict(in_memory)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_importable(in_one_line(error)) from None
    # Modules are found where this process finds them, and before anything is read that needs one.
    paths = [str(Path(path).resolve()) for path in sys.path]
    ahead = {"sys_path": paths, "sys_argv": sys.argv, **by_name.main_program}
    return pickle.dumps(ahead) + content.getvalue()


def load(path: Path) -> dict[str, Any]:
    """Read what the launcher has handed to this process, and register its family.

    Raises:
        ConfigError: If no launcher has started this process, or its script or a module cannot be
            imported.
    """
    if not is_launched():
        raise ConfigError("--handed: is for processes that securevfl itself starts")
    with path.open("rb") as content:
        _prepare(pickle.load(content))  # noqa: S301
        try:
            register, in_memory = pickle.load(content)  # noqa: S301
        except (ImportError, AttributeError) as error:
            raise _not_importable(in_one_line(error)) from None
    if register is not None:
        register()
    return dict(in_memory)


def require_script_read() -> None:
    """Refuse to run a federation while a party's process reads the script that started it.

    Raises:
        ConfigError: If this process does.
    """
    if _scripts_being_read:
        raise ConfigError("it would start the parties again")


def _prepare(ahead: dict[str, Any]) -> None:
    """Find modules as the launcher does, and read its script where that is needed.

    Raises:
        ConfigError: If the script cannot be read twice.
    """
    scripts = [ahead[place] for place in (_SCRIPT, _MODULE) if place in ahead]
    _scripts_being_read.extend(scripts)
    try:
        spawn.prepare(ahead)
    except Exception as error:  # noqa: BLE001 - all of the user's code runs
        why = str(error) if isinstance(error, SecureVflError) else in_one_line(error)
        raise ConfigError(
            f"processes of parties import {Path(*scripts).name} for the model that it defines, and "
            f'cannot: {why}; write if __name__ == "__main__": above what it runs, '
            f"or the model into a file of its own"
        ) from None
    _scripts_being_read.clear()


class _ByName(pickle.Pickler):
    """Pickles code by its name; notes where the main program is, if some of it is there."""

    def __init__(self, content: io.BytesIO) -> None:
        super().__init__(content)
        self.main_program: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Refuse what only the main program has, unless that is a script."""
        if getattr(obj, "__module__", None) == "__main__":
            main = sys.modules["__main__"]
            spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
            if spec is not None:
                self.main_program = {_MODULE: spec.name}
            elif file is not None and Path(file).is_file():
                self.main_program = {_SCRIPT: str(Path(file).resolve())}
            else:
                name = getattr(obj, "__qualname__", type(obj).__qualname__)
                raise _not_importable(f"{name!r} is defined in this notebook")
        return NotImplemented


def _not_importable(why: str) -> ConfigError:
    return ConfigError(
        f"processes of parties import a model's code from its module, and cannot: {why}; write it "
        f"into a file such as own_model.py (a cell that begins with %%writefile own_model.py does "
        f"so) and import it from there, or stay in this process: securevfl.simulate"
    )
