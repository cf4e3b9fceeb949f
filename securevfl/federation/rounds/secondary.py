"""A secondary at work: it answers rounds and learns from gradients, wherever it runs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.core import devices
from securevfl.core.errors import ProtocolError
from securevfl.federation.checkpoint import Checkpoints
from securevfl.federation.messages import AverageRequest, EpochMark, Gradient, Mean, RoundPlan
from securevfl.federation.rounds import cut, own_records, updates
from securevfl.federation.rounds.cached_release import CachedRelease
from securevfl.federation.rounds.release import SecondaryRelease, refuse_lost, require_finite
from securevfl.federation.session.peers import Handler, Handlers, Next, Reply, StageEnd, shapes_of
from securevfl.federation.session.request_validator import RequestValidator
from securevfl.linkage.sampling import LinkSource
from securevfl.models.building import Forward
from securevfl.models.building import row_by_row as each_row
from securevfl.models.cuda_graphs import Network
from securevfl.models.family import DistinctBottom, Stackable
from securevfl.models.fet.positions import load_positions, position_weights
from securevfl.models.optimisers import PacedOptimizer
from securevfl.mpc import codec
from securevfl.mpc.codec import encode_weighted
from securevfl.transport.message import Done


@dataclass(frozen=True, kw_only=True, eq=False)
class SecondaryData:
    """A secondary's table as tensors, and its links."""

    name: str
    """The party's name."""

    features: Float[Tensor, "records features"]
    keys: Float[Tensor, "records dimension"]
    links: LinkSource
    """Source of each primary row's linked records."""

    primary_rows: int
    """How many rows the primary has announced."""


@runtime_checkable
class StackedPart(Protocol):
    """A secondary's part in a round that several of one process compute together."""

    def represent(self) -> cut.CutRows:
        """Return its representation, which the ledger has charged."""
        ...

    def backward_step(self, term: cut.CutRows) -> updates.BackwardStep:
        """Return what waits for the gradient of its term of the aggregate."""
        ...


Log = Callable[..., None]


def save_nothing(_mark: EpochMark) -> None:
    """Save nothing at an epoch's end: where no model trains, there is nothing to save."""


def log_nothing(_event: str, **_fields: object) -> None:
    """Keep no log: where nothing leaves the process, or ledgers are enough."""


