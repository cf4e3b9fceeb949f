"""A part of a run that only some federations want, and what each party does for it.

A stage stands between linking and the last round. Its parts are the same in one process and over
the star: the primary's reaches secondaries by :class:`~securevfl.federation.session.peers.Peers`,
and a secondary's is a table of handlers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from securevfl.config.federation import FederationConfig
from securevfl.config.sections import PartySettings
from securevfl.config.stage_policy import policies
from securevfl.core.progress import Observer
from securevfl.core.stages import load_part, stages
from securevfl.data.tables import PartyTable
from securevfl.federation.rounds.primary import Primary
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.handshake import Joined
from securevfl.federation.session.party_files import PartyFiles
from securevfl.federation.session.peers import Handlers, Peers
from securevfl.linkage.spec import LinkedPrimary, LinkedSecondary
from securevfl.transport.channels import Channels, Kinds

OpenChannels = Callable[[Sequence[str], Kinds], Channels]
"""Opens a party's channels to others, by name, for messages of some kinds."""


class StageAtSecondary:
    """A secondary's part of a stage in one session: how it handles the stage's messages."""

    @property
    def opening(self) -> Handlers:
        """Handlers of a dialogue before the first round, which one of them ends."""
        return {}

    @property
    def beside_rounds(self) -> Handlers:
        """Handlers of messages between rounds."""
        return {}


class StageAtPrimary:
    """The primary's part of a stage in one session; a step does nothing unless a stage has it."""

    @property
    def figures(self) -> Mapping[str, Any] | None:
        """The stage's figures for ``metrics.json``; None where it has none."""
        return None

    def prepare(self) -> None:
        """Do what comes between linking and training."""

    def before_release(self) -> None:
        """Do what comes before the first row of frozen encoders is asked for."""

    def end(self) -> None:
        """Let helpers go, once nothing more is asked for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SecondaryContext:
    """What a secondary's part of a stage works with."""

    plan: RunPlan
    """The run, with where it starts."""
    party: PartySettings
    """Section of the federation file about the party."""
    table: PartyTable
    secondary: Secondary
    """The party in rounds, with its bottom model."""
    linked: LinkedSecondary
    """The party's links."""
    files: PartyFiles
    """The party's log, checkpoints and ledger."""
    data_root: Path
    """Folder that relative paths of the federation file start from."""
    observe: Observer
    """Receives warnings."""
    open_channels: OpenChannels | None = None
    """Way to the primary and, sealed, to helpers; None where all parties are in one process."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OtherParts:
    """The other parties' parts of stages, as the primary reaches them."""

    peers: Callable[[str], Peers]
    """Returns the secondaries' parts of a stage, by its name."""
    here: Mapping[str, Sequence[StageAtSecondary]] = field(default_factory=dict)
    """The secondaries' parts by stage, where all parties are in one process."""
    open_channels: OpenChannels | None = None
    """Way to every party; None where all parties are in one process."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrimaryContext:
    """What the primary's part of a stage works with."""

    plan: RunPlan
    """The run, with where it starts."""
    table: PartyTable
    primary: Primary
    """The party in rounds, with its top model."""
    linked: LinkedPrimary
    """The party's links."""
    files: PartyFiles
    """The party's log, checkpoints and ledger."""
    peers: Peers
    """The secondaries' parts of this stage."""
    run_folder: Path
    data_root: Path
    """Folder that relative paths of the federation file start from."""
    observe: Observer
    """Receives progress."""
    open_channels: OpenChannels | None = None
    """Way to every party; None where all parties are in one process."""
    here: Sequence[StageAtSecondary] = ()
    """The secondaries' parts, where all parties are in one process."""


@dataclass(frozen=True)
class RunStage:
    """A stage that takes part in a run; by default no party does anything for it."""

    name: str
    """Name of the stage's folder, and of its figures."""

    def primary(self, context: PrimaryContext) -> StageAtPrimary:
        """Return the primary's part in a session of training."""
        return StageAtPrimary()

    def secondary(self, context: SecondaryContext) -> StageAtSecondary | None:
        """Return a secondary's part in a session of training; None where it has nothing to do."""
        return None

    def help(
        self, config: FederationConfig, role: str, star: Joined
    ) -> tuple[str, Mapping[str, int]] | None:
        """Take a third party's part in a session of training.

        Returns:
            What its log gets: an event and figures; None where the role has no part.
        """
        return None


def run_stages(config: FederationConfig) -> tuple[RunStage, ...]:
    """Return the stages that runs of a federation file have, and load no others."""
    manifests = stages()
    return tuple(
        load_part(name, run)(name) for name in policies(config) if (run := manifests[name].run)
    )


def secondary_parts(context: SecondaryContext) -> dict[str, StageAtSecondary]:
    """Return a secondary's parts of all stages that have some, by the stages' names."""
    parts = {stage.name: stage.secondary(context) for stage in run_stages(context.plan.config)}
    return {name: part for name, part in parts.items() if part is not None}
