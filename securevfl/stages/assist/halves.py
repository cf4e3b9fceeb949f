"""Both halves of the network: a secondary's models, and the number that scales their sum.

B = rows of a batch, F = features, D = key dimension.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models import family
from securevfl.stages.assist.local_models import (
    inputs_of,
    pack_models,
    predict_scores,
    unpack_models,
    within_ball,
)
from securevfl.stages.assist.settings import AssistConfig


class AssistBottom(nn.Module):
    """A secondary's models of all rounds so far; a row's score is their mean, weighted by steps.

    Every model's score is scaled down to the unit ball, and so is their mean: predictions are
    clipped no more than in training. A row without records scores zero.
    """

    recordwise = False

    def __init__(self, config: AssistConfig) -> None:
        super().__init__()
        self.config = config
        self.positions = nn.Identity()
        self._models: list[Any] = []
        self._steps: list[float] = []

    def add(self, model: Any, step: float) -> None:
        """Add a round's model, with the primary's step."""
        self._models.append(model)
        self._steps.append(step)

    def forward(
        self, features: family.RecordFeatures, keys: family.RecordKeys, present: family.Present
    ) -> Float[Tensor, "batch one outputs"]:
        """Return the scores of a batch."""
        linked = present.any(dim=1).cpu().numpy()
        scores = np.zeros((len(linked), self.config.outputs), dtype=np.float32)
        total = sum(self._steps)
        if total and linked.any():
            inputs = self.inputs(features, keys, present)[linked]
            for model, step in zip(self._models, self._steps, strict=True):
                predictions = predict_scores(model, inputs, outputs=self.config.outputs)
                scores[linked] += step / total * within_ball(predictions)
        return torch.from_numpy(scores).unsqueeze(1).to(features.device)

    def inputs(
        self, features: family.RecordFeatures, keys: family.RecordKeys, present: family.Present
    ) -> Float[np.ndarray, "batch columns"]:
        """Return the models' inputs for a batch."""
        records = torch.cat([features, keys], dim=2) if self.config.keys_as_features else features
        return inputs_of(records.cpu().numpy(), present.cpu().numpy())

    def get_extra_state(self) -> Tensor:
        """Return models and steps as bytes, so that they are saved like weights."""
        blob = pack_models([self._steps, self._models])
        return torch.from_numpy(np.frombuffer(blob, dtype=np.uint8).copy())

    def set_extra_state(self, state: Tensor) -> None:
        """Restore a state from :meth:`get_extra_state`.

        Raises:
            RuntimeError: If it is not such a state, as :meth:`load_state_dict` raises.
        """
        try:
            steps, models = unpack_models(state.cpu().numpy().tobytes())
            if len(steps) != len(models):
                raise ValueError("a step is missing")
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        self._steps, self._models = list(steps), list(models)


class AssistTop(nn.Module):
    """Top model: a constant plus the secondaries' average times a scale; not trained."""

    of_base = 1.0

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.positions = nn.Identity()
        self.start = nn.Parameter(torch.zeros(outputs), requires_grad=False)
        """Margin of a row without links."""
        self.scale = nn.Parameter(torch.zeros(()), requires_grad=False)
        """Sum of the steps of all rounds."""

    def forward(
        self,
        features: family.RowFeatures,
        keys: family.RowKeys,
        aggregate: family.Aggregate,
        similarities: family.Similarities,
    ) -> Float[Tensor, "batch outputs"]:
        """Return the margins of a batch."""
        return self.start + self.scale * aggregate[:, 0]
