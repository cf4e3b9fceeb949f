"""Exchange within one process, with small secondaries computed together.

A step of a small model takes the time in which its operations are called, not the time in which
they compute. A simulation of many such secondaries therefore stacks their weights and their links,
and computes all with one call of each operation. What is charged, clipped, noised and learned
stays each secondary's own: see :meth:`securevfl.federation.rounds.secondary.Secondary.answer`.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from securevfl.core.devices import computing_in, widened
from securevfl.federation.messages import EpochMark, RoundPlan
from securevfl.federation.rounds.cut import CutLayer, CutRows
from securevfl.federation.rounds.exchanges import RoundExchange
from securevfl.federation.rounds.secondary import Secondary, save_nothing
from securevfl.federation.rounds.updates import handed
from securevfl.federation.session.peers import PeersHere
from securevfl.models.family import StackableBottom
from securevfl.models.layers import drawing_apart

# Secondaries of one process whose bottom models have one shape: computed together.

LARGEST: Final = 2**20
"""Numbers of the widest layer, over the links of all secondaries that are computed at once."""

FEWEST: Final = 4
"""Secondaries that are computed at once; fewer are as quick by themselves."""


class Stacks:
    """Which secondaries of a process are computed together."""

    def __init__(self, secondaries: Mapping[int, Secondary], *, links: int) -> None:
        """Find secondaries whose bottom models have one shape.

        Args:
            secondaries: All of the process, by rank.
            links: K, links of a row.
        """
        self._secondaries = secondaries
        self._links = links
        self._weights = {
            rank: dict(one.bottom.named_parameters())
            for rank, one in secondaries.items()
            if _may_be_stacked(one)
        }
        self._shapes = {rank: self._shape_of(rank) for rank in self._weights}
        self._plan: RoundPlan | None = None
        self._shares: dict[int, Member] = {}

    def share(self, rank: int, plan: RoundPlan) -> "Member | None":
        """Return a secondary's share of a round's stacks; None: it works alone."""
        if plan is not self._plan:
            self._plan, self._shares = plan, self.of_round(plan)
        return self._shares.get(rank)

    def of_round(self, plan: RoundPlan) -> "dict[int, Member]":
        """Return the shares of a round's stacks by rank; who is missing works alone."""
        alike: dict[Hashable, list[int]] = {}
        for rank in plan.active:
            if rank in self._shapes:
                alike.setdefault(self._shapes[rank], []).append(rank)
        shares: dict[int, Member] = {}
        for ranks in alike.values():
            for some in self._at_once(ranks, rows=len(plan.rows)):
                members = [(self._secondaries[rank], self._weights[rank]) for rank in some]
                stack = Stack(members, plan)
                shares |= {rank: Member(stack, place) for place, rank in enumerate(some)}
        return shares

    def _shape_of(self, rank: int) -> Hashable:
        """Return what members of a stack share, in addition to the federation's settings."""
        weights = self._weights[rank].items()
        return type(self._secondaries[rank].bottom), *((name, one.shape) for name, one in weights)

    def _at_once(self, ranks: Sequence[int], *, rows: int) -> Iterator[Sequence[int]]:
        links = rows * self._links
        members = [self._secondaries[rank] for rank in ranks]
        if members[0].bottom.recordwise and min(len(one.data.keys) for one in members) < links:
            # Alone, such a model computes each record once, which is less than every link.
            return
        weights = self._weights[ranks[0]].values()
        widest = max(len(one) for one in weights if one.dim() > 1)
        most = LARGEST // (links * widest)
        parts = -(-len(ranks) // most) if most else len(ranks)
        if len(ranks) // parts < FEWEST:
            return
        for part in range(parts):
            yield ranks[part::parts]


def _may_be_stacked(secondary: Secondary) -> bool:
    bottom = secondary.bottom
    plain = secondary.learns_plainly and secondary.device.type == "cpu"
    return plain and isinstance(bottom, StackableBottom)


class Stack:
    """Some secondaries in one round: their representations, and then their gradients."""

    def __init__(
        self, members: Sequence[tuple[Secondary, Mapping[str, nn.Parameter]]], plan: RoundPlan
    ) -> None:
        """Make it; ``members`` come with their weights by name."""
        self._members = [member for member, _ in members]
        self._weights = [weights for _, weights in members]
        self._plan = plan
        self._representations: Sequence[Tensor] = ()
        self._stacked: dict[str, Tensor] = {}
        self._terms: dict[int, Tensor] = {}
        self._gradients: Sequence[Tensor | None] = ()

    def representation(self, place: int) -> CutRows:
        """Return one secondary's; all are computed when the first one is asked for."""
        if not self._representations:
            self._representations = self._compute()
        return self._representations[place]

    def _compute(self) -> Sequence[CutRows]:
        training = self._plan.wants_gradient
        model = self._members[0].bottom
        model.train(training)
        with torch.no_grad():
            self._stacked = {
                name: torch.stack([weights[name] for weights in self._weights])
                for name in self._weights[0]
            }
        for weight in self._stacked.values():
            weight.requires_grad_(training)
        linked = [member.linked_records(self._plan.rows) for member in self._members]
        features, keys, present = (
            torch.stack([getattr(one, name) for one in linked])
            for name in ("features", "keys", "present")
        )

        def one(weights: dict[str, Tensor], *inputs: Tensor) -> Tensor:
            with computing_in(self._members[0].precision, features.device):
                return widened(functional_call(model, weights, inputs))

        streams = [member.dropout for member in self._members]
        generators = [stream.generator() for stream in streams]
        with drawing_apart(generators), torch.set_grad_enabled(training):
            found = vmap(one)(self._stacked, features, keys, present).unbind()
        for stream, generator in zip(streams, generators, strict=True):
            stream.state = generator.get_state()
        return found

    def expect(self, place: int, term: CutRows) -> None:
        """Take one secondary's term of the aggregate, on the autograd graph."""
        self._terms[place] = term

    def teach(self, place: int, gradient: CutRows) -> None:
        """Set one secondary's gradients; all are computed when the first one learns.

        Args:
            place: Whose.
            gradient: Of the loss, with respect to a term of the aggregate; the same for all.
        """
        if not self._gradients:
            with torch.enable_grad():
                ends = [handed(term, gradient) for term in self._terms.values()]
            weights = list(self._stacked.values())
            # With one link there is nothing to choose, and what attention chooses by is not used.
            found = torch.autograd.grad(ends, weights, allow_unused=True)
            # Fused optimizers take it for granted that a gradient lies in memory as its parameter.
            self._gradients = [None if one is None else one.contiguous() for one in found]
            self._terms = {}
        parameters = self._weights[place].values()
        for parameter, gradients in zip(parameters, self._gradients, strict=True):
            parameter.grad = None if gradients is None else gradients[place]


@dataclass(frozen=True, eq=False)
class Member:
    """One secondary's part in a stack; a ``StackedPart`` of rounds/secondary.py."""

    stack: Stack
    place: int

    def representation(self) -> CutRows:
        """Return the secondary's representation of the round."""
        return self.stack.representation(self.place)

    def lesson(self, term: CutRows) -> "Member":
        """Return what waits for the gradient of the secondary's term."""
        self.stack.expect(self.place, term)
        return self

    def gradients_from(self, gradient: CutRows) -> None:
        """Set the gradients of the secondary's bottom model."""
        self.stack.teach(self.place, gradient)


# All parties in one process: the same arithmetic as between processes, no cryptography.


class SimulatedExchange(RoundExchange):
    """Rounds with secondaries of the same process, on CPU or GPU."""

    def __init__(
        self,
        secondaries: Mapping[int, Secondary],
        cut: CutLayer,
        *,
        end_epoch: Mapping[int, Callable[[EpochMark], None]] = MappingProxyType({}),
        links: int = 0,
    ) -> None:
        """Make it.

        Args:
            secondaries: By rank.
            cut: The format of what crosses it.
            end_epoch: Saves what an epoch's mark says, by rank; nothing where there is none.
            links: K, links of a row, by which small secondaries are computed together; with 0 each
                works alone.
        """
        self.secondaries = dict(secondaries)
        if links:
            stacks = Stacks(self.secondaries, links=links)
            for rank, one in self.secondaries.items():
                one.stacked_in = partial(stacks.share, rank)
        handlers = {
            rank: one.handlers(end_epoch.get(rank, save_nothing))
            for rank, one in self.secondaries.items()
        }
        device = next(iter(self.secondaries.values())).device
        super().__init__(PeersHere(handlers), cut, device=device)
