"""Interface of a protection: every party's part in linking, and what each learns from it.

:class:`Protection` is the interface for settings, runs and figures; :class:`Coordinated` is the
common part of all protections with a coordinator.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float32, Int64

from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer, Warned
from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import Alignment
from securevfl.linkage.metrics.metric import ComparedKeys, KeySpec, Metric
from securevfl.linkage.sampling import FixedLinks, LinkSource, has_candidate
from securevfl.linkage.spec import (
    LinkageSecret,
    LinkedPrimary,
    LinkedSecondary,
    LinkSpec,
    few_links_doubt,
)
from securevfl.linkage.stage import candidates
from securevfl.linkage.stage.link_cache import LinkCache, coordinate, links_key
from securevfl.linkage.stage.messages import (
    Linked,
    LinkedRows,
    LinkingKind,
    Lists,
    MadeSimilarities,
)
from securevfl.linkage.stage.noised_similarities import SimilarLinks
from securevfl.linkage.stage.party_keys import agreed_scaler, key_scaler, model_keys
from securevfl.transport.channels import Channels
from securevfl.transport.message import (
    Cover,
    DeclaredMessage,
    Message,
    MessageKind,
    StarKind,
    TypedMessage,
)

HelperRole = Literal["coordinator", "dealer"]

Take = Callable[..., None]
"""Records a message to a coordinator: its kind, the secondary ``of`` which it is, and its arrays by
name."""


def take_nothing(_kind: str, **_values: Any) -> None:
    """Record nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkageHelper:
    """A party without a table that helps to link, and its channels to the others."""

    spec: LinkSpec
    """Settings of the linkage."""

    rows: int
    """Number of the primary's rows."""

    channels: Channels
    """Channels to all other parties."""

    cache: LinkCache
    """Cache of a coordinator's links and their noise."""

    take: Take = take_nothing
    """Records what a coordinator receives, where that is asked for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DataParty(LinkageHelper):
    """A party with a table that takes part in linking, and its channels to the others."""

    cache: LinkCache
    """Cache of its links, or the key of the tag that identifies its table to a coordinator."""

    keys: KeyTable
    """The party's own keys."""

    session: bytes
    """The session's id."""

    secret: LinkageSecret | None
    """The linkage secret of the data parties, if the protection needs one."""

    observe: Observer
    """Receives progress events."""

    memory: dict[str, Any] = field(default_factory=dict)
    """State that a protection keeps between linkings of a session, by the other party."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BothTables:
    """The primary's keys and a secondary's, where one process may see both."""

    spec: LinkSpec
    """Settings of the linkage."""

    primary: KeyTable
    """The primary's keys."""

    own: KeyTable
    """The secondary's keys."""

    secret: LinkageSecret
    """The linkage secret."""

    cache: LinkCache
    """Cache of the secondary's links."""


def linked_primary(
    spec: LinkSpec,
    keys: KeyTable,
    similarities: Sequence[Float32[np.ndarray, "rows links"] | None],
    rows: Sequence[LinkedRows | None],
) -> LinkedPrimary:
    """Return the result of linking at the primary.

    Args:
        spec: Settings of the linkage.
        keys: The primary's keys.
        similarities: Those of each secondary, by rank; none if the family reads none.
        rows: Which rows each secondary has linked; None where the file does not ask for it.
    """
    scaler, present_rows = key_scaler(spec, keys), [answer for answer in rows if answer is not None]
    return LinkedPrimary(
        keys=model_keys(scaler, keys),
        firsts=candidates.rows_of_keys(spec, keys),
        key_scale=scaler,
        similarities=stack_similarities(similarities),
        alignment=Alignment(
            names=spec.roles.present,
            linked=np.stack([answer.rows for answer in present_rows], axis=1),
            apart=[
                n
                for n, answer in zip(spec.roles.present, present_rows, strict=True)
                if answer.apart
            ],
        )
        if present_rows
        else None,
    )


