"""What a family's learner does in self-supervised pretraining; every party has one of its own."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from securevfl.models.fedhssl.settings import PretrainingSettings

Step = Literal["cross", "local", "aggregate"]
"""A step of pretraining: parties learn from one another's projections, each learns from its own
records, weights are averaged."""


@runtime_checkable
class Learner(Protocol):
    """Pretrains one party's encoders; what other parties send comes in as plain tensors."""

    @property
    def settings(self) -> PretrainingSettings:
        """The ``[pretraining]`` table."""
        ...

    def begin_iteration(self, iteration: int) -> None:
        """Get ready for an iteration, counted from 0."""
        ...

    def project(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows width"]:
        """Return projections of aligned records, for others; step ``cross``.

        Others learn from their directions. The width is ``settings.projection_width``.
        """
        ...

    def learn_cross(self, targets: list[Float[Tensor, "rows width"]]) -> Float[Tensor, ""]:
        """Learn from others' unit vectors for the rows of the last :meth:`project`.

        Returns:
            The loss before the first update.
        """
        ...

    def learn_local(
        self, features: Float[Tensor, "rows features"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "views width"]]:
        """Learn from the party's own records; step ``local``.

        Returns:
            The loss, and the targets, whose spread tells of collapse.
        """
        ...

    def shared_weights(self) -> dict[str, Tensor]:
        """Return what parties average; step ``aggregate``."""
        ...

    def load_shared(self, weights: Mapping[str, Tensor]) -> None:
        """Take what parties averaged."""
        ...

    def encoders(self) -> dict[str, dict[str, Tensor]]:
        """Return a copy of the encoders' weights by name: what fine-tuning starts from."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs: tensors, numbers, text, and lists and dicts of them."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint's state."""
        ...
