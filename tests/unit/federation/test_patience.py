"""When training ends for want of a better epoch."""

from types import SimpleNamespace

import pytest

from securevfl.config.sections import TrainingSettings
from securevfl.federation.rounds.network_primary import NetworkPrimary
from securevfl.federation.rounds.primary import last_gain
from securevfl.models.tasks import TaskHead

ERROR = TaskHead(task="regression")


@pytest.mark.parametrize("base", [0.9, None], ids=["a base above", "no base"])
def test_patience_counts_from_the_best_epoch_of_the_networks_own(base: float | None) -> None:
    """A network below its base that still gets better goes on; one that does not ends."""
    primary = object.__new__(NetworkPrimary)
    primary.head = TaskHead(task="multiclass", num_classes=3)
    primary.training = TrainingSettings(patience=2)
    primary.plan = SimpleNamespace(config=SimpleNamespace(training=SimpleNamespace(epochs=20)))
    primary.best_metric = 0.9
    primary.history = [] if base is None else [{"epoch": 0, "validation": base}]
    ended = []
    for epoch, validation in enumerate((0.5, 0.4, 0.6, 0.7, 0.65, 0.7), 1):
        primary.epoch = epoch
        primary.history.append({"epoch": epoch, "validation": validation})
        ended.append(primary.is_finished)
    assert ended == [False, False, False, False, False, True]


def lines(*epochs: tuple[float, float]) -> list[dict[str, float]]:
    base = {"epoch": 0, "validation": 5.0}
    return [base] + [
        {"epoch": number, "validation": weighed, "by_itself": alone}
        for number, (weighed, alone) in enumerate(epochs, 1)
    ]


@pytest.mark.parametrize(
    ("epochs", "gained"),
    [
        # Weight 0 beside the base for as long as it learns: nothing else improves.
        ([(5.0, 9.0), (5.0, 8.0), (5.0, 7.0)], 3),
        # It has learned all, and the mean of both is still getting better.
        ([(4.0, 7.0), (3.9, 7.1), (3.8, 7.2)], 3),
        ([(4.0, 7.0), (4.1, 7.1), (4.2, 7.2)], 1),
    ],
)
def test_an_epoch_gains_weighed_or_by_itself(
    epochs: list[tuple[float, float]], gained: int
) -> None:
    """Less is better; a network that is below its base may still be learning."""
    assert last_gain(ERROR, lines(*epochs)) == gained
