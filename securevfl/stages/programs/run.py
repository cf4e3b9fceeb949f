"""CrypTen programs between parties: what ``securevfl mpc`` and ``securevfl.mpc.run`` start.

A program is a function in a Python file of its own. Every party runs the same one, each in its own
process and with its own table; shares go over the star's mutual TLS, and the dealer makes the
randomness of multiplications. What a program opens to whom is its author's affair.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.config.sections import IN_MEMORY
from securevfl.core import files
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.progress import Observer, unheard
from securevfl.runtime.launching import processes_with_program
from securevfl.runtime.run_folder import TemporaryFolder
from securevfl.runtime.run_options import FederationSource, Program, RunOptions, resolve_federation
from securevfl.stages.programs.session import RESULT_FILE

if TYPE_CHECKING:
    import pandas as pd


def program_of(source: str | Path | Callable[..., Any]) -> Program:
    """Return a program, from its file or from its function.

    Raises:
        ConfigError: If there is no such file, or the function is not at the top of one.
    """
    if not callable(source):
        return Program.of(Path(source))
    file, name = inspect.getsourcefile(source), getattr(source, "__name__", "")
    if file is None or getattr(source, "__qualname__", "") != name or not Path(file).is_file():
        raise ConfigError(
            f"program: {source!r:.80} is no function at the top of a file; every party loads the "
            f"file, so write def program(party) into one"
        )
    return Program.of(Path(file), name)


def with_program(config: FederationConfig, program: Program) -> FederationConfig:
    """Return the federation in which this program, and no other, runs; parties compare that.

    Raises:
        ConfigError: If the file wants another program, or has no dealer.
        PrivacyError: If it promises an epsilon, and does not allow programs beside it.
    """
    if config.mpc.program not in ("", program.digest):
        raise ConfigError(
            f"mpc.program: this file allows {config.mpc.program}, and {program.path.name} is "
            f"{program.digest}"
        )
    if config.privacy.mechanism != "none" and config.mpc.programs != "always":
        raise PrivacyError(
            "mpc.programs: this file promises an epsilon, and no epsilon covers what a program "
            'reveals; write programs = "always" in [mpc] if all parties agree to that, or use a '
            'file with privacy.mechanism = "none"'
        )
    if config.helper("dealer") is None:
        raise ConfigError(
            "mpc: programs need a party that holds no table and deals random numbers: add "
            '[[party]] name = "dealer", role = "dealer"'
        )
    source = {**config.source, "mpc": {**config.source.get("mpc", {}), "program": program.digest}}
    return parse_federation(source, file="federation file", only_linkage=True)


def run(
    federation: FederationSource | Mapping[str, Any],
    program: str | Path | Callable[..., Any],
    *,
    out: str | Path | None = None,
    data_root: Path | None = None,
    observe: Observer = unheard,
) -> dict[str, Any]:
    """Run a CrypTen program between parties on this machine, each in its own process.

    Args:
        federation: A federation file or what :func:`securevfl.read_federation` returned; or tables
            by party name, files or frames as of :func:`securevfl.train`, of which the first is the
            primary's; a dealer is added.
        program: A file with ``def program(party)``, or a function at the top of a file. It gets a
            :class:`securevfl.mpc.ProgramParty`, and uses :data:`securevfl.mpc.crypten`.
        out: Folder for logs and results; None: a temporary one.
        data_root: Where relative data paths start; default: next to the file.
        observe: Called with progress.

    Returns:
        What the program returned at each party, by name, as JSON has it.

    Raises:
        ConfigError: If the parties have no dealer, or another program is pinned.
        PrivacyError: If an epsilon is promised, and programs are not allowed beside it.
        SecureVflError: The kind that fits where a failure began, naming the party.

    Reveals:
        Between the processes: what the program opens. This machine holds all of it.
    """
    frames: dict[str, pd.DataFrame] = {}
    if isinstance(federation, Mapping):
        frames = _frames_of(federation)
        there = [
            Path(value).resolve() for value in federation.values() if isinstance(value, str | Path)
        ]
        root = Path(os.path.commonpath([path.parent for path in there])) if there else Path()
        config = _of_tables(federation, root)
    else:
        config, root = resolve_federation(federation, data_root, only_linkage=True)
    temporary = TemporaryFolder()
    folder = temporary.path if out is None else Path(out)
    loaded = program_of(program)
    options = RunOptions(run_folder=folder, data_root=root.resolve(), observe=observe)
    processes_with_program(with_program(config, loaded), options, loaded, frames)
    results = {}
    for party in config.table_parties:
        content = files.read_json(folder / "parties" / party.name / RESULT_FILE)
        results[party.name] = content["result"]
    temporary.remove()
    return results


def _frames_of(tables: Mapping[str, Any]) -> "dict[str, pd.DataFrame]":
    """Return the tables that are no files, by party name."""
    # It loads pandas, and the dealer's process reads this module.
    from securevfl.data.frames import as_pandas

    return {
        name: as_pandas(table, where=f"frame of {name!r}")
        for name, table in tables.items()
        if not isinstance(table, str | Path)
    }


def _of_tables(tables: Mapping[str, Any], root: Path) -> FederationConfig:
    """Return a federation of tables in memory or in files below a folder, with a dealer."""
    parties: list[dict[str, Any]] = []
    for name, table in tables.items():
        data = IN_MEMORY
        if isinstance(table, str | Path):
            data = Path(table).resolve().relative_to(root).as_posix()
        role = "secondary" if parties else "primary"
        # Nothing is linked: a program sees tables as they are.
        parties.append({"name": name, "role": role, "data": data, "key": ["unused"]})
    if parties:
        parties[0]["address"] = "127.0.0.1:0"
    source = {
        "federation": {"name": "program", "task": "regression"},
        "model": {"family": "top1sim"},
        "privacy": {"mechanism": "none"},
        "linkage": {"protection": "none"},
        "mpc": {},
        "party": [*parties, {"name": "dealer", "role": "dealer"}],
    }
    return parse_federation(source, file="parties", only_linkage=True)