@dataclass(eq=False)
class Secondary:
    """One secondary's bottom model at work on its records.

    The simulator and a party's own process run this same class, so that they cannot differ.
    """

    data: SecondaryData
    bottom: nn.Module
    """Its half of the split network."""
    contribution: SecondaryRelease
    """Protects and books what leaves."""
    _: KW_ONLY
    validator: RequestValidator
    """Validator of what the primary may ask for in this session."""
    dropout: updates.DropoutStream
    optimizer: PacedOptimizer | None = None
    """Optimizer of :attr:`bottom`; None for an encoder that does not learn from gradients."""
    gradient_noise: updates.GradientNoise | None = None
    """Protection of each update, if the encoder is dp-trained."""
    kept: CachedRelease | None = None
    """A frozen encoder's cached release: what it rests on, and its last answers."""
    row_by_row: bool = False
    """True if :attr:`bottom` sees each row alone: a module that is not the package's own may not
    mix rows where something is promised."""
    precision: devices.Precision = "float32"
    """Precision in which :attr:`bottom` computes."""
    log: Log = log_nothing
    """The party's."""

    stacked_in: Callable[[RoundPlan], StackedPart | None] | None = field(default=None, init=False)
    """Returns its part in a stack of secondaries of the same process, which then computes the
    bottom model for it."""
    overheard: Callable[[Handlers], Handlers] | None = field(default=None, init=False)
    """Returns handlers that record what they handle, where this party records what it receives."""
    epsilon_spent: float = field(default=0.0, init=False)
    _pending: tuple[RoundPlan, updates.BackwardStep] | None = field(default=None, init=False)
    _share: StackedPart | None = field(default=None, init=False)
    """Its part in the stack of the round that is under way; None where it computes alone."""
    _row_gradients: updates.RowGradients | None = field(default=None, init=False)
    """Row gradients of the last release, until its backward step takes them."""
    _network: Network | None = field(default=None, init=False)
    _settled: bool = field(default=False, init=False)
    _unread: devices.DeviceReads = field(default_factory=devices.DeviceReads, init=False)
    """Checks of the last step that its device has not been asked for."""

    @property
    def name(self) -> str:
        """The party's name."""
        return self.data.name

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.data.features.device

    def _captured_network(self) -> Network | None:
        """Return the bottom model as a GPU replays it; None for one that cannot be captured."""
        if self._network is not None and self._network.module is self.bottom:
            return self._network
        replayed = not self.row_by_row and isinstance(self.bottom, Stackable)
        self._network = Network(self.bottom, self.precision) if replayed else None
        return self._network

    def learn(self, plan: RoundPlan, gradient: cut.CutRows) -> None:
        """Take one optimizer step from the gradient of the aggregate.

        What a GPU finds wrong in the step is raised when the next round is asked for, or at the
        end of the epoch: before anything else leaves.

        Raises:
            ProtocolError: If no release of that round waits for a gradient.
        """
        if self.optimizer is None:
            return
        if self._pending is None or self._pending[0].round_number != plan.round_number:
            raise ProtocolError(f"round {plan.round_number}: a gradient came without a release")
        step = self._pending[1]
        self._pending = None
        require_finite("the gradient", gradient, round_number=plan.round_number)
        with self._unread.gathering():
            promised = self.contribution.promised
            # The aggregate is an average, and this party one of its terms.
            term = devices.to_device(gradient, self.device) / len(plan.active)
            # Behind noise every gradient is finite. A trained encoder's may not be, where a record
            # is not; with a promise it counts as zero, since stopping would tell everybody.
            lost = step.gradients_from(term, zero_lost=promised)
            stop = refuse_lost("the bottom model's gradient", plan.round_number)
            devices.reads().add(lost, self.contribution.count if promised else stop)
            self.optimizer.step(epoch=self.validator.epoch)

    def handlers(self, end_epoch: Callable[[EpochMark], None]) -> Handlers:
        """Return what it does with each message type of a run that trains.

        Args:
            end_epoch: Saves what an epoch's end asks for.
        """

        def end(mark: EpochMark, _reply: Reply) -> None:
            self.validator.validate_epoch(mark)
            self._unread.host()
            end_epoch(mark)

        def done(_done: Done, _reply: Reply) -> Next:
            self.validator.validate_done()
            return StageEnd

        handlers = {
            **self.round_handlers,
            AverageRequest: Handler(self._add_positions),
            Mean: Handler(
                self._load_positions,
                lambda: {"shapes": shapes_of(position_weights(self.bottom))},
                follows=True,
            ),
            EpochMark: Handler(end),
            Done: Handler(done),
        }
        return handlers if self.overheard is None else self.overheard(handlers)

    @property
    def round_handlers(self) -> Handlers:
        """What it does with the two message types of rounds."""
        return {
            RoundPlan: Handler(self.hear_round),
            Gradient: Handler(
                self.hear_gradient,
                lambda: {"shape": (len(self._due.rows), *self._cut.shape)},
                follows=True,
            ),
        }

    def hear_round(self, plan: RoundPlan, reply: Reply) -> Next:
        """Answer a round with words of the sum, charged first; of training the gradient follows.

        Raises:
            ProtocolError: If the round is not due; see
            :class:`securevfl.federation.session.request_validator.RequestValidator`.
            PrivacyError: If the budget or the promise forbids the release.

        Reveals:
            To the primary: the words, in the sum of all active secondaries.
        """
        number = plan.round_number
        with devices.read_together():
            self.validator.validate_round(plan)
            devices.reads().take(self._unread)
            reply.prepare(self._cut.words(len(plan.rows)), round_number=number)
            words = None if self.kept is None else self.kept.again(plan.rows)
            if words is None:
                optimizer = self._begin_round(plan)
                learns = optimizer is not None and self.gradient_noise is None
                released = self.contribution.release(plan, self.represent, learns=learns)
                words, self.epsilon_spent = released.words, released.epsilon
                if self.kept is not None:
                    self.kept.keep_answer(plan.rows, *devices.reads().host(words))
                self._pending = None
                if optimizer is not None:
                    self._pending = plan, self._backward_step(released.clipped, optimizer)
                self._share = None
            elif self.kept is not None:
                self.epsilon_spent = self.kept.epsilon_spent
            reply.add(words, round_number=number)
        self.log(
            "released",
            round_number=number,
            rows=len(plan.rows),
            purpose=plan.purpose,
            epsilon=self.epsilon_spent,
            not_finite=self.not_finite,
        )
        if self._pending is not None:
            return Gradient
        return StageEnd if self.validator.has_predicted else None

    def hear_gradient(self, received: Gradient, _reply: Reply) -> None:
        """Learn from the gradient of the round that was just answered."""
        self.learn(self._due, torch.from_numpy(received.gradient))

    @property
    def _cut(self) -> cut.CutLayer:
        return self.contribution.aggregation.cut

    @property
    def _due(self) -> RoundPlan:
        """The round that waits for its gradient."""
        if self._pending is None:
            raise ProtocolError("a gradient came without a release")
        return self._pending[0]

    @property
    def not_finite(self) -> int:
        """Rows, records and steps that counted as zero since they were not finite."""
        steps = 0 if self.gradient_noise is None else self.gradient_noise.not_finite
        return self.contribution.not_finite + steps

    def _links_of(self, rows: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the linked records' numbers, 0 in empty slots, and which slots hold a record.

        Both are on the host: how many different records there are sizes what a device computes.
        """
        links = self.data.links.link(self.contribution.first_rows(rows))
        index = torch.from_numpy(links.indices)
        present = index >= 0
        return index.clamp_min(0), present

    def linked_records(self, rows: npt.NDArray[np.int64]) -> updates.LinkedRecords:
        """Return what the bottom model is given for a batch of the primary's rows."""
        return own_records.gather_records(self.data.features, self.data.keys, *self._links_of(rows))

    def _begin_round(self, plan: RoundPlan) -> PacedOptimizer | None:
        """Make the bottom model ready for a round; return its optimizer if it learns from it."""
        if self.kept is not None and not self._settled:
            # Here and not before: a resumed run may ask for no release, and then fits nothing.
            self.kept.settle()
            self._settled = True
        optimizer = self.optimizer if plan.wants_gradient else None
        if self.bottom.training != (optimizer is not None):
            self.bottom.train(optimizer is not None)
        self._share = None if self.stacked_in is None else self.stacked_in(plan)
        return optimizer

    def represent(self, plan: RoundPlan) -> Tensor:
        """Return the bottom model's representation of a round's rows, which the ledger has charged.

        It is on the autograd graph where the model learns from the round by a plain step.
        """
        if self._share is not None:
            return self._share.represent()
        learns = plan.wants_gradient and self.optimizer is not None
        index, present = self._links_of(plan.rows)
        features, keys, bottom = self.data.features, self.data.keys, self.bottom
        if learns and self.gradient_noise is not None:
            self._row_gradients = updates.RowGradients(
                bottom,
                own_records.gather_records(features, keys, index, present),
                forward=self._forward,
                clip_norm=self.contribution.aggregation.clip_norm,
                noise=self.gradient_noise,
                stream=self.dropout,
                precision=self.precision,
            )
            return self._row_gradients.represent()
        network = self._captured_network()
        # A promise needs each link computed in a place of its own: how many records a batch links
        # to is the size of a matrix product, which may decide the last bits of every row of it; and
        # one record more or less must leave other rows as they are. What a GPU replays is as large
        # in every round, too.
        promised = self.gradient_noise is not None or self.contribution.promised
        apart = promised or (network is not None and features.is_cuda)
        in_precision = devices.computing_in(self.precision, self.device)
        with self.dropout.active(), torch.set_grad_enabled(learns), in_precision:
            if not apart and bottom.recordwise:
                vectors = own_records.represent_distinct(
                    self._forward, features, keys, index, present
                )
            elif not apart and isinstance(bottom, DistinctBottom) and not self.row_by_row:
                vectors = own_records.represent_linked(bottom, features, keys, index, present)
            else:
                linked = own_records.gather_records(features, keys, index, present)
                forward = network or self._forward
                vectors = forward(linked.features, linked.keys, linked.present)
                if self.contribution.scores is not None:
                    vectors = vectors.masked_fill(~linked.present.unsqueeze(-1), math.nan)
            return devices.widen_floats(vectors)

    @property
    def _forward(self) -> Forward:
        """The bottom model as it is evaluated."""
        return each_row(self.bottom) if self.row_by_row else self.bottom

    def term_without_noise(self, rows: npt.NDArray[np.int64]) -> cut.CutRows:
        """Return its clipped term for rows of no training round, as it would leave without noise.

        Reveals:
            Nothing: no promise covers it, so it goes nowhere but into the party's own folder.
        """
        plan = RoundPlan(round_number=0, rows=rows, active=(), purpose="test")
        self.bottom.eval()
        with torch.no_grad():
            aggregation = self.contribution.aggregation
            finite, _ = aggregation.finite(self.represent(plan))
            units = aggregation.units(aggregation.clip(finite), bounded=False)
        return codec.to_float(units, self._cut.ring, divisor=self._cut.slots).cpu()

    def _backward_step(self, clipped: Tensor, optimizer: PacedOptimizer) -> updates.BackwardStep:
        """Return what waits for the gradient of a round's clipped representation."""
        if self._row_gradients is not None:
            gradients, self._row_gradients = self._row_gradients, None
            return updates.PrivateBackwardStep(self.bottom, gradients.total, gradients.noise)
        with torch.enable_grad():
            term = self.contribution.aggregation.term(clipped)
            if self._share is not None:
                return self._share.backward_step(term)
        return updates.PlainBackwardStep(term, self.dropout, optimizer.parameters)

    @property
    def learns_plainly(self) -> bool:
        """Whether it learns by steps of whole batches, without noise."""
        return self.optimizer is not None and self.gradient_noise is None and not self.row_by_row

    def close(self) -> None:
        """Stop what works ahead in the background."""
        self.contribution.close()

    def _add_positions(self, request: AverageRequest, reply: Reply) -> Next:
        """Answer with the words of the positional-encoding weights, which parties average."""
        number = request.round_number
        self.validator.validate_average(number)
        parties = len(self.validator.limits.ranks) + 1
        words = encode_weighted(position_weights(self.bottom), weight=1, parties=parties)
        reply.add(words, round_number=number)
        return Mean

    def _load_positions(self, mean: Mean, _reply: Reply) -> None:
        """Take the averaged positional-encoding weights."""
        weights = {
            name: torch.from_numpy(value).to(self.device) for name, value in mean.values.items()
        }
        load_positions(self.bottom, weights)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {
            "bottom": self.bottom.state_dict(),
            "optimizer": self.optimizer.state_dict() if self.optimizer else {},
            "dropout": self.dropout.state,
        }

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state, after so many epochs.

        Raises:
            ProtocolError: If the run has not so many.
        """
        self.validator.start_after(epoch)
        self.bottom.load_state_dict(state["bottom"])
        if self.optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
        self.dropout.state = state["dropout"]

    def final_weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights that the run's releases were made with."""
        if self.kept is not None and not self._settled:
            # A resumed session that was asked for no release has not gone back to its encoder.
            self.kept.restore()
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the bottom model's weights, to keep as the best ones."""
        return {name: value.detach().clone() for name, value in self.bottom.state_dict().items()}


@dataclass(frozen=True)
class EpochSaver:
    """Saves a secondary's epochs, and brings the best one back."""

    secondary: Secondary
    checkpoints: Checkpoints

    def __call__(self, mark: EpochMark) -> None:
        """Do what the mark says."""
        checkpoints, secondary = self.checkpoints, self.secondary
        if mark.restore_best:
            checkpoints.load_best(mark.epoch, secondary.bottom.load_state_dict)
            return
        if mark.best:
            checkpoints.save_best(mark.epoch, secondary.weights())
            checkpoints.best = mark.epoch
        checkpoints.save(mark.epoch, secondary.state())
