"""When training ends for want of a better epoch."""

from types import SimpleNamespace

import pytest

from securevfl.config.sections import TrainingSettings
from securevfl.federation.network_primary import NetworkPrimary
from securevfl.models.tasks import TaskHead


@pytest.mark.parametrize("base", [0.9, None], ids=["a base above", "no base"])
def test_patience_counts_from_the_best_epoch_of_the_networks_own(base: float | None) -> None:
    """A network below its base that still gets better goes on; one that does not ends."""
    primary = object.__new__(NetworkPrimary)
    primary.head = TaskHead(task="multiclass", num_classes=3)
    primary.training = TrainingSettings(patience=2)
    primary.plan = SimpleNamespace(config=SimpleNamespace(epochs=20))
    primary.best_metric, primary.since = 0.9, 0
    primary.history = [] if base is None else [{"epoch": 0, "validation": base}]
    ended = []
    for epoch, validation in enumerate((0.5, 0.4, 0.6, 0.7, 0.65, 0.7), 1):
        primary.epoch = epoch
        primary.history.append({"epoch": epoch, "validation": validation})
        ended.append(primary.finished)
    assert ended == [False, False, False, False, False, True]
