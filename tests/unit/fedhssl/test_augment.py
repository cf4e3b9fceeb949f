"""Augmentations: what a view replaces, where its values come from, and exact references."""

import colorsys

import pytest
import torch
from torch import Tensor

from securevfl.core.errors import ConfigError
from securevfl.models.fedhssl.encoders import CategoricalColumn
from securevfl.stages.pretraining.augment import AugmentedImages, CorruptedFeatures, turn_hue

STILL = {"smallest_crop": 1.0, "flip": 0.0, "jitter": 0.0, "grey": 0.0, "blur": 0.0}


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
    for augmentation in (CorruptedFeatures(batch), AugmentedImages(image=(3, 8, 8))):
        source = generator(7)
        first, second = augmentation(batch, source), augmentation(batch, source)
        assert torch.equal(first, augmentation(batch, generator(7)))
        assert not torch.equal(first, second)


def test_an_image_that_nothing_happens_to_stays() -> None:
    """The whole crop and no other change is the image itself."""
    batch = torch.rand(4, 3 * 6 * 5)
    view = AugmentedImages(image=(3, 6, 5), **STILL)(batch, generator())

    assert torch.allclose(view, batch, atol=1e-5)


def test_a_flip_mirrors_left_and_right() -> None:
    """With probability one, every row of pixels is reversed."""
    batch = torch.rand(3, 2 * 4 * 6)
    view = AugmentedImages(image=(2, 4, 6), **{**STILL, "flip": 1.0})(batch, generator())

    expected = batch.reshape(3, 2, 4, 6).flip(3).reshape(3, -1)
    assert torch.allclose(view, expected, atol=1e-5)


def test_crops_lie_inside_the_image() -> None:
    """A ramp keeps its slope's sign and range, but loses parts of it."""
    ramp = torch.linspace(0, 1, 16).repeat(16, 1).reshape(1, -1).repeat(50, 1)
    view = AugmentedImages(image=(1, 16, 16), **{**STILL, "smallest_crop": 0.2})(ramp, generator())
    rows = view.reshape(50, 16, 16)

    assert view.min() >= 0
    assert view.max() <= 1
    assert (rows.diff(dim=2) >= -1e-6).all()
    spans = rows[:, :, -1] - rows[:, :, 0]
    assert spans.max() <= 1 + 1e-6
    assert spans.min() < 0.8


def test_hue_turns_as_in_the_hsv_model() -> None:
    """Against the standard library's conversions, for random colours, greys and primaries."""
    colours = torch.rand(40, 3, generator=generator(3))
    colours[0], colours[1] = torch.tensor([0.4, 0.4, 0.4]), torch.tensor([0.0, 0.0, 1.0])
    turns = torch.rand(40, generator=generator(4)) - 0.5
    turned = turn_hue(colours[:, :, None, None], turns[:, None, None, None])[:, :, 0, 0]

    for colour, turn, result in zip(colours, turns, turned, strict=True):
        h, s, v = colorsys.rgb_to_hsv(*colour.tolist())
        expected = torch.tensor(colorsys.hsv_to_rgb((h + turn.item()) % 1, s, v))
        assert torch.allclose(result, expected, atol=1e-5)


def test_grey_images_have_equal_channels_and_the_luma() -> None:
    """ITU-R BT.601: 0.299 red, 0.587 green, 0.114 blue."""
    batch = torch.rand(2, 3 * 4)
    view = AugmentedImages(image=(3, 2, 2), **{**STILL, "grey": 1.0})(batch, generator())
    channels = batch.reshape(2, 3, 4)
    luma = 0.299 * channels[:, 0] + 0.587 * channels[:, 1] + 0.114 * channels[:, 2]

    assert torch.allclose(view.reshape(2, 3, 4), luma[:, None].expand(2, 3, 4), atol=1e-5)


def test_blur_spreads_a_point_as_a_gaussian() -> None:
    """The sum stays, the second moment is the drawn deviation's, and no blur is narrower."""
    point = torch.zeros(64, 25 * 25)
    point[:, 12 * 25 + 12] = 1
    view = AugmentedImages(image=(1, 25, 25), **{**STILL, "blur": 1.0})(point, generator(5))
    spread = view.reshape(64, 25, 25).sum(dim=1)
    steps = torch.arange(-12.0, 13.0)
    variance = (spread * steps**2).sum(dim=1)

    assert torch.allclose(spread.sum(dim=1), torch.ones(64), atol=1e-5)
    assert variance.min() >= 0
    assert variance.max() <= 2.0**2
    assert variance.max() > 1.5**2
    assert torch.allclose(spread, spread.flip(1), atol=1e-6)


def test_jitter_keeps_images_in_their_range_whatever_it_is() -> None:
    """Batches may be scaled; black and full stay the bounds."""
    batch = torch.rand(30, 3 * 4 * 4) * 2 - 1
    settings = {**STILL, "jitter": 1.0}
    view = AugmentedImages(image=(3, 4, 4), low=-1.0, high=1.0, **settings)(batch, generator(2))

    assert view.min() >= -1 - 1e-5
    assert view.max() <= 1 + 1e-5
    assert not torch.allclose(view, batch, atol=0.05)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AugmentedImages(image=(3, 4)), "channels, height, width"),
        (lambda: AugmentedImages(image=(3, 4, 4), low=1.0, high=1.0), "low must be below high"),
        (lambda: AugmentedImages(image=(3, 4, 4), smallest_crop=0.0), "smallest_crop must lie"),
        (lambda: AugmentedImages(image=(3, 4, 4), blur=1.5), "blur must lie in"),
        (lambda: CorruptedFeatures(torch.zeros(2, 2), rate=1.5), "rate must lie in"),
        (lambda: CorruptedFeatures(torch.zeros(0, 2)), "table_rows"),
    ],
)
def test_impossible_augmentations_are_refused(build: object, message: str) -> None:
    """With the rule and the value."""
    with pytest.raises(ConfigError, match=message):
        build()  # type: ignore[operator]


def test_single_channel_images_pass_every_step() -> None:
    """Grey pixels have no hue: the steps for colours leave the shape and the range alone."""
    batch: Tensor = torch.rand(6, 28 * 14)
    view = AugmentedImages(image=(1, 28, 14))(batch, generator(1))

    assert view.shape == batch.shape
    assert view.min() >= 0
    assert view.max() <= 1 + 1e-5
