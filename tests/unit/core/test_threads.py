"""How many threads compute."""

from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits  # type: ignore[import-untyped]

from securevfl.core.devices import CELLS_A_THREAD, few_threads
from securevfl.models.alone import choice
from securevfl.models.alone.margins import BaselineConfig, OwnInputs, fit_margins
from securevfl.models.tasks import TaskHead


def threads() -> set[int]:
    """Return the numbers of threads of all libraries."""
    return {pool["num_threads"] for pool in threadpool_info()} | {torch.get_num_threads()}


def test_small_tables_take_one_thread_and_large_ones_no_more_than_there_were() -> None:
    before = torch.get_num_threads()
    try:
        with threadpool_limits(4):
            torch.set_num_threads(4)
            with few_threads(CELLS_A_THREAD - 1):
                assert threads() == {1}
            assert max(threads()) == 4
            with few_threads(2 * CELLS_A_THREAD):
                assert max(threads()) == 3
            with few_threads(100 * CELLS_A_THREAD):
                assert max(threads()) == 4
    finally:
        torch.set_num_threads(before)


def test_the_local_baseline_of_a_small_table_is_fitted_by_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 25,000 rows, threads that wait for each other took twenty times the CPU time."""
    seen = set()

    def noted(*arguments: Any, **options: Any) -> Any:
        seen.update(threads())
        return fit_margins(*arguments, **options)

    monkeypatch.setattr(choice, "fit_margins", noted)
    before = torch.get_num_threads()
    random = np.random.default_rng(0)
    try:
        with threadpool_limits(4):
            torch.set_num_threads(4)
            choice.fit_alone(
                OwnInputs(values=random.normal(size=(60, 2))),
                random.normal(size=60).astype(np.float32),
                TaskHead(task="regression", label_deviation=1.0),
                train=np.arange(40),
                validation=np.arange(40, 60),
                seed=0,
                network=BaselineConfig(hidden=(4,), epochs=1),
            )
    finally:
        torch.set_num_threads(before)
    assert seen == {1}
