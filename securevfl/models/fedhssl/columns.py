"""Categorical columns of a party's features, as embeddings and augmentations see them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from securevfl.core import checks
from securevfl.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CategoricalColumn:
    """One categorical variable among a table's feature columns.

    It is stored either as one column of whole numbers from 0 (few bytes for large vocabularies),
    or as one 0/1 column a category, which may be scaled: the largest one says which it is. A code
    of ``categories`` stands for "replaced", which no record holds; columns that are all equal do
    where there is one column a category.
    """

    places: tuple[int, ...]
    """Feature columns that hold it: one, or as many as there are categories."""

    categories: int
    """Different values."""

    def __post_init__(self) -> None:
        checks.at_least(1, categories=self.categories)
        if not self.places or len(self.places) not in (1, self.categories):
            raise ConfigError(
                f"places must be one column or one for each of {self.categories} categories, "
                f"got {len(self.places)}"
            )

    @property
    def one_hot(self) -> bool:
        """Whether there is one column a category."""
        return len(self.places) > 1

    def codes(self, features: Float[Tensor, "rows features"]) -> Int[Tensor, " rows"]:
        """Return each row's category number; what lies outside the vocabulary is "replaced"."""
        if self.one_hot:
            own = features[:, list(self.places)]
            chosen = own.argmax(dim=1)
            replaced = own.amin(dim=1) == own.amax(dim=1)
        else:
            chosen = features[:, self.places[0]].round().long()
            replaced = (chosen < 0) | (chosen >= self.categories)
        return torch.where(replaced, self.categories, chosen)


def one_hot_columns(feature_names: Sequence[str]) -> tuple[CategoricalColumn, ...]:
    """Return the categorical columns of a table whose one-hot columns are called ``name=value``.

    A name with one such column alone stays a number: one 0/1 column says all there is to say.
    """
    places: dict[str, list[int]] = {}
    for place, name in enumerate(feature_names):
        if "=" in name:
            places.setdefault(name.split("=", 1)[0], []).append(place)
    return tuple(CategoricalColumn(tuple(own), len(own)) for own in places.values() if len(own) > 1)


def continuous_places(num_features: int, columns: Sequence[CategoricalColumn]) -> tuple[int, ...]:
    """Return the feature columns that belong to no categorical one.

    Raises:
        ConfigError: If a column is out of range, or belongs to two categorical ones.
    """
    taken = [place for column in columns for place in column.places]
    if len(set(taken)) < len(taken):
        raise ConfigError("columns: a feature column belongs to two categorical ones")
    if not all(0 <= place < num_features for place in taken):
        raise ConfigError(f"columns: must lie in 0 to {num_features - 1}")
    return tuple(sorted(set(range(num_features)) - set(taken)))
