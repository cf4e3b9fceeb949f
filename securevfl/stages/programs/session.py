"""CrypTen programs between parties: what ``securevfl mpc`` and ``securevfl.mpc.run`` start.

A program is a function in a Python file of its own. Every party runs the same one, each in its own
process and with its own table; shares go over the star's mutual TLS, and the dealer makes the
randomness of multiplications. What a program opens to whom is its author's affair.
"""

import inspect
import os
import runpy
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.config.sections import IN_MEMORY
from securevfl.core import files
from securevfl.core.conventions import PRIMARY_RANK
from securevfl.core.errors import ConfigError, DataError, PrivacyError, SecureVflError
from securevfl.core.progress import Observer, Stage, unheard
from securevfl.federation.run_plan import RunFacts, new_run, prediction_facts
from securevfl.federation.session import handshake
from securevfl.ledger.book import ProgramUse
from securevfl.ledger.chain import now
from securevfl.mpc import on_shares
from securevfl.runtime.launching import processes_with_program
from securevfl.runtime.party import PartySession, join
from securevfl.runtime.primary_party import PrimarySession, primary_session
from securevfl.runtime.run_folder import TemporaryFolder
from securevfl.runtime.run_options import FederationSource, Program, RunOptions, resolve_federation
from securevfl.stages.programs.messages import (
    AT_DEALER,
    AT_PRIMARY,
    AT_SECONDARY,
    KEY_BYTES,
    ComputingDone,
    ComputingKey,
    ComputingKind,
    ComputingLines,
    DealingParty,
    LineToDealer,
    key_from,
)
from securevfl.transport.channels import CallerChannels, Channels
from securevfl.transport.message import StarKind

if TYPE_CHECKING:
    # It loads with a table, which the dealer has not.
    import pandas as pd


@dataclass(frozen=True, eq=False)
class ProgramParty:
    """One party, as its program sees it."""

    name: str
    """The party's name."""
    _: KW_ONLY
    names: tuple[str, ...]
    """All that compute, the primary first; CrypTen's ranks are their places."""
    table: "pd.DataFrame"
    """This party's own table, whole."""

    @property
    def rank(self) -> int:
        """CrypTen's rank of this party."""
        return self.names.index(self.name)

    def column(self, name: str, *, of: str | None = None) -> Tensor:
        """Return a column of numbers, as ``crypten.cryptensor`` takes it.

        Args:
            name: Of the column.
            of: Whose column it is; at others zeros stand in for it, of as many rows as this party
                has. None: this party's own.

        Raises:
            DataError: If there is no such column, or it is not of numbers.
        """
        if of not in (None, self.name):
            return torch.zeros(len(self.table))
        try:
            values = self.table[name].to_numpy(dtype=np.float32)
        except KeyError:
            raise DataError(f"table of {self.name!r}: has no column {name!r}") from None
        except (TypeError, ValueError):
            raise DataError(f"table of {self.name!r}: {name!r} is not of numbers") from None
        return torch.from_numpy(values)


if TYPE_CHECKING:
    # It loads with a table, which the dealer has not.
    import pandas as pd

RESULT_FILE: Final = "result.json"
"""File of what a party's program returned, in that party's own folder."""

# A program's own name for itself: what stands under ``if __name__ == "__main__"`` is not run.
_MODULE: Final = "securevfl_program"


def run_program(party: PartySession) -> None:
    """Run the job's program with the other parties; keep what it returns in the party's folder.

    A party with a table books the program in the table's ledger first.

    Raises:
        SecureVflError: Any failure, here or at another party. The table's owner may not allow
            programs; then nothing was sent of it.

    Reveals:
        To the others: what the program sends and opens to them, and sizes. To the dealer: sizes.
    """
    role = party.config.party(party.job.name).role
    if role == "primary":
        _as_primary(party)
    elif role == "secondary":
        _as_secondary(party)
    elif role == "dealer":
        _as_dealer(party)
    else:
        raise ConfigError(f"party {party.job.name!r}: a {role} has no part in a program")


def _as_primary(party: PartySession) -> None:
    config, table = party.config, _read(party)
    facts = prediction_facts(run=new_run())
    callers = handshake.callers_of_program(config)
    with primary_session(party) as session:
        session.wait(callers, party.job.join_timeout_s)
        came = session.greetings(callers)
        hellos = {name: handshake.read_hello(config, came[name]) for name in callers}
        session.welcome(hellos, facts)
        channels = session.open_channels(config.ranks, AT_PRIMARY)
        _compute(party, table, channels, _keys_of_primary(channels, session), facts, session)
        for secondary in config.secondaries:
            # What secondaries still send one another is relayed meanwhile.
            channels.receive(secondary.name, ComputingKind.COMPUTING_DONE)
        session.end(callers)


