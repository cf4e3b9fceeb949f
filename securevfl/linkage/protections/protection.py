"""What a protection is: every party's part in linking, and what each learns from it.

:class:`Protection` is what settings, both runners and figures ask; :class:`Coordinated` is the part
that all protections by a coordinator have in common.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer, Warned
from securevfl.data.tables import KeyTable
from securevfl.linkage.metrics.metric import KeyMetric, KeySpec
from securevfl.linkage.spec import LinkageSecret, LinkedPrimary, LinkedSecondary, LinkSpec
from securevfl.linkage.stage.candidates import (
    Candidates,
    count_links,
    doubts_about,
    find_candidates,
    linked_secondary,
    require_links,
    source_of_candidates,
)
from securevfl.linkage.stage.kept_links import (
    LinkCache,
    SimilarLinks,
    coordinate,
    links_key,
    stacked,
)
from securevfl.linkage.stage.messages import (
    Linked,
    LinkedRows,
    LinkingKind,
    Lists,
    MadeSimilarities,
    alignment_of,
)
from securevfl.linkage.stage.party_keys import key_scaler, model_keys, scale_of
from securevfl.transport.channels import Lines
from securevfl.transport.message import Message, MessageKind, StarKind, TypedMessage

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
class LinkageHelper:
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
        own = dict.fromkeys(message.KIND for message in self.messages)
        return (*own, LinkingKind.LINKED_ROWS, *relayed)

    def check(self, keys: KeySpec) -> None:  # noqa: B027 - some protections hide all keys
        """Refuse keys that it cannot hide.

        Raises:
            ConfigError: Naming the field, the rule and the value.
        """

    def check_distance(self, keys: KeySpec, distance: float) -> None:
        """Refuse a largest distance that was meant in another unit than what is compared has.

        Raises:
            ConfigError: Naming the unit and the value.
        """
        keys.metric.check_distance(distance)

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

    def report_links(
        self, spec: LinkSpec, own: KeyTable, linked: LinkedSecondary, observe: Observer
    ) -> LinkedSecondary:
        """Count a secondary's links, report them and what is doubtful, and refuse too few.

        Args:
            spec: What linking needed.
            own: The secondary's keys.
            linked: What linking left there.
            observe: The secondary's own, or a simulation's.

        Returns:
            The same with counts; without them where links are not counted, as for predictions.

        Raises:
            DataError: If fewer are linked than ``linkage.least_linked``.
        """
        least = spec.choice.least_linked
        if least is None:
            return linked
        # Under a protection no data party knows distances.
        unit = None if self.helpers else self.unit(spec)
        counts = count_links(spec, own, linked, unit=unit)
        observe(counts)
        for text in doubts_about(spec, own, counts, meet=linked.meet):
            observe(Warned(text=text))
        require_links(counts, least=least, rate=spec.choice.sampling_rate)
        return replace(linked, counts=counts)

    def tell_linked_rows(self, party: DataParty, linked: LinkedSecondary) -> None:
        """Tell the primary which rows this secondary has linked, where the file asks for it.

        Reveals:
            To the primary: for each of its rows, whether it has a link here.
        """
        if party.spec.tells_rows:
            rows = LinkedRows(rows=linked.linked_rows(), apart=linked.apart)
            party.lines.send(rows.to_message(), party.spec.roles.primary)

    def hear_linked_rows(self, party: DataParty, name: str) -> LinkedRows | None:
        """Return what a secondary told with :meth:`tell_linked_rows`.

        Raises:
            ProtocolError: If it is not what was agreed on.
        """
        if not party.spec.tells_rows:
            return None
        message = party.lines.receive(name, LinkingKind.LINKED_ROWS)
        return LinkedRows.from_message(message, rows=party.rows)

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

    def help_to_link(self, role: HelperRole, helper: LinkageHelper) -> Mapping[str, Any]:
        """Take a helper's part until the primary says that linkage is done; return its figures.

        Raises:
            ConfigError: If two parties' linkage secrets differ.
            DataError: If what the parties sent does not belong together.
            ProtocolError: If a party leaves the protocol or fails.

        Reveals:
            What the protection's messages say.
        """
        raise AssertionError(f"{self.name} has no {role} in {helper.spec.roles.helpers}")


class Coordinated(Protection):
    """A third party finds the links, by distances that no data party sees.

    It holds neither a table nor a key, and tells each secondary an order and no distance.
    """

    helpers: ClassVar[tuple[HelperRole, ...]] = ("coordinator",)

    def check(self, keys: KeySpec) -> None:
        """Ask for ranges of numbers, by which models scale keys that nobody may see."""
        if keys.are_numbers and keys.ranges is None:
            raise ConfigError(
                f'linkage.ranges: protection = "{self.name}" needs the agreed [low, high] of every '
                f"numeric key column"
            )

    @abstractmethod
    def at_primary(self, party: DataParty) -> AbstractContextManager[Callable[[str], None]]:
        """Return what the primary does to link one secondary after another, by name."""

    @abstractmethod
    def at_secondary(self, party: DataParty) -> Message:
        """Do a secondary's part until the coordinator has sent its lists, and return these."""

    @abstractmethod
    def hear_primary(self, helper: LinkageHelper) -> Any:
        """Return what the coordinator gets of the primary before any secondary's turn."""

    @abstractmethod
    def find(
        self, helper: LinkageHelper, name: str, heard: Any
    ) -> tuple[Candidates, SimilarLinks | None]:
        """Return the coordinator's candidates of one secondary, and similarities where wanted.

        Args:
            helper: The coordinator.
            name: The secondary.
            heard: What :meth:`hear_primary` returned.
        """

    def link_as_primary(self, party: DataParty) -> LinkedPrimary:
        """Take part until all secondaries have linked; see :class:`Protection`.

        Reveals:
            To the coordinator, each secondary and the dealer: what the protection's messages say,
            and in the end that linkage is done.
        """
        spec, parts, linked = party.spec, [], []
        with self.at_primary(party) as compare:
            for name in spec.roles.present:
                compare(name)
                # A secondary's similarities come before its neighbour's.
                if spec.similarities is not None:
                    made = party.lines.receive(
                        spec.roles.helpers["coordinator"], LinkingKind.SIMILARITIES
                    )
                    values = MadeSimilarities.from_message(made, spec=spec, rows=party.rows).values
                    parts.append(values)
                party.lines.receive(name, LinkingKind.LINKED)
                linked.append(self.hear_linked_rows(party, name))
        party.lines.send(Message(kind=StarKind.DONE), *spec.roles.helpers.values())
        scaler = key_scaler(spec, None)
        return LinkedPrimary(
            keys=model_keys(scaler, party.keys),
            key_scale=scale_of(scaler),
            similarities=stacked(parts),
            alignment=alignment_of(spec, linked),
        )

    def link_as_secondary(self, party: DataParty) -> LinkedSecondary:
        """Take part until the coordinator has sent this party's lists; see :class:`Protection`.

        Reveals:
            To the coordinator, the primary and the dealer: what the protection's messages say. To
            the primary: that linkage is done, or that this party refused to go on, and, where the
            file asks for it, which rows are linked.
        """
        spec, rows, records = party.spec, party.rows, party.keys.num_rows
        lists = Lists.from_message(self.at_secondary(party), spec=spec, rows=rows, records=records)
        source = source_of_candidates(spec, lists.candidates, rows=rows, records=records)
        scaler, apart = key_scaler(spec, None), lists.candidates.apart
        linked = linked_secondary(party.keys, source, scaler, rows=rows, apart=apart)
        linked = self.report_links(spec, party.keys, linked, party.observe)
        party.lines.send(Linked().to_message(), spec.roles.primary)
        self.tell_linked_rows(party, linked)
        return linked

    def link_in_process(
        self,
        spec: LinkSpec,
        primary: KeyTable,
        own: KeyTable,
        *,
        secret: LinkageSecret,
        cache: LinkCache,
    ) -> LinkedSecondary:
        """Compare what the parties would compare, and forget the distances."""
        metric = self.compare(spec, primary, own, secret)
        candidates, similar = coordinate(
            spec,
            lambda: find_candidates(spec, metric),
            cache=cache,
            key=self.key(spec, primary, own, secret),
        )
        rows = primary.num_rows
        return linked_secondary(
            own,
            source_of_candidates(spec, candidates, rows=rows, records=own.num_rows),
            key_scaler(spec, primary),
            rows=rows,
            similarities=None if similar is None else similar.values,
            similarity_scale=None if similar is None else similar.scale,
            apart=candidates.apart,
        )

    def help_to_link(
        self,
        role: HelperRole,  # noqa: ARG002 - there is no other
        helper: LinkageHelper,
    ) -> Mapping[str, Any]:
        """Rank as the coordinator until all secondaries have linked; see :class:`Protection`.

        Reveals:
            To each secondary: which of its records are nearest to each row, without distances. To
            the primary: noised similarities in falling order, if the family reads them.
        """
        spec, lines, figures = helper.spec, helper.lines, {}
        heard = self.hear_primary(helper)
        for name in spec.roles.present:
            candidates, similar = self.find(helper, name, heard)
            lines.send(Lists(candidates=candidates).to_message(), name)
            if similar is not None:
                figures[name] = similar.figures()
                made = MadeSimilarities(values=similar.values)
                lines.send(made.to_message(), spec.roles.primary)
        lines.receive(spec.roles.primary, StarKind.DONE)
        return {"similarities": figures}
