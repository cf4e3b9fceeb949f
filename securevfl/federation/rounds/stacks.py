"""Small secondaries of one process, computed together.

A step of a small model takes the time in which its operations are called, not the time in which
they compute. A simulation of many such secondaries therefore stacks their weights and their links,
and computes all with one call of each operation. What is charged, clipped, noised and learned
stays each secondary's own: see :meth:`securevfl.federation.rounds.secondary.Secondary.hear_round`.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import pad

from securevfl.core.devices import computing_in, widen_floats
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.cut import CutRows
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.rounds.updates import lost_of, surrogate_loss
from securevfl.models.cuda_graphs import Replays
from securevfl.models.family import StackableBottom
from securevfl.models.layers import drawing_apart

LARGEST: Final = 2**20
"""Numbers of the widest layer, over the links of all secondaries that are computed at once."""

LARGEST_ON_A_GPU: Final = 2**26
"""The same where memory is the limit, and not a core's cache: 256 MiB a layer."""

FEWEST: Final = 4
"""Secondaries that a CPU computes at once; fewer are as quick by themselves."""


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
            rank: dict(secondary.bottom.named_parameters())
            for rank, secondary in secondaries.items()
            if _may_be_stacked(secondary)
        }
        self._shapes = {rank: self._shape_of(rank) for rank in self._weights}
        self._networks: dict[tuple[int, ...], StackedNetwork] = {}
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
                stack = Stack(self._network_of(tuple(some)), plan)
                shares |= {rank: Member(stack, place) for place, rank in enumerate(some)}
        return shares

    def _network_of(self, ranks: tuple[int, ...]) -> "StackedNetwork":
        if ranks not in self._networks:
            members = [(self._secondaries[rank], self._weights[rank]) for rank in ranks]
            self._networks[ranks] = StackedNetwork(members)
        return self._networks[ranks]

    def _shape_of(self, rank: int) -> Hashable:
        """Return what members of a stack share, in addition to the federation's settings."""
        bottom = self._secondaries[rank].bottom
        assert isinstance(bottom, StackableBottom), "chosen for it"
        weights = self._weights[rank].items()
        return type(bottom), *(
            (name, weight.shape[:1] if name == bottom.features_weight else weight.shape)
            for name, weight in weights
        )

    def _at_once(self, ranks: Sequence[int], *, rows: int) -> Iterator[Sequence[int]]:
        links = rows * self._links
        members = [self._secondaries[rank] for rank in ranks]
        on_cpu = members[0].device.type == "cpu"
        few_records = min(len(member.data.keys) for member in members) < links
        if on_cpu and members[0].bottom.recordwise and few_records:
            # Alone, such a model computes each record once, which is less than every link.
            return
        weights = self._weights[ranks[0]].values()
        widest = max(len(weight) for weight in weights if weight.dim() > 1)
        most = (LARGEST if on_cpu else LARGEST_ON_A_GPU) // (links * widest)
        parts = -(-len(ranks) // most) if most else len(ranks)
        # A GPU is launched for as many kernels by one secondary as by all.
        if len(ranks) // parts < (FEWEST if on_cpu else 2):
            return
        for part in range(parts):
            yield ranks[part::parts]


def _may_be_stacked(secondary: Secondary) -> bool:
    return secondary.learns_plainly and isinstance(secondary.bottom, StackableBottom)


class StackedNetwork:
    """One network with the weights of several secondaries, in memory that stays where it is.

    Tables may differ in their number of features: the narrower ones get columns of zeros, and
    zeros for the weights of these.
    """

    def __init__(self, members: Sequence[tuple[Secondary, Mapping[str, nn.Parameter]]]) -> None:
        """Make it; ``members`` come with their weights by name."""
        self.members = [member for member, _ in members]
        self._weights = [weights for _, weights in members]
        bottom = self.members[0].bottom
        assert isinstance(bottom, StackableBottom), "chosen for it"
        self._reads = bottom.features_weight
        self._features = [member.data.features.shape[1] for member in self.members]
        self._widest = max(self._features)
        self._stacked: dict[str, Tensor] = {}
        self._own: list[Tensor] = []
        """Members' weights, and in :attr:`_places` where they are copied to."""
        self._places: list[Tensor] = []
        for name in self._weights[0]:
            weights = [of_member[name].detach() for of_member in self._weights]
            widest = max((weight.shape for weight in weights), key=torch.Size.numel)
            stacked = weights[0].new_zeros(len(weights), *widest)
            for place, weight in enumerate(weights):
                self._own += self._without_padding(weight, name, place)
                self._places += self._without_padding(stacked[place], name, place)
            self._stacked[name] = stacked.requires_grad_()
        self._flat = torch.empty(0)
        """All gradients, a row for each member, and in :attr:`_gradients` its views by name."""
        self._gradients: list[dict[str, Tensor]] = [{} for _ in members]
        self._replays = Replays(self._compute, name=f"{len(members)} x {type(bottom).__name__}")

    def _without_padding(self, weight: Tensor, name: str, place: int) -> list[Tensor]:
        """Return a member's weight, or its gradient, in parts without the columns of zeros."""
        own = self._features[place]
        if name != self._reads or own == self._widest:
            return [weight]
        after = self._weights[place][name].shape[1] - own
        return [weight[:, :own], weight[:, weight.shape[1] - after :]]

    def represent(self, plan: RoundPlan) -> Sequence[CutRows]:
        """Return every member's representation, on the autograd graph in a training round."""
        training = plan.wants_gradient
        if self.members[0].bottom.training != training:
            self.members[0].bottom.train(training)
        with torch.no_grad():
            torch._foreach_copy_(self._places, self._own)
        linked = [member.linked_records(plan.rows) for member in self.members]
        features = [
            pad(records.features, (0, self._widest - records.features.shape[2]))
            for records in linked
        ]
        inputs = [
            torch.stack(features),
            torch.stack([records.keys for records in linked]),
            torch.stack([records.present for records in linked]),
        ]
        with self._dropping(), torch.set_grad_enabled(training):
            return self._replays(inputs, list(self._stacked.values())).unbind()

    def _compute(self, features: Tensor, keys: Tensor, present: Tensor, *stacked: Tensor) -> Tensor:
        first = self.members[0]

        def one(weights: dict[str, Tensor], *inputs: Tensor) -> Tensor:
            with computing_in(first.precision, features.device):
                return widen_floats(functional_call(first.bottom, weights, inputs))

        weights = dict(zip(self._stacked, stacked, strict=True))
        outputs: Tensor = vmap(one, randomness="different")(weights, features, keys, present)
        return outputs

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Draw dropped units from each member's stream; on a GPU all from the first one's."""
        streams = [member.dropout for member in self.members]
        if self.members[0].device.type == "cuda":
            with streams[0].active():
                yield
            return
        generators = [stream.generator() for stream in streams]
        with drawing_apart(generators):
            yield
        for stream, generator in zip(streams, generators, strict=True):
            stream.state = generator.get_state()

    def set_gradients(self, ends: Sequence[Tensor], *, zero_lost: bool) -> Sequence[Tensor]:
        """Set ``grad`` of all members' weights; return for each whether a number is not finite.

        Args:
            ends: Numbers whose sum is differentiated.
            zero_lost: Whether such a member's gradients become zero.
        """
        # With one link there is nothing to choose, and what attention chooses by is not used.
        gradients = torch.autograd.grad(ends, list(self._stacked.values()), allow_unused=True)
        known = {
            name: gradient
            for name, gradient in zip(self._stacked, gradients, strict=True)
            if gradient is not None
        }
        if self._gradients[0].keys() != known.keys():
            self._make_room(known)
        torch.cat([gradient.flatten(1) for gradient in known.values()], 1, out=self._flat)
        rows = self._flat.unbind()
        lost = [lost_of([row], device=row.device) for row in rows]
        if zero_lost:
            self._flat.masked_fill_(torch.stack(lost).bool().unsqueeze(1), 0.0)
        for place, weights in enumerate(self._weights):
            for name, parameter in weights.items():
                gradient = self._gradients[place].get(name)
                if gradient is not None and gradient.shape != parameter.shape:
                    gradient = torch.cat(self._without_padding(gradient, name, place), dim=1)
                parameter.grad = gradient
        return lost

    def _make_room(self, gradients: Mapping[str, Tensor]) -> None:
        """Make :attr:`_flat` for such gradients, in which one operation serves all weights."""
        sizes = [gradient[0].numel() for gradient in gradients.values()]
        self._flat = torch.empty(len(self.members), sum(sizes), device=self.members[0].device)
        self._gradients = [
            {
                name: part.view(gradient.shape[1:])
                for (name, gradient), part in zip(gradients.items(), row.split(sizes), strict=True)
            }
            for row in self._flat.unbind()
        ]


class Stack:
    """Some secondaries in one round: their representations, and then their gradients."""

    def __init__(self, network: StackedNetwork, plan: RoundPlan) -> None:
        """Make it."""
        self._network = network
        self._plan = plan
        self._representations: Sequence[Tensor] = ()
        self._terms: dict[int, Tensor] = {}
        self._lost: Sequence[Tensor] = ()

    def representation(self, place: int) -> CutRows:
        """Return one secondary's; all are computed when the first one is asked for."""
        if not self._representations:
            self._representations = self._network.represent(self._plan)
        return self._representations[place]

    def expect(self, place: int, term: CutRows) -> None:
        """Take one secondary's term of the aggregate, on the autograd graph."""
        self._terms[place] = term

    def teach(self, place: int, gradient: CutRows, *, zero_lost: bool) -> Tensor:
        """Set all secondaries' gradients when the first one learns; return if one's are not finite.

        Args:
            place: Whose.
            gradient: Of the loss, with respect to a term of the aggregate; the same for all.
            zero_lost: Whether gradients that are not finite become zero.
        """
        if not self._lost:
            with torch.enable_grad():
                ends = [surrogate_loss(term, gradient) for term in self._terms.values()]
            self._lost = self._network.set_gradients(ends, zero_lost=zero_lost)
            self._terms = {}
        return self._lost[place]


@dataclass(frozen=True, eq=False)
class Member:
    """One secondary's part in a stack; a ``StackedPart`` of rounds/secondary.py."""

    stack: Stack
    place: int

    def represent(self) -> CutRows:
        """Return the secondary's representation of the round."""
        return self.stack.representation(self.place)

    def backward_step(self, term: CutRows) -> "Member":
        """Return what waits for the gradient of the secondary's term."""
        self.stack.expect(self.place, term)
        return self

    def gradients_from(self, gradient: CutRows, *, zero_lost: bool = False) -> Tensor:
        """Set the gradients of the secondary's bottom model."""
        return self.stack.teach(self.place, gradient, zero_lost=zero_lost)
