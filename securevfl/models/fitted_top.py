"""An estimator of scikit-learn in the place of a top network: fitted, not trained by rounds.

B = rows of a batch, N = the primary's own numbers, L and H = shape of the cut, S = secondaries,
K = links of a row, O = outputs.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from securevfl.core.errors import ConfigError
from securevfl.models.alone.keeping import model_bytes, model_of
from securevfl.models.alone.margins import MarginModel, OwnInputs
from securevfl.models.tasks import TaskHead


class FittedTop(nn.Module):
    """A :class:`securevfl.models.split.Top` that has no weights to learn: margins of an estimator.

    Its ``features`` are all of the primary's own numbers, unscaled, and its ``keys`` none. Its
    state holds the estimator as bytes (:mod:`securevfl.models.alone.keeping`), so that it is
    saved, hashed and loaded as weights are, without running code.
    """

    def __init__(
        self,
        head: TaskHead,
        *,
        words: tuple[tuple[int, ...], ...],
        own: int,
        released: int,
        similarities: int,
    ) -> None:
        """Make one that is not fitted.

        Args:
            head: The task.
            words: Which of the primary's numbers are one column of words, as of
                :class:`OwnInputs`.
            own: N.
            released: L times H.
            similarities: S times K where links' similarities are inputs too, else 0.
        """
        super().__init__()
        self.positions = nn.Identity()
        self.head = head
        self.words = words
        self.model: MarginModel | None = None
        self.filling: Tensor
        inputs = own + released + similarities
        self.register_buffer("filling", torch.zeros(inputs, dtype=torch.float64))

    def inputs(
        self,
        features: Float[Tensor, "batch own"],
        aggregate: Float[Tensor, "batch positions width"],
        similarities: Float[Tensor, "batch secondaries links"] | None,
    ) -> Float64[np.ndarray, "batch inputs"]:
        """Return one row of numbers for each row; NaN where one is not known."""
        parts = [features, aggregate, *([] if similarities is None else [similarities])]
        joined = torch.cat([part.flatten(1).double() for part in parts], dim=1)
        return joined.cpu().numpy()

    def known(self, values: Float64[np.ndarray, "rows inputs"]) -> OwnInputs:
        """Return rows of numbers as the estimator takes them: a gap gets the mean of training."""
        filling = np.broadcast_to(self.filling.cpu().numpy(), values.shape)
        return OwnInputs(values=np.where(np.isnan(values), filling, values), words=self.words)

    def fill_gaps_by(self, values: Float64[np.ndarray, "rows inputs"]) -> None:
        """Take the mean of each number over the rows that have it; 0 where none has."""
        there = ~np.isnan(values)
        totals = np.where(there, values, 0.0).sum(axis=0)
        means = torch.from_numpy(totals / np.maximum(there.sum(axis=0), 1))
        self.filling.copy_(means)

    def forward(
        self,
        features: Float[Tensor, "batch own"],
        keys: Float[Tensor, "batch 0"],  # noqa: ARG002
        aggregate: Float[Tensor, "batch positions width"],
        similarities: Float[Tensor, "batch secondaries links"] | None,
    ) -> Float[Tensor, "batch outputs"]:
        """Return the margins of a batch."""
        assert self.model is not None, "fitted before it is asked"
        known = self.known(self.inputs(features, aggregate, similarities))
        return torch.from_numpy(self.model.margins(known)).to(aggregate.device)

    def get_extra_state(self) -> Tensor:
        """Return the estimator as bytes, and what must be known to read them; for torch."""
        content, about = b"", dict[str, Any]()
        if self.model is not None:
            content, about = model_bytes(self.model)
        whole = json.dumps({**about, "words": self.words}).encode() + b"\n" + content
        return torch.frombuffer(bytearray(whole), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Take an estimator back; for torch.

        Raises:
            ConfigError: If it is damaged, or holds types that are not scikit-learn's.
        """
        head, _, content = state.cpu().numpy().tobytes().partition(b"\n")
        try:
            about: Mapping[str, Any] = json.loads(head)
            self.words = tuple(tuple(group) for group in about["words"])
            model = model_of(content, about, self.head) if content else None
        except ConfigError:
            raise
        except Exception as error:
            # skops raises whatever an estimator's own loading does.
            raise ConfigError("model.top: the estimator that was kept is damaged") from error
        assert model is None or isinstance(model, MarginModel), "kept from here"
        self.model = model
