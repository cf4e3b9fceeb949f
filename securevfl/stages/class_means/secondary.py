"""A secondary's part in class means: its sums of records by class, and the fit of its encoder."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64

from securevfl.core.errors import ProtocolError
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.peers import Handler, Handlers, Reply
from securevfl.federation.stage import StageAtSecondary
from securevfl.mpc import dealt_sums
from securevfl.stages.class_means.class_labels import bins_of, keep_of
from securevfl.stages.class_means.fitting import ClassMeansFitting
from securevfl.stages.class_means.messages import (
    ClassMeansCall,
    ClassMeansDone,
    ClassMeansKind,
    ClassMeansLabels,
    ClassMeansMasked,
    ClassMeansNoise,
    ClassMeansSeed,
    ClassMeansShifted,
    ClassMeansState,
    ClassMeansSums,
)
from securevfl.stages.class_means.policy import hides_labels
from securevfl.transport.channels import Channels, Kinds, receive_from
from securevfl.transport.message import StarKind, TypedMessage

AT_SECONDARY: Final[Kinds] = (
    ClassMeansKind.CLASS_MEANS_SEED,
    ClassMeansKind.CLASS_MEANS_SHIFTED,
    ClassMeansKind.CLASS_MEANS_SUMS,
    StarKind.SEALED,
)


@dataclass(eq=False)
class MaskedLines:
    """A secondary's way to the primary, and to the dealer of its masks."""

    channels: Channels
    dealer: str
    """The dealer's name."""


@dataclass(eq=False)
class ClassMeansSecondary(StageAtSecondary):
    """A secondary's part: answer the primary's call, once in a session."""

    plan: RunPlan
    """The run, whose encoders are class means."""
    fitting: ClassMeansFitting
    """Adds up this party's records, and fits its encoder."""
    lines: MaskedLines | None = None
    """Way of class sums under masks; None where labels are sent, and in one process."""
    _called: bool = field(default=False, init=False)
    _due: type[TypedMessage] | None = field(default=None, init=False)
    """Message that the fit waits for."""

    @property
    def beside_rounds(self) -> Handlers:
        """Handlers of the call, and of what the primary sends after it."""
        bins = bins_of(self.plan.config)
        sizes = {"rows": self.plan.facts.rows, "bins": bins}
        shape = {"bins": bins, "numbers": self.fitting.format.shape[1]}
        handlers: dict[type[TypedMessage], Handler] = {ClassMeansCall: Handler(self._call)}
        if not hides_labels(self.plan.config):
            handlers[ClassMeansLabels] = Handler(self._fit_to_labels, lambda: sizes, to_all=False)
        elif self.lines is None:
            handlers[ClassMeansShifted] = Handler(self._add_up, lambda: sizes, to_all=False)
            handlers[ClassMeansSums] = Handler(self._fit_to_sums, lambda: shape, to_all=False)
        return handlers

    def _call(self, _call: ClassMeansCall, reply: Reply) -> None:
        """Say whether the encoder is fitted; between processes, go on under masks.

        Raises:
            BudgetExceededError: If the budget forbids it; nothing was sent then.
            PrivacyError: If class sums of this run left before and what came of them was lost.
            ProtocolError: If the primary calls twice, or a party leaves the protocol or fails.

        Reveals:
            To the primary: whether the encoder is fitted, and how many numbers class sums have;
            with ``labels = "shares"`` the class sums behind this party's noise, each row in the one
            class that the primary says.
        """
        if self._called:
            raise ProtocolError("the primary calls for class means twice in one session")
        self._called = True
        fitting = self.fitting
        state = ClassMeansState(settled=fitting.encoder_fixed, numbers=fitting.format.shape[1])
        reply.send(state)
        if state.settled:
            return
        if self.lines is not None:
            fitting.finish(self._sums_under_masks(self.lines.channels, self.lines.dealer))
            reply.send(ClassMeansDone())
            return
        self._due = ClassMeansShifted if hides_labels(self.plan.config) else ClassMeansLabels

    def _fit_to_labels(self, labels: ClassMeansLabels, reply: Reply) -> None:
        """Fit the encoder to noised class sums by the labels that the primary sends."""
        self._require_due(labels)
        self.fitting.begin(leaves=False)
        keep = keep_of(self.plan.config)
        self.fitting.finish(self.fitting.by_labels(labels.bins_of_rows, keep=keep))
        reply.send(ClassMeansDone())

    def _add_up(self, shifted: ClassMeansShifted, reply: Reply) -> None:
        """Answer with class sums behind noise, in one process, where nothing is shifted."""
        self._require_due(shifted)
        fitting = self.fitting
        fitting.begin(leaves=True)
        sums = fitting.format.by_bins(fitting.vectors(), shifted.said) + fitting.noise()
        self._due = ClassMeansSums
        reply.add(torch.from_numpy(sums).flatten(), round_number=0)

    def _fit_to_sums(self, answer: ClassMeansSums, reply: Reply) -> None:
        """Fit the encoder to class sums with both parties' noise."""
        self._require_due(answer)
        self.fitting.finish(answer.sums.astype(np.float64))
        reply.send(ClassMeansDone())

    def _require_due(self, message: TypedMessage) -> None:
        due, self._due = self._due, None
        if type(message) is not due:
            raise ProtocolError(f"{message.KIND.name}: no class means wait for it")

    def _sums_under_masks(
        self, lines: Channels, dealer: str
    ) -> Float64[np.ndarray, "bins numbers"]:
        """Return class sums with both parties' noise, as the primary sends them back."""
        plan, fitting = self.plan, self.fitting
        primary, rows, bins = plan.config.primary.name, plan.facts.rows, bins_of(plan.config)
        shifted_bins = receive_from(lines, primary, ClassMeansShifted, rows=rows, bins=bins).said
        what = dealt_sums.DealtFor(
            run=plan.facts.run,
            secondary=plan.ranks[fitting.name],
            rows=rows,
            bins=bins,
            numbers=fitting.format.shape[1],
        )
        message = lines.receive(dealer, ClassMeansKind.CLASS_MEANS_SEED)
        seed = ClassMeansSeed.from_message(message, what=what).seed
        fitting.begin(leaves=True)
        pieces = dealt_sums.mask_vectors(fitting.vectors(), shifted_bins, seed, what)
        noise = ClassMeansNoise(words=dealt_sums.masked_noise(fitting.noise(), seed, what))
        lines.send(noise.to_message(), primary)
        for words in pieces:
            lines.send(ClassMeansMasked(words=words).to_message(), primary)
        answer = receive_from(lines, primary, ClassMeansSums, bins=bins, numbers=what.numbers)
        return answer.sums.astype(np.float64)