def stack_similarities(
    parts: Sequence[Float32[np.ndarray, "rows links"] | None],
) -> Float32[np.ndarray, "rows secondaries links"] | None:
    """Put the similarities of all secondaries side by side; None if there are none."""
    given = [part for part in parts if part is not None]
    return np.stack(given, axis=1) if given else None


def linked_secondary(
    own: KeyTable,
    source: LinkSource,
    scaler: KeyScaler | None,
    *,
    rows: int,
    similar: SimilarLinks | None = None,
    apart: bool = False,
    meet: bool = True,
    firsts: Int64[np.ndarray, " rows"] | None = None,
    texts: Sequence[str | None] | None = None,
    figures: Mapping[str, Any] | None = None,
) -> LinkedSecondary:
    """Return the result of linking at a secondary.

    Args:
        own: Its keys.
        source: Where its rounds get links from.
        scaler: How keys are scaled for models; None for texts.
        rows: Number of the primary's rows.
        similar: Similarities, where the secondary makes them.
        apart: What :func:`~securevfl.linkage.stage.candidates.tells_apart` says.
        meet: Whether numeric keys of both parties have common ranges.
        firsts: First row of each row's key; None where that is not known or not needed.
        texts: Key of each row, where only equal ones are linked; None as ``firsts``.
        figures: What its log says besides counts of links.
    """
    counts: dict[str, Any] = {"rows": rows, "records": own.num_rows}
    if isinstance(source, FixedLinks):
        present = source.table.present
        counts["links"] = int(present.sum())
        counts["rows_without_links"] = int((~present.any(axis=1)).sum())
        counts["most_uses_of_a_record"] = source.table.most_uses(own.num_rows)
    return LinkedSecondary(
        source=source,
        keys=model_keys(scaler, own),
        key_scale=scaler,
        primary_rows=rows,
        similarities=None if similar is None else similar.values,
        similarity_scale=None if similar is None else similar.scale,
        apart=apart,
        meet=meet,
        firsts=firsts,
        texts=texts,
        figures={**counts, **(figures or {})},
    )