def _keys_of_primary(channels: Channels, session: PrimarySession) -> dict[int, bytes]:
    """Return the keys that secondaries have drawn for streams with the primary."""
    config = session.party.config
    return {
        config.ranks[secondary.name]: key_from(channels, secondary.name)
        for secondary in config.secondaries
    }


def _as_secondary(party: PartySession) -> None:
    config, table = party.config, _read(party)
    party.require_no_listen()
    with join(party, predicts=True) as star:
        channels = star.channels(config, config.ranks, AT_SECONDARY)
        own = ComputingKey(key=os.urandom(KEY_BYTES))
        channels.send(own.to_message(), config.primary.name)
        keys = {**star.pair_keys, PRIMARY_RANK: own.key}
        _compute(party, table, channels, keys, star.facts, star)
        channels.send(ComputingDone().to_message(), config.primary.name)
        channels.receive(config.primary.name, StarKind.DONE)


def _as_dealer(party: PartySession) -> None:
    config = party.config
    party.require_no_listen()
    with join(party, predicts=True) as star:
        party.observe(Stage(text="helping"))
        channels = CallerChannels(
            star.transport,
            config.ranks,
            star.sealed,
            kinds=AT_DEALER,
            deadline_s=config.waits.work.for_primary_s,
            between_s=config.waits.work.helper_s,
        )
        dealing = DealingParty(channels, _names_of(config), star.context(config))
        dealing.deal()
        party.files.log("dealt", requests=dealing.dealt)


def _compute(
    party: PartySession,
    table: "pd.DataFrame",
    channels: Channels,
    pair_keys: Mapping[int, bytes],
    facts: RunFacts,
    star: PrimarySession | handshake.Joined,
) -> None:
    """Book the program in the table's ledger, and run it."""
    config, name, program = party.config, party.job.name, party.job.program
    dealer, names = config.helper("dealer"), _names_of(config)
    if program is None or dealer is None:
        raise ConfigError("program: needs a function in a file, and a party that deals")
    context = handshake.context_of(config, facts, star.transport.session)
    member = on_shares.Seat(
        rank=config.ranks[name],
        world=tuple(sorted(names)),
        pair_keys={rank: key for rank, key in pair_keys.items() if rank in names},
        context=context,
        lines=ComputingLines(channels, names),
        dealer=LineToDealer(channels, dealer.name, context),
    )
    others = [*config.table_parties, dealer]
    use = ProgramUse(
        run=facts.run,
        federation=config.federation.name,
        party=name,
        program=program.digest,
        peers={other.name: party.pinned[other.name] for other in others if other.name != name},
        time=now(),
    )
    party.files.book_program(use)
    party.observe(Stage(text="computing"))
    function = _function_of(program)
    seen = ProgramParty(name, names=tuple(names[rank] for rank in member.world), table=table)
    with on_shares.computing(member) as link:
        result = function(seen)
        party.files.log("computed", rounds=link.comm_rounds, bytes_sent=link.comm_bytes)
    files.write_json(party.job.folder / RESULT_FILE, {"result": _plain(result)})


def _names_of(config: FederationConfig) -> dict[int, str]:
    """Return the names of the parties that may compute, by rank."""
    return {config.ranks[party.name]: party.name for party in config.table_parties}


def _function_of(program: Program) -> Callable[[ProgramParty], Any]:
    """Return the function of a program's file, whose content is still the one agreed on."""
    if Program.of(program.path, program.function) != program:
        raise ConfigError(f"program: {program.path} has changed since this party was started")
    function = runpy.run_path(str(program.path), run_name=_MODULE).get(program.function)
    if not callable(function):
        raise ConfigError(f"program: {program.path} has no function {program.function}(party)")
    typed: Callable[[ProgramParty], Any] = function
    return typed


def _read(party: PartySession) -> "pd.DataFrame":
    if party.job.frame is not None:
        return party.job.frame
    from securevfl.data.sources.read import read_frame

    own = party.config.party(party.job.name)
    path = party.job.data_root / own.data
    return read_frame(path, where=f"table {path} of {own.name!r}", reading=own.reading)


def _plain(result: Any) -> Any:
    """Return what a program returned as JSON has it.

    Raises:
        SecureVflError: If it holds anything but numbers, texts and tensors.
    """
    if isinstance(result, Tensor | np.ndarray | np.generic):
        return result.tolist()
    if isinstance(result, Mapping):
        return {str(name): _plain(value) for name, value in result.items()}
    if isinstance(result, list | tuple):
        return [_plain(value) for value in result]
    if result is None or isinstance(result, str | bool | int | float):
        return result
    raise SecureVflError(
        f"program: returned a {type(result).__name__}; return numbers, texts, tensors, or lists "
        f"and dictionaries of them (of a shared tensor, get_plain_text)"
    )


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
