"""A secondary at work: it answers rounds and learns from gradients, wherever it runs."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int32
from torch import Tensor, nn

from securevfl.core.errors import ProtocolError
from securevfl.federation.distinct import represent_distinct
from securevfl.federation.dropout_stream import DropoutStream
from securevfl.federation.release import Contribution, require_finite
from securevfl.federation.rounds import RoundPlan
from securevfl.federation.updates import (
    GradientNoise,
    Lesson,
    LinkedRecords,
    PlainLesson,
    PrivateLesson,
)
from securevfl.linkage.sources import LinkSource


class Secondary:
    """One secondary's bottom model, features and links.

    The simulator and a party's own process run this same class, so that they cannot differ.
    """

    def __init__(
        self,
        *,
        name: str,
        features: Float[Tensor, "records features"],
        keys: Float[Tensor, "records dimension"],
        links: LinkSource,
        primary_rows: int,
        bottom: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        contribution: Contribution,
        dropout: DropoutStream,
        prepare: Callable[[], None] | None = None,
        gradient_noise: GradientNoise | None = None,
    ) -> None:
        self.name = name
        self.features = features
        self.keys = keys
        self.bottom = bottom
        self.optimizer = optimizer
        self.contribution = contribution
        self.dropout = dropout
        self.gradient_noise = gradient_noise
        """What protects each update, if the encoder is dp-trained."""
        self.links = links
        self.primary_rows = primary_rows
        self._pending: tuple[RoundPlan, Lesson] | None = None
        self._prepare = prepare
        self.epsilon_spent = 0.0

    def answer(self, plan: RoundPlan) -> Int32[Tensor, "batch positions width"]:
        """Return this round's contribution in ring units; it is charged first.

        Raises:
            ProtocolError: If the primary names rows that it never announced.
            PrivacyError: If the budget or the promise forbids the release.

        Reveals:
            Nothing by itself; what is made of the returned units is said at
            :class:`mpc.sum_to.SumTo`.
        """
        if plan.rows.min() < 0 or plan.rows.max() >= self.primary_rows:
            raise ProtocolError(
                f"round {plan.round_number}: the primary asks for rows outside the "
                f"{self.primary_rows} whose keys it sent"
            )
        if self._prepare is not None:
            # Here and not before: a resumed run may ask for no release, and then fits nothing.
            self._prepare()
            self._prepare = None
        self.epsilon_spent = self.contribution.charge(plan)
        training = plan.wants_gradient and self.optimizer is not None
        self.bottom.train(training)
        lesson: Lesson
        if training and self.gradient_noise is not None:
            clipped, lesson = self._private_lesson(plan.rows, self.gradient_noise)
        else:
            with self.dropout.active(), torch.set_grad_enabled(training):
                clipped = self.contribution.clip(self._represent(plan.rows))
            lesson = PlainLesson(self.contribution.term(clipped), self.dropout)
        require_finite("the representation", clipped, round_number=plan.round_number)
        self._pending = (plan, lesson) if training else None
        return self.contribution.units(clipped)

    def learn(self, plan: RoundPlan, gradient: Float[Tensor, "batch positions width"]) -> None:
        """Take one optimizer step from the gradient of the aggregate.

        Raises:
            ProtocolError: If no release of that round waits for a gradient.
        """
        if self.optimizer is None:
            return
        if self._pending is None or self._pending[0].round_number != plan.round_number:
            raise ProtocolError(f"round {plan.round_number}: a gradient came without a release")
        lesson = self._pending[1]
        self._pending = None
        require_finite("the gradient", gradient, round_number=plan.round_number)
        self.optimizer.zero_grad()
        # The aggregate is an average, and this party one of its terms.
        lesson.gradients_from(gradient / len(plan.active))
        self.optimizer.step()

    def _links_of(self, rows: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the linked records' numbers, 0 in empty slots, and which slots hold a record."""
        index = torch.as_tensor(self.links.link(rows).indices, device=self.features.device)
        present = index >= 0
        return index.clamp_min(0), present

    def _represent(self, rows: npt.NDArray[np.int64]) -> Tensor:
        index, present = self._links_of(rows)
        if self.bottom.recordwise:
            return represent_distinct(self.bottom, self.features, self.keys, index, present)
        out: Tensor = self.bottom(self.features[index], self.keys[index], present)
        return out

    def _private_lesson(
        self, rows: npt.NDArray[np.int64], noise: GradientNoise
    ) -> tuple[Tensor, PrivateLesson]:
        index, present = self._links_of(rows)
        records = LinkedRecords(
            features=self.features[index], keys=self.keys[index], present=present
        )
        lesson = PrivateLesson(
            self.bottom,
            records,
            clip_norm=self.contribution.clip_norm,
            noise=noise,
            stream=self.dropout,
        )
        # Piece by piece, as the lesson goes through them: the same units are dropped.
        with self.dropout.active(), torch.no_grad():
            found = [
                self.bottom(piece.features, piece.keys, piece.present) for piece in lesson.pieces
            ]
            return self.contribution.clip(torch.cat(found)), lesson

    def close(self) -> None:
        """Stop what works ahead in the background."""
        self.contribution.close()

    def position_weights(self) -> dict[str, Tensor]:
        """Return the positional-encoding weights that parties average."""
        return position_weights(self.bottom)

    def load_position_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take the averaged positional-encoding weights."""
        load_positions(self.bottom, weights)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {
            "bottom": self.bottom.state_dict(),
            "optimizer": self.optimizer.state_dict() if self.optimizer else {},
            "dropout": self.dropout.state,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint's state."""
        self.bottom.load_state_dict(state["bottom"])
        if self.optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
        self.dropout.state = state["dropout"]

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the bottom model's weights, to keep as the best ones."""
        return {name: value.detach().clone() for name, value in self.bottom.state_dict().items()}


def position_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the positional-encoding weights of a bottom or top model."""
    positions = model.get_submodule("positions")
    return {name: value.detach() for name, value in positions.named_parameters()}


def load_positions(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy averaged positional-encoding weights into a bottom or top model."""
    with torch.no_grad():
        for name, parameter in model.get_submodule("positions").named_parameters():
            parameter.copy_(weights[name].to(parameter))
