"""The losses of SimSiam, BYOL and MoCo.

B = rows of a batch, P = width of a projection, Q = negatives in a queue. Targets carry no gradient.
"""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from securevfl.models.fedhssl.settings import Algorithm

# As in torch's normalize: a vector of zeros has no direction, and stays.
_SHORTEST: Final = 1e-12


def unit(vectors: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
    """Return the vectors at length 1."""
    return functional.normalize(vectors, dim=1, eps=_SHORTEST)


def simsiam_loss(
    predicted: Float[Tensor, "rows width"], target: Float[Tensor, "rows width"]
) -> Float[Tensor, ""]:
    """Return the mean negative cosine between predictions and targets.

    Linear in ``target``: for the mean of several parties' unit vectors it is the mean of their
    losses, and so is its gradient.

    Args:
        predicted: p, of any length.
        target: Unit vectors, or averages of unit vectors.

    References:
        [FedHSSL] Equation 4.
    """
    # Divided after the product: a gradient through B numbers instead of through B P of them.
    length = torch.linalg.vector_norm(predicted, dim=1).clamp_min(_SHORTEST)
    return -(torch.linalg.vecdot(predicted, target) / length).mean()


def byol_loss(
    predicted: Float[Tensor, "rows width"], target: Float[Tensor, "rows width"]
) -> Float[Tensor, ""]:
    """Return the mean of ``2 - 2 cos``; linear in ``target`` as :func:`simsiam_loss` is.

    References:
        [FedHSSL] Equation 3, second line.
    """
    return 2 + 2 * simsiam_loss(predicted, target)


def moco_loss(
    predicted: Float[Tensor, "rows width"],
    target: Float[Tensor, "rows width"],
    *,
    negatives: Float[Tensor, "queue width"],
    temperature: float,
) -> Float[Tensor, ""]:
    """Return InfoNCE: each row's own target among the queue's negatives.

    Not linear in ``target``: the loss of an average is not the average of losses.

    Args:
        predicted: z, of any length.
        target: Unit vectors, or averages of unit vectors.
        negatives: The queue.
        temperature: Softmax temperature, > 0.

    References:
        [FedHSSL] Equation 2, with the temperature of appendix B-A.
    """
    query = unit(predicted)
    positive = torch.linalg.vecdot(query, target).unsqueeze(1)
    logits = torch.cat([positive, query @ negatives.T], dim=1) / temperature
    return functional.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.int64))


class NegativeQueue:
    """The last targets of one kind: first in, first out, in place.

    Other kinds have queues of their own. Negatives of another distribution are told apart by it
    and teach nothing; in the published code, cross-party vectors end up in the local queue.
    """

    def __init__(self, size: int, width: int, *, generator: torch.Generator) -> None:
        # As in [MoCo], random directions until there are real ones.
        self.vectors = unit(torch.randn(size, width, generator=generator))
        self._next = 0

    def to(self, device: torch.device) -> None:
        """Move to a device."""
        self.vectors = self.vectors.to(device)

    def push(self, targets: Float[Tensor, "rows width"]) -> None:
        """Replace the oldest vectors."""
        size = len(self.vectors)
        targets = targets[-size:]
        places = torch.arange(self._next, self._next + len(targets), device=targets.device) % size
        self.vectors[places] = targets
        self._next = (self._next + len(targets)) % size

    def state(self) -> dict[str, Tensor | int]:
        """Return what a checkpoint needs."""
        return {"vectors": self.vectors, "next": self._next}

    def load_state(self, state: dict[str, Tensor | int]) -> None:
        """Go back to a checkpoint's state."""
        vectors, following = state["vectors"], state["next"]
        assert isinstance(vectors, Tensor)
        assert isinstance(following, int)
        self.vectors, self._next = vectors.to(self.vectors.device), following


class Objective:
    """One algorithm's loss against one kind of targets."""

    def __init__(
        self, algorithm: Algorithm, *, temperature: float, queue: NegativeQueue | None
    ) -> None:
        assert (algorithm == "moco") == (queue is not None), "moco alone has negatives"
        self.algorithm = algorithm
        self.temperature = temperature
        self.queue = queue

    def __call__(
        self,
        predicted: Float[Tensor, "rows width"],
        targets: Sequence[Float[Tensor, "rows width"]],
    ) -> Float[Tensor, ""]:
        """Return the mean loss over several targets of the same rows.

        References:
            [FedHSSL] Equation 5, first case.
        """
        losses = [self._loss(predicted, target) for target in targets]
        return torch.stack(losses).mean()

    def remember(self, targets: Sequence[Float[Tensor, "rows width"]]) -> None:
        """Keep targets as negatives of later rows."""
        if self.queue is not None:
            for target in targets:
                self.queue.push(target)

    def _loss(self, predicted: Tensor, target: Tensor) -> Tensor:
        if self.queue is not None:
            return moco_loss(
                predicted, target, negatives=self.queue.vectors, temperature=self.temperature
            )
        loss = simsiam_loss if self.algorithm == "simsiam" else byol_loss
        return loss(predicted, target)
