"""Linking by a coordinator, whatever hides keys from it: what these protections have in common."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from securevfl.data.tables import KeyTable
from securevfl.linkage.linked import LinkedPrimary, LinkedSecondary
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.candidates import (
    Candidates,
    find_candidates,
    linked_secondary,
    source_of_candidates,
)
from securevfl.linking.kept_links import LinkCache, coordinate
from securevfl.linking.keys import key_scaler, model_keys
from securevfl.linking.messages import Linked, LinkingKind, Lists, MadeSimilarities
from securevfl.linking.protections.protection import DataParty, Helper, HelperRole, Protection
from securevfl.linking.similar_links import SimilarLinks, stacked
from securevfl.transport.message import Message, StarKind


class Coordinated(Protection):
    """A third party finds the links, by distances that no data party sees.

    It holds neither a table nor a key, and tells each secondary an order and no distance.
    """

    helpers: ClassVar[tuple[HelperRole, ...]] = ("coordinator",)

    @abstractmethod
    def at_primary(self, party: DataParty) -> AbstractContextManager[Callable[[str], None]]:
        """Return what the primary does to link one secondary after another, by name."""

    @abstractmethod
    def at_secondary(self, party: DataParty) -> Message:
        """Do a secondary's part until the coordinator has sent its lists, and return these."""

    @abstractmethod
    def hear_primary(self, helper: Helper) -> Any:
        """Return what the coordinator gets of the primary before any secondary's turn."""

    @abstractmethod
    def find(self, helper: Helper, name: str, heard: Any) -> tuple[Candidates, SimilarLinks | None]:
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
        spec, parts = party.spec, []
        with self.at_primary(party) as compare:
            for name in spec.roles.secondaries:
                compare(name)
                # A secondary's similarities come before its neighbour's.
                if spec.similarities is not None:
                    made = party.lines.receive(
                        spec.roles.helpers["coordinator"], LinkingKind.SIMILARITIES
                    )
                    values = MadeSimilarities.from_message(made, spec=spec, rows=party.rows).values
                    parts.append(values)
                party.lines.receive(name, LinkingKind.LINKED)
        party.lines.send(Message(kind=StarKind.DONE), *spec.roles.helpers.values())
        scaler = key_scaler(spec.keys, None)
        return LinkedPrimary(keys=model_keys(scaler, party.keys), similarities=stacked(parts))

    def link_as_secondary(self, party: DataParty) -> LinkedSecondary:
        """Take part until the coordinator has sent this party's lists; see :class:`Protection`.

        Reveals:
            To the coordinator, the primary and the dealer: what the protection's messages say. To
            the primary: that linkage is done.
        """
        spec, rows, records = party.spec, party.rows, party.keys.num_rows
        lists = Lists.from_message(self.at_secondary(party), spec=spec, rows=rows, records=records)
        source = source_of_candidates(spec, lists.candidates, rows=rows, records=records)
        linked = linked_secondary(party.keys, source, key_scaler(spec.keys, None), rows=rows)
        party.lines.send(Linked().to_message(), spec.roles.primary)
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
            key_scaler(spec.keys, primary),
            rows=rows,
            similarities=None if similar is None else similar.values,
        )

    def help_to_link(
        self,
        role: HelperRole,  # noqa: ARG002 - there is no other
        helper: Helper,
    ) -> Mapping[str, Any]:
        """Rank as the coordinator until all secondaries have linked; see :class:`Protection`.

        Reveals:
            To each secondary: which of its records are nearest to each row, without distances. To
            the primary: noised similarities in falling order, if the family reads them.
        """
        spec, lines, figures = helper.spec, helper.lines, {}
        heard = self.hear_primary(helper)
        for name in spec.roles.secondaries:
            candidates, similar = self.find(helper, name, heard)
            lines.send(Lists(candidates=candidates).to_message(), name)
            if similar is not None:
                figures[name] = similar.figures()
                made = MadeSimilarities(values=similar.values)
                lines.send(made.to_message(), spec.roles.primary)
        lines.receive(spec.roles.primary, StarKind.DONE)
        return {"similarities": figures}