class Protection(ABC):
    """One way to hide keys: stateless, named by a federation file."""

    name: ClassVar[str]
    """Name in a federation file."""

    helpers: ClassVar[tuple[HelperRole, ...]] = ()
    """Roles of the parties without a table that the protection needs."""

    needs_secret: ClassVar[bool] = False
    """True if data parties share a linkage secret."""

    reads: ClassVar[frozenset[str]] = frozenset()
    """Settings of the ``[linkage]`` table that go with few protections, this one among them."""

    changeable: ClassVar[frozenset[str]] = frozenset()
    """Settings among these that may change once a model is saved."""

    learned: ClassVar[Mapping[str, str]]
    """Information that each role learns, in one sentence."""

    messages: ClassVar[tuple[type[TypedMessage], ...]]
    """All messages between its parties."""

    @property
    def kinds(self) -> tuple[MessageKind, ...]:
        """The kinds of message that may come while linking; no other is let in."""
        relayed = (StarKind.SEALED, StarKind.DONE) if self.helpers else ()
        own = dict.fromkeys(message.KIND for message in self.messages)
        return (*own, LinkingKind.LINKED_ROWS, *relayed)

    def objection_to(self, metric: Metric) -> str | None:
        """Return why a metric's keys cannot be hidden, as a predicate; None if they can."""
        return None

    def check(self, keys: KeySpec) -> None:  # noqa: B027 - some protections hide all keys
        """Refuse keys that it cannot hide, of a metric that it can.

        Raises:
            ConfigError: Naming the field, the rule and the value.
        """

    def check_settings(self, settings: Mapping[str, Any]) -> None:  # noqa: B027 - few have several
        """Refuse settings that contradict one another.

        Args:
            settings: The values of :attr:`reads`, by name.

        Raises:
            ConfigError: Naming the setting and the rule.
        """

    def settings_for_new_rows(
        self, settings: Mapping[str, Any], *, trained_rows: int | None
    ) -> Mapping[str, Any]:
        """Return the settings under which new rows are linked for predictions.

        Args:
            settings: The values of :attr:`reads`, by name.
            trained_rows: Number of the primary's rows in training; None where it is not known.
        """
        return settings

    def closed_channels(self, settings: Mapping[str, Any]) -> frozenset[Cover]:
        """Return the channels of its messages that say nothing under these settings."""
        return frozenset()

    def check_distance(self, keys: KeySpec, distance: float) -> None:
        """Refuse a largest distance that was meant in another unit than what is compared has.

        Raises:
            ConfigError: Naming the unit and the value.
        """
        keys.metric.check_distance(distance)

    def learns(self, spec: LinkSpec, role: str) -> list[str]:
        """Return what a party of that role learns, one sentence each."""
        return [self.learned[role]]

    def unit(self, spec: LinkSpec) -> str:
        """Return what distances are in, for figures."""
        return spec.keys.metric.unit

    def figures(self, spec: LinkSpec, primary: KeyTable, records: KeyTable) -> dict[str, Any]:
        """Return what comparing two tables costs, beyond what every protection costs.

        Raises:
            DataError: If keys are not what the protection needs.
        """
        return {}

    def key(self, tables: BothTables) -> str:
        """Return the key of a secondary's kept links, where both tables may be seen."""
        check = tables.secret.check_value("cache") if self.needs_secret else ""
        return links_key(tables.spec, tables.primary, tables.own, secret=check)

    def report_links(
        self,
        spec: LinkSpec,
        own: KeyTable,
        linked: LinkedSecondary,
        observe: Observer,
        *,
        primary_is_elsewhere: bool = False,
    ) -> LinkedSecondary:
        """Count a secondary's links, and report them with warnings to its own operator.

        Args:
            spec: Settings of the linkage.
            own: The secondary's keys.
            linked: What linking left there.
            observe: The secondary's own, or a simulation's.
            primary_is_elsewhere: Whether only this operator is told if they are few.

        Returns:
            The same with counts; without them where links are not counted, as for predictions.
        """
        if not spec.choice.counted:
            return linked
        # Under a protection no data party knows distances.
        unit = None if self.helpers else self.unit(spec)
        counts = candidates.count_links(spec, own, linked, unit=unit)
        if primary_is_elsewhere:
            rows = np.arange(linked.primary_rows, dtype=np.int64)
            share = float(has_candidate(linked.source, rows).mean())
            counts = replace(counts, doubt=few_links_doubt(spec, share))
        observe(counts)
        for text in candidates.link_warnings(spec, own, counts, meet=linked.meet):
            observe(Warned(text=text))
        return replace(linked, counts=counts)

    def report_done(
        self, party: DataParty, linked: LinkedSecondary, done: DeclaredMessage
    ) -> LinkedSecondary:
        """End a secondary's part: count its links, and report to the primary that linkage is done.

        Args:
            party: The secondary.
            linked: What linking left there.
            done: What says so.

        Returns:
            As :meth:`report_links`.

        Reveals:
            To the primary: ``done`` and, where the file asks for it, for each of its rows whether
            it has a link here.
        """
        linked = self.report_links(
            party.spec, party.keys, linked, party.observe, primary_is_elsewhere=True
        )
        party.channels.send(done.to_message(), party.spec.roles.primary)
        if party.spec.tells_rows:
            rows = LinkedRows(rows=linked.linked_rows(), apart=linked.apart)
            party.channels.send(rows.to_message(), party.spec.roles.primary)
        return linked

    def await_done(self, party: DataParty, name: str) -> tuple[Message, LinkedRows | None]:
        """Return what a secondary sent to the primary by :meth:`report_done`.

        Raises:
            ProtocolError: If it is not what was agreed on.
        """
        done = party.channels.receive(name, LinkingKind.LINKED)
        if not party.spec.tells_rows:
            return done, None
        message = party.channels.receive(name, LinkingKind.LINKED_ROWS)
        return done, LinkedRows.from_message(message, rows=party.rows)

    @abstractmethod
    def compare(
        self, spec: LinkSpec, primary: KeyTable, records: KeyTable, secret: LinkageSecret
    ) -> ComparedKeys:
        """Return the distances that its parties find, where both tables may be seen.

        Raises:
            DataError: If keys are not what the metric or the protection needs.
        """

    @abstractmethod
    def link_in_process(self, tables: BothTables) -> LinkedSecondary:
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

    It holds neither a table nor a key, and sends each secondary an order and no distance.
    """

    helpers: ClassVar[tuple[HelperRole, ...]] = ("coordinator",)

    def check(self, keys: KeySpec) -> None:
        """Require ranges of numbers: models scale keys by them, as no party sees all keys."""
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
    def receive_primary(self, helper: LinkageHelper) -> Any:
        """Return what the coordinator gets of the primary before any secondary's turn."""

    @abstractmethod
    def find(
        self, helper: LinkageHelper, name: str, received: Any
    ) -> tuple[Lists, SimilarLinks | None]:
        """Return one secondary's lists, and its similarities where these are wanted.

        Args:
            helper: The coordinator.
            name: The secondary.
            received: What :meth:`receive_primary` returned.
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
                    made = party.channels.receive(
                        spec.roles.helpers["coordinator"], LinkingKind.SIMILARITIES
                    )
                    message = MadeSimilarities.from_message(
                        made, rows=party.rows, neighbours=spec.choice.neighbours
                    )
                    parts.append(message.similarities)
                linked.append(self.await_done(party, name)[1])
        party.channels.send(Message(kind=StarKind.DONE), *spec.roles.helpers.values())
        return linked_primary(spec, party.keys, parts, linked)

    def link_as_secondary(self, party: DataParty) -> LinkedSecondary:
        """Take part until the coordinator has sent this party's lists; see :class:`Protection`.

        Reveals:
            To the coordinator, the primary and the dealer: what the protection's messages say. To
            the primary: that linkage is done and, where the file asks for it, which rows are
            linked.
        """
        spec, rows, records = party.spec, party.rows, party.keys.num_rows
        lists = Lists.from_message(self.at_secondary(party), spec=spec, rows=rows, records=records)
        source = candidates.source_of_candidates(spec, lists.candidates, records=records)
        scaler = agreed_scaler(spec)
        linked = linked_secondary(party.keys, source, scaler, rows=rows, apart=lists.apart)
        return self.report_done(party, linked, Linked())

    @abstractmethod
    def record_received(self, tables: BothTables, take: Take) -> None:
        """Record what the coordinator would receive, computed from both tables.

        Raises:
            DataError: If keys are not what the metric or the protection needs.
        """

    def link_in_process(self, tables: BothTables) -> LinkedSecondary:
        """Compare what the parties would compare, and forget the distances."""
        spec, primary, own = tables.spec, tables.primary, tables.own
        metric = self.compare(spec, primary, own, tables.secret)
        lists, similar = coordinate(
            spec,
            lambda: candidates.find_candidates(spec, metric),
            records=own.num_rows,
            cache=tables.cache,
            key=self.key(tables),
        )
        return linked_secondary(
            own,
            candidates.source_of_candidates(spec, lists.candidates, records=own.num_rows),
            key_scaler(spec, primary),
            rows=primary.num_rows,
            similar=similar,
            apart=lists.apart,
        )

    def help_to_link(self, role: HelperRole, helper: LinkageHelper) -> Mapping[str, Any]:
        """Rank as the coordinator until all secondaries have linked; see :class:`Protection`.

        Reveals:
            To each secondary: which of its records are nearest to each row, without distances. To
            the primary: noised similarities in falling order, if the family reads them.
        """
        spec, channels, figures = helper.spec, helper.channels, {}
        received = self.receive_primary(helper)
        for name in spec.roles.present:
            lists, similar = self.find(helper, name, received)
            channels.send(lists.to_message(), name)
            if similar is not None:
                figures[name] = similar.figures()
                made = MadeSimilarities(similarities=similar.values)
                channels.send(made.to_message(), spec.roles.primary)
        channels.receive(spec.roles.primary, StarKind.DONE)
        return {"similarities": figures}
