"""Tensors and datasets of torch where frames are taken, with column names that say where from."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import securevfl as sv
from securevfl.core.errors import DataError
from securevfl.data.frames import as_pandas

X = torch.arange(6.0).reshape(3, 2)


class Items(Dataset[Any]):
    """A map-style dataset of given items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


class Stream(IterableDataset[Tensor]):
    """Items without numbers."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (X, {"x0": [0, 2, 4], "x1": [1, 3, 5]}),
        (torch.arange(3), {"x0": [0, 1, 2]}),
        (X.reshape(3, 1, 2).bfloat16().requires_grad_(), {"x0": [0, 2, 4], "x1": [1, 3, 5]}),
        (TensorDataset(X), {"x0": [0, 2, 4], "x1": [1, 3, 5]}),
        (
            TensorDataset(X, torch.tensor([[1], [0], [1]])),
            {"x0": [0, 2, 4], "x1": [1, 3, 5], "y": [1, 0, 1]},
        ),
        (Items(*X), {"x0": [0, 2, 4], "x1": [1, 3, 5]}),
        (Items((X[0], 1), (X[1], 0)), {"x0": [0, 2], "x1": [1, 3], "y": [1, 0]}),
        (Items((X[0].numpy(), "no"), (X[1].numpy(), "yes")), {"x0": [0, 2], "y": ["no", "yes"]}),
        (
            Items({"id": "a", "at": X[0], "age": X[0, 0]}, {"id": "b", "at": X[1], "age": X[1, 0]}),
            {"id": ["a", "b"], "at0": [0, 2], "at1": [1, 3], "age": [0, 2]},
        ),
    ],
)
def test_columns_are_named_by_their_place(rows: Any, columns: dict[str, list[Any]]) -> None:
    frame = as_pandas(rows, where="table")
    assert {name: frame[name].tolist() for name in columns} == columns
    assert as_pandas(rows, where="table", numbered=True)["row"].tolist() == list(range(len(frame)))


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (Stream(), r"must be a map-style dataset, with len\(\) and \[i\]"),
        (Items(), "has no rows"),
        (Items((X[0], 1), (X[1],)), "items must all have 2 parts"),
        (Items({"a": 1}, {"b": 1}), "items must all have the names a"),
        (Items((X[0], 1), (X, 1)), "'x' must have one shape in all rows"),
        (TensorDataset(X, X, X), "items must be features, or features and a label, got 3 parts"),
        (torch.tensor(1.0), r"'x' must be real numbers or words, .* of shape \(\)"),
        (X.to(torch.complex64), "'x' must be real numbers or words, .* got complex64"),
        (Items(({1, 2}, 1), ({3}, 0)), "'x0'"),
        ([[1.0]], "a tensor or map-style dataset of torch, got list"),
    ],
)
def test_others_are_refused_in_one_line(rows: Any, text: str) -> None:
    with pytest.raises(DataError, match=text) as refused:
        sv.data.from_frame(rows, name="bank", key="row")
    assert str(refused.value).startswith("frame of 'bank': ")
    assert "\n" not in str(refused.value)


def test_tensors_are_the_tables_of_a_run_and_of_its_predictions() -> None:
    """Equal to the same tables as frames; rows in one order are linked by their numbers."""
    random = torch.Generator().manual_seed(0)
    own, theirs = torch.randn(120, 2, generator=random), torch.randn(120, 3, generator=random)
    label = theirs[:, 1] > 0
    given: dict[str, Any] = {
        "label": "y",
        "key": "row",
        "model": sv.models.Top1Sim(hidden=4),
        "privacy": sv.dp.Privacy(mechanism="none"),
        "training": sv.TrainingSettings(epochs=2, learning_rate=0.02),
        "with_alone": False,
        "progress": False,
    }
    run = sv.simulate(primary=TensorDataset(own, label), secondaries=[theirs], **given)
    numbers = {"row": np.arange(120)}
    frames = [
        pd.DataFrame({**numbers, **{f"x{n}": one for n, one in enumerate(table.numpy().T)}})
        for table in (own, theirs)
    ]
    same = sv.simulate(primary=frames[0].assign(y=label.numpy()), secondaries=[frames[1]], **given)
    assert run.losses == same.losses
    assert run.metrics["links"]["secondary-1"]["rows_linked"] == 120


def test_a_secondary_of_an_estimator_may_be_a_dataset() -> None:
    ids = torch.arange(80.0)
    wealth = torch.randn(80, generator=torch.Generator().manual_seed(1))
    bank = Items(*({"id": one, "wealth": w} for one, w in zip(ids, wealth, strict=True)))
    model = sv.FederatedClassifier(
        "top1sim", key=["id"], secondaries=[bank], epochs=1, random_state=0
    )
    frame = pd.DataFrame({"id": ids.numpy(), "age": np.arange(80.0) % 7})
    model.fit(frame, (wealth > 0).numpy())
    assert model.predict(frame[:3]).shape == (3,)
