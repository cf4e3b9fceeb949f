"""What a protection is: every party's part in linking, and what each learns from it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from securevfl.core.progress import Observer
from securevfl.data.tables import KeyTable
from securevfl.linkage.linked import LinkedPrimary, LinkedSecondary
from securevfl.linkage.metrics.metric import KeyMetric, KeySpec
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.kept_links import LinkCache, links_key
from securevfl.linking.lines import Lines
from securevfl.transport.message import MessageKind, StarKind, TypedMessage

HelperRole = Literal["coordinator", "dealer"]


@dataclass(frozen=True, kw_only=True, eq=False)
class DataParty:
    """What a data party brings to linking, and its lines to the others."""

    spec: LinkSpec
    """What linking needs."""

    keys: KeyTable
    """Its own keys."""

    rows: int
    """How many rows the primary has."""

    lines: Lines
    """To everybody."""

    session: bytes
    """The session's id."""

    secret: LinkageSecret | None
    """What it shares with the other data parties, if the protection needs that."""

    cache: LinkCache
    """Where it keeps links, or what names its table to a coordinator."""

    observe: Observer
    """Hears of progress."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Helper:
    """A party that holds no table and helps to link."""

    spec: LinkSpec
    """What linking needs."""

    rows: int
    """How many rows the primary has."""

    lines: Lines
    """To everybody."""

    cache: LinkCache
    """Where a coordinator keeps links and their noise."""


class Protection(ABC):
    """One way to hide keys: stateless, named by a federation file."""

    name: ClassVar[str]
    """Its name in a federation file."""

    helpers: ClassVar[tuple[HelperRole, ...]] = ()
    """Parties without a table that it rests on."""

    needs_secret: ClassVar[bool] = False
    """Whether data parties share a linkage secret."""

    takes_cells: ClassVar[bool] = False
    """Whether grid cells may spare it pairs."""

    learned: ClassVar[Mapping[str, str]]
    """What each role learns, one sentence."""

    messages: ClassVar[tuple[type[TypedMessage], ...]]
    """All that its parties tell one another."""

    @property
    def kinds(self) -> tuple[MessageKind, ...]:
        """The kinds of message that may come while linking; no other is let in."""
        relayed = (StarKind.SEALED, StarKind.DONE) if self.helpers else ()
        return (*dict.fromkeys(message.KIND for message in self.messages), *relayed)

    def check(self, keys: KeySpec) -> None:  # noqa: B027 - some protections hide all keys
        """Refuse keys that it cannot hide.

        Raises:
            ConfigError: Naming the field, the rule and the value.
        """

    def learns(self, spec: LinkSpec, role: str) -> list[str]:  # noqa: ARG002 - more than it may be
        """Return what a party of that role learns, one sentence each."""
        return [self.learned[role]]

    def unit(self, spec: LinkSpec) -> str:
        """Return what distances are in, for figures."""
        return spec.keys.metric.unit

    def figures(
        self,
        spec: LinkSpec,  # noqa: ARG002
        primary: KeyTable,  # noqa: ARG002
        records: KeyTable,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Return what comparing two tables costs, beyond what every protection costs.

        Raises:
            DataError: If keys are not what the protection needs.
        """
        return {}

    def key(self, spec: LinkSpec, primary: KeyTable, own: KeyTable, secret: LinkageSecret) -> str:
        """Return the key of a secondary's kept links, where both tables may be seen."""
        check = secret.check_value("cache") if self.needs_secret else ""
        return links_key(spec, primary, own, secret=check)

    @abstractmethod
    def compare(
        self, spec: LinkSpec, primary: KeyTable, records: KeyTable, secret: LinkageSecret
    ) -> KeyMetric:
        """Return the distances that its parties find, where both tables may be seen.

        Raises:
            DataError: If keys are not what the metric or the protection needs.
        """

    @abstractmethod
    def link_in_process(
        self,
        spec: LinkSpec,
        primary: KeyTable,
        own: KeyTable,
        *,
        secret: LinkageSecret,
        cache: LinkCache,
    ) -> LinkedSecondary:
        """Link where both tables may be seen: the links that the parties would find.

        Raises:
            DataError: If a table can't be linked.
            ConfigError: If similarities are wanted, and the bound tau cannot be had.
        """

    @abstractmethod
    def link_as_primary(self, party: DataParty) -> LinkedPrimary:
        """Take the primary's part until all secondaries have linked.

        Raises:
            DataError: If the primary's keys can't be linked.
            ProtocolError: If a party leaves the protocol or fails.

        Reveals:
            What the protection's messages say.
        """

    @abstractmethod
    def link_as_secondary(self, party: DataParty) -> LinkedSecondary:
        """Take a secondary's part until its records are linked.

        Raises:
            ConfigError: If similarities are wanted, and the bound tau cannot be had.
            DataError: If its table can't be linked.
            ProtocolError: If a party leaves the protocol or fails.

        Reveals:
            What the protection's messages say.
        """

    def help_to_link(self, role: HelperRole, helper: Helper) -> Mapping[str, Any]:
        """Take a helper's part until the primary says that linkage is done; return its figures.

        Raises:
            ConfigError: If two parties' linkage secrets differ.
            DataError: If what the parties sent does not belong together.
            ProtocolError: If a party leaves the protocol or fails.

        Reveals:
            What the protection's messages say.
        """
        raise AssertionError(f"{self.name} has no {role} in {helper.spec.roles.helpers}")
