"""The two halves of assisted boosting: a secondary's models, and the number that scales their sum.

B = rows of a batch, K = links of a row, F = features, D = key dimension, O = outputs.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from securevfl.models.assist.assist_config import AssistConfig
from securevfl.models.assist.local import inputs_of, packed, predicted, unpacked, within_ball


class AssistBottom(nn.Module):
    """A secondary's models of all rounds so far; a row's score is their mean, weighted by steps.

    Every model's score is kept within the unit ball, and so their mean is too: what a prediction
    releases never meets a clip that training did not meet. Which records a row has is all that it
    reads of the links, and a row without any scores zero.
    """

    recordwise = False

    def __init__(self, config: AssistConfig) -> None:
        super().__init__()
        self.config = config
        self.positions = nn.Identity()
        self._models: list[Any] = []
        self._steps: list[float] = []

    def add(self, model: Any, step: float) -> None:
        """Take a round's model in, with the primary's step."""
        self._models.append(model)
        self._steps.append(step)

    def forward(
        self,
        features: Float[Tensor, "batch links features"],
        keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch one outputs"]:
        """Return the scores of a batch."""
        linked = present.any(dim=1).cpu().numpy()
        scores = np.zeros((len(linked), self.config.outputs), dtype=np.float32)
        total = sum(self._steps)
        if total and linked.any():
            inputs = self.inputs(features, keys, present)[linked]
            for model, step in zip(self._models, self._steps, strict=True):
                found = predicted(model, inputs, outputs=self.config.outputs)
                scores[linked] += step / total * within_ball(found)
        return torch.from_numpy(scores).unsqueeze(1).to(features.device)

    def inputs(
        self,
        features: Float[Tensor, "batch links features"],
        keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[np.ndarray, "batch columns"]:
        """Return what the models read of a batch."""
        records = torch.cat([features, keys], dim=2) if self.config.keys_as_features else features
        return inputs_of(records.cpu().numpy(), present.cpu().numpy())

    def get_extra_state(self) -> Tensor:
        """Return models and steps as bytes, so that they are kept like any other weights."""
        blob = packed([self._steps, self._models])
        return torch.from_numpy(np.frombuffer(blob, dtype=np.uint8).copy())

    def set_extra_state(self, state: Tensor) -> None:
        """Go back to what :meth:`get_extra_state` returned.

        Raises:
            RuntimeError: If it is something else, as :meth:`load_state_dict` raises.
        """
        try:
            steps, models = unpacked(state.cpu().numpy().tobytes())
            if len(steps) != len(models):
                raise ValueError("a step is missing")
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        self._steps, self._models = list(steps), list(models)


class AssistTop(nn.Module):
    """The primary's half: where it starts from, and the secondaries' average times one number.

    Nothing of it is trained by gradients.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.positions = nn.Identity()
        self.start = nn.Parameter(torch.zeros(outputs), requires_grad=False)
        """Margin of a row of which nothing is known."""
        self.scale = nn.Parameter(torch.zeros(()), requires_grad=False)
        """Steps of all rounds together, in units of the average."""

    def forward(
        self,
        features: Float[Tensor, "batch features"],  # noqa: ARG002
        keys: Float[Tensor, "batch dimension"],  # noqa: ARG002
        aggregate: Float[Tensor, "batch one outputs"],
        similarities: Float[Tensor, "batch secondaries links"] | None,  # noqa: ARG002
    ) -> Float[Tensor, "batch outputs"]:
        """Return the margins of a batch."""
        return self.start + self.scale * aggregate[:, 0]
