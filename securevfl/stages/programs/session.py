"""The session in which all parties run a program."""

import os
import runpy
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.conventions import PRIMARY_RANK
from securevfl.core.errors import ConfigError, DataError, SecureVflError
from securevfl.core.progress import Stage
from securevfl.federation.run_plan import RunFacts, new_run, prediction_facts
from securevfl.federation.session import handshake
from securevfl.ledger.book import ProgramUse
from securevfl.ledger.chain import now
from securevfl.mpc import on_shares
from securevfl.runtime.party import PartySession, join
from securevfl.runtime.primary_party import PrimarySession, primary_session
from securevfl.runtime.run_options import Program
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
