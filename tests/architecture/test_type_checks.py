"""While tests run, calls in the package have their types checked, and shapes of their arrays."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.type_checks import FIRST_CALLS, begin_test
from jaxtyping import TypeCheckError

from securevfl.core import checks
from securevfl.dp.accountant import epsilon_of
from securevfl.federation.messages import EpochMark
from securevfl.models.alone.choice import mix_outputs
from securevfl.models.tasks import TaskHead
from securevfl.stages.pretraining.learning import even_batches


def test_arguments_results_and_fields_of_a_wrong_type_are_refused() -> None:
    with pytest.raises(TypeError, match="violates type hint"):
        checks.positive(rows="many")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="violates type hint"):
        epsilon_of("none", delta=0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="violates type hint"):
        EpochMark(epoch="first", best=True)  # type: ignore[arg-type]


def test_arrays_of_a_wrong_kind_or_shape_are_refused() -> None:
    head, whole = TaskHead(task="regression", num_classes=1), torch.zeros(3, 1, dtype=torch.int64)
    assert head.loss(torch.zeros(3, 1), torch.zeros(3)) == 0
    with pytest.raises(TypeCheckError):
        head.loss(torch.zeros(3), torch.zeros(3))
    with pytest.raises(TypeCheckError):
        head.loss(torch.zeros(3, 1), torch.zeros(4))
    with pytest.raises(TypeCheckError):
        mix_outputs(whole, whole, 1.0)
    with pytest.raises(TypeCheckError):
        even_batches(np.arange(3), batch_size="2")  # type: ignore[arg-type]


def test_of_a_function_on_arrays_the_first_calls_in_a_file_are_checked() -> None:
    whole = torch.zeros(3, 1, dtype=torch.int64)
    for file in (Path("one"), Path("another")):
        begin_test(file)
        for _ in range(FIRST_CALLS):
            with pytest.raises(TypeCheckError):
                mix_outputs(whole, whole, 1.0)
        mix_outputs(whole, whole, 1.0)
        begin_test(file)  # another test of the same file
        mix_outputs(whole, whole, 1.0)
