"""Augmentations: what a view replaces, where its values come from, and exact references."""

import pytest
import torch

from securevfl.core.errors import ConfigError
from securevfl.models.fedhssl.encoders import CategoricalColumn
from securevfl.stages.pretraining.augment import CorruptedFeatures


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_scarf_replaces_an_exact_share_by_values_of_the_same_column() -> None:
    """Three of ten numbers a row; each new value is one that its column holds somewhere."""
    table = torch.arange(200.0).reshape(20, 10)
    batch = -torch.ones(8, 10)
    view = CorruptedFeatures(table)(batch, generator())

    replaced = view != batch
    assert replaced.sum(dim=1).tolist() == [3] * 8
    assert torch.equal(view[replaced] % 10, replaced.nonzero()[:, 1].float())
    assert torch.equal(batch, -torch.ones(8, 10))
    assert len({tuple(row) for row in replaced.tolist()}) > 1


def test_scarf_draws_from_the_columns_empirical_marginal() -> None:
    """A value that a quarter of the rows has is a quarter of the draws.

    10,000 draws: 0.03 is 6.9 deviations, a false alarm below 1e-11.
    """
    table = torch.tensor([[1.0], [1.0], [1.0], [5.0]])
    view = CorruptedFeatures(table, rate=1.0)(torch.zeros(10_000, 1), generator(4))

    assert (view == 5).double().mean().item() == pytest.approx(0.25, abs=0.03)


def test_words_become_replaced_and_numbers_keep_their_columns() -> None:
    """Half of four words a row: a code beyond the vocabulary, or one-hot columns all equal."""
    columns = [
        CategoricalColumn((0,), 3),
        CategoricalColumn((1,), 2),
        CategoricalColumn((2,), 9),
        CategoricalColumn((4, 5), 2),
    ]
    table = torch.tensor([[1.0, 1.0, 4.0, 0.5, 1.0, 0.0]] * 6)
    view = CorruptedFeatures(table, rate=0.5, columns=columns)(table, generator(1))

    replaced = torch.stack([c.codes(view) == c.categories for c in columns], dim=1)
    assert replaced.sum(dim=1).tolist() == [2] * 6
    assert torch.equal(view[:, 3], table[:, 3])


def test_a_few_words_get_their_share_too() -> None:
    """0.3 of one word column is not none: of 10,000 rows, 3,000 are replaced.

    0.03 is 6.5 deviations of the share, a false alarm below 1e-10. Of two columns, 0.75 of them are
    one or two a row, and each column as often as the other.
    """
    one = CorruptedFeatures(torch.ones(3, 1), rate=0.3, columns=[CategoricalColumn((0,), 2)])
    view = one(torch.ones(10_000, 1), generator(3))
    assert (view == 2).double().mean().item() == pytest.approx(0.3, abs=0.03)
    columns = [CategoricalColumn((place,), 2) for place in (0, 1)]
    two = CorruptedFeatures(torch.ones(3, 2), rate=0.75, columns=columns)
    replaced = (two(torch.ones(10_000, 2), generator(3)) == 2).double()
    assert set(replaced.sum(dim=1).tolist()) == {1.0, 2.0}
    assert replaced.mean(dim=0).tolist() == pytest.approx([0.75, 0.75], abs=0.03)


def test_no_rate_leaves_the_batch() -> None:
    """The view is the batch."""
    batch = torch.rand(4, 3)
    assert torch.equal(CorruptedFeatures(batch, rate=0.0)(batch, generator()), batch)


def test_one_seed_gives_one_view() -> None:
    """Views follow from the generator alone, and differ from draw to draw."""
    batch = torch.rand(5, 3 * 8 * 8)
    augmentation, source = CorruptedFeatures(batch), generator(7)
    first, second = augmentation(batch, source), augmentation(batch, source)
    assert torch.equal(first, augmentation(batch, generator(7)))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CorruptedFeatures(torch.zeros(2, 2), rate=1.5), "rate must lie in"),
        (lambda: CorruptedFeatures(torch.zeros(0, 2)), "table_rows"),
    ],
)
def test_impossible_augmentations_are_refused(build: object, message: str) -> None:
    """With the rule and the value."""
    with pytest.raises(ConfigError, match=message):
        build()  # type: ignore[operator]
