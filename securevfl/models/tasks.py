"""What a task asks of a model: how many outputs, which loss, which metric, which way is better."""

from dataclasses import dataclass

from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.task import Task
from securevfl.models.task_metrics import accuracy, auc, rmse

_METRIC_NAMES = {"regression": "rmse", "binary": "auc", "multiclass": "accuracy"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskHead:
    """Loss and metric of one task.

    Targets are float32 for a regression (standardised) and for a binary task (0 or 1), and int64
    class numbers for a multiclass task; always of shape (rows,).
    """

    task: Task
    """What the label is."""

    num_classes: int = 1
    """Classes of a multiclass task; unused otherwise."""

    label_deviation: float = 1.0
    """What a regression's labels were divided by; RMSE is given in the labels' own units."""

    def __post_init__(self) -> None:
        checks.one_of(_METRIC_NAMES, task=self.task)
        checks.positive(label_deviation=self.label_deviation)
        if self.task == "multiclass" and not self.num_classes >= 2:
            raise ConfigError(f"num_classes must be at least 2, got {self.num_classes!r}")

    @property
    def outputs(self) -> int:
        """Width of a model's output: classes, or one."""
        return self.num_classes if self.task == "multiclass" else 1

    @property
    def metric_name(self) -> str:
        """Name of the metric: ``rmse``, ``auc`` or ``accuracy``."""
        return _METRIC_NAMES[self.task]

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger metric is a better one."""
        return self.task != "regression"

    def is_better(self, metric: float, than: float) -> bool:
        """Return whether ``metric`` is strictly better; NaN never is."""
        return metric > than if self.higher_is_better else metric < than

    def loss(
        self, outputs: Float[Tensor, "rows outputs"], targets: Shaped[Tensor, " rows"]
    ) -> Float[Tensor, ""]:
        """Return the mean loss: squared error, or cross-entropy in nats."""
        if self.task == "regression":
            return functional.mse_loss(outputs[:, 0], targets)
        if self.task == "binary":
            return functional.binary_cross_entropy_with_logits(outputs[:, 0], targets)
        return functional.cross_entropy(outputs, targets)

    def metric(
        self, outputs: Float[Tensor, "rows outputs"], targets: Shaped[Tensor, " rows"]
    ) -> float:
        """Return the task's metric over all rows given.

        Raises:
            DataError: If there is no row, or only one class where AUC needs both.
        """
        if len(targets) == 0:
            raise DataError(f"{self.metric_name} needs at least one row, got none")
        if self.task == "regression":
            return rmse(outputs, targets) * self.label_deviation
        return auc(outputs, targets) if self.task == "binary" else accuracy(outputs, targets)

    def probabilities(
        self, outputs: Float[Tensor, "rows outputs"]
    ) -> Float[Tensor, "rows columns"]:
        """Return probabilities of the classes; a regression has none.

        Raises:
            ConfigError: For a regression.
        """
        if self.task == "regression":
            raise ConfigError("task: a regression has no class probabilities")
        return outputs.sigmoid() if self.task == "binary" else outputs.softmax(dim=1)
