"""What Python's memory hands to the processes of its own parties: tables, and code by its name.

It goes through a file without a name, which one process of this machine may read, and only where a
launcher has started that. Nothing that another party sends is ever read so.
"""

import io
import pickle  # noqa: TID251 - between this user's processes, never parties
import sys
from pathlib import Path
from typing import Any

from securevfl.core.errors import ConfigError, in_one_line
from securevfl.launch.child import is_launched
from securevfl.models.family import AnyFamily
from securevfl.models.registry import registration
from securevfl.runtime.run_options import InMemory


def handed(in_memory: InMemory, family: AnyFamily) -> bytes:
    """Return what :func:`taken` reads in the process of a party.

    Args:
        in_memory: What the party has from memory.
        family: The federation's, which the process registers as this one did.

    Raises:
        ConfigError: If the process could not import some of it, saying what to write.
    """
    content = io.BytesIO()
    # Modules are found where this process finds them, and before anything is read that needs one.
    pickle.dump([str(Path(path).resolve()) for path in sys.path], content)
    try:
        _ByName(content).dump((registration(family), in_memory))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_importable(in_one_line(error)) from None
    return content.getvalue()


def taken(path: Path) -> InMemory:
    """Read what the launcher has handed to this process, and register its family.

    Raises:
        ConfigError: If no launcher has started this process, or a module cannot be imported.
    """
    if not is_launched():
        raise ConfigError("--handed: is for processes that securevfl itself starts")
    with path.open("rb") as content:
        sys.path[:] = pickle.load(content)  # noqa: S301
        try:
            register, in_memory = pickle.load(content)  # noqa: S301
        except (ImportError, AttributeError) as error:
            raise _not_importable(in_one_line(error)) from None
    if register is not None:
        register()
    assert isinstance(in_memory, InMemory)
    return in_memory


class _ByName(pickle.Pickler):
    def reducer_override(self, one: Any) -> Any:
        """Refuse what only the main program has, which is another one in each process."""
        if getattr(one, "__module__", None) == "__main__":
            name = getattr(one, "__qualname__", type(one).__qualname__)
            raise _not_importable(f"{name!r} is defined in this script or notebook")
        return NotImplemented


def _not_importable(why: str) -> ConfigError:
    return ConfigError(
        f"processes of parties import a model's code from its module, and cannot: {why}; write it "
        f"into a file such as own_model.py and import it from there, or stay in this process: "
        f"securevfl.simulate"
    )
