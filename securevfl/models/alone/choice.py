"""The best model that the primary has without partners, chosen on validation rows.

Three candidates see all that the primary has (:class:`OwnInputs`): a linear model, boosted trees
and a perceptron. What a federation is worth is what it adds to the best of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped

from securevfl.models.alone.margins import MarginModel, OwnInputs, fit_margins
from securevfl.models.alone.network import NetworkModel, fit_network
from securevfl.models.baselines.baseline_config import BaselineConfig
from securevfl.models.tasks import Metrics, TaskHead

CONSTANT: Final = "constant"
"""The one candidate of a primary without a number of its own: the mean, or the classes' shares."""

Model = MarginModel | NetworkModel
"""A candidate, read as margins."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One model of the primary alone."""

    model: Model
    validation: Metrics
    """Every metric of the validation rows."""
    threshold: float
    """Of a binary task, as the validation rows chose it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Alone:
    """The primary alone: its candidates, and which of them validates best."""

    head: TaskHead
    candidates: Mapping[str, Candidate]
    """By name, the simplest first: ``linear``, ``boosting`` and ``network``, or ``constant``."""
    chosen: str

    @property
    def best(self) -> Candidate:
        """The chosen candidate."""
        return self.candidates[self.chosen]

    @property
    def epochs(self) -> int:
        """Epochs that the network was trained for; 1 where there is no network."""
        network = self.candidates.get("network")
        return network.model.epochs if network and isinstance(network.model, NetworkModel) else 1

    def margins(self, inputs: OwnInputs) -> Float32[np.ndarray, "rows outputs"]:
        """Return what the head reads of the chosen model.

        Nothing here is out of fold: rows that it was fitted to look better than they are.
        """
        return self.best.model.margins(inputs)

    def measured(
        self, inputs: OwnInputs, targets: Shaped[np.ndarray, " rows"]
    ) -> dict[str, Metrics]:
        """Return every metric of labelled rows, by candidate.

        Args:
            inputs: The rows.
            targets: Their labels, as the head takes them.

        Raises:
            DataError: If the metric that training goes by is not defined for these labels.
        """
        known = torch.from_numpy(targets)
        return {
            name: self.head.metrics(
                torch.from_numpy(one.model.margins(inputs)), known, threshold=one.threshold
            )
            for name, one in self.candidates.items()
        }


def fit_alone(
    inputs: OwnInputs,
    targets: Shaped[np.ndarray, " rows"],
    head: TaskHead,
    *,
    train: Int64[np.ndarray, " train"],
    validation: Int64[np.ndarray, " validation"],
    seed: int,
    network: BaselineConfig | None = None,
    fitted: Mapping[str, MarginModel] | None = None,
) -> Alone:
    """Fit every candidate to the training rows, and choose by the validation rows.

    No other row is looked at. Of equals the simplest is chosen.

    Args:
        inputs: All rows.
        targets: Their labels as the head takes them.
        head: The task; its metric chooses.
        train: Rows to learn from.
        validation: Rows that choose: the model, the network's epoch, thresholds.
        seed: Run seed.
        network: The perceptron and its training; default: :class:`BaselineConfig`.
        fitted: Candidates that were fitted to these training rows before, by name; another name
            is one more candidate.

    Raises:
        DataError: If there are no training or validation rows, or the metric is not defined for
            one of them.
    """
    known = torch.from_numpy(targets[validation])
    shown = inputs.take(validation)
    candidates: dict[str, Candidate] = {}
    names = dict.fromkeys(("linear", "boosting", "network", *(fitted or ())))
    for name in names if inputs.values.shape[1] else (CONSTANT,):
        model: Model
        if fitted is not None and name in fitted:
            model = fitted[name]
        elif name == "network":
            model = fit_network(
                inputs,
                targets,
                head,
                train=train,
                validation=validation,
                seed=seed,
                config=network or BaselineConfig(),
            )
        else:
            model = fit_margins(name, inputs.take(train), targets[train], head, seed=seed)
        outputs = torch.from_numpy(model.margins(shown))
        threshold = head.choose_threshold(outputs, known)
        candidates[name] = Candidate(
            model=model,
            validation=head.metrics(outputs, known, threshold=threshold),
            threshold=threshold,
        )
    chosen, *others = candidates
    for name in others:
        if head.is_better(
            head.headline(candidates[name].validation), head.headline(candidates[chosen].validation)
        ):
            chosen = name
    return Alone(head=head, candidates=candidates, chosen=chosen)
