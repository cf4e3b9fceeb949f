"""An encoder of few numbers: one record at a time, one length, one block; what it is fitted to."""

import numpy as np
import pytest
import torch

from securevfl.models.family import Bottom
from securevfl.models.frozen import DirectionBottom, Projection, RecordShape, principal_projection


def bottom_of() -> DirectionBottom:
    encode = Projection(num_features=5, components=2)
    return DirectionBottom(
        encode,
        RecordShape(features=encode.centre.numel()),
        components=2,
        width=8,
        offset=4,
        length=0.5,
    )


def test_every_record_has_the_same_length_in_its_own_block() -> None:
    """All else is zero, and so are absent links and a record at the centre: it has no direction."""
    features = torch.randn(6, 3, 5) * torch.tensor([1e-3, 1.0, 1e3]).view(1, 3, 1)
    features[0, 1] = 0.0
    present = torch.ones(6, 3, dtype=torch.bool)
    present[2, 2] = False
    out = bottom_of()(features, torch.zeros(6, 3, 2), present)
    norms = torch.linalg.vector_norm(out, dim=-1)

    assert all(hasattr(bottom_of(), name) for name in Bottom.__annotations__)
    assert bottom_of().recordwise
    assert not out[..., :4].any()
    assert not out[..., 6:].any()
    zero = torch.zeros(6, 3, dtype=torch.bool)
    zero[0, 1] = zero[2, 2] = True
    assert torch.equal(norms == 0, zero)
    torch.testing.assert_close(norms[~zero], torch.full((16,), 0.5))


def test_a_record_is_encoded_alone() -> None:
    """Others in its row or its batch change nothing of it."""
    features = torch.randn(4, 3, 5)
    keys, present = torch.zeros(4, 3, 2), torch.ones(4, 3, dtype=torch.bool)
    out = bottom_of()(features, keys, present)
    other = torch.randn(4, 3, 5)
    other[1, 2] = features[1, 2]

    assert torch.equal(bottom_of()(other, keys, present)[1, 2], out[1, 2])


def test_principal_projection_whitens_the_leading_directions() -> None:
    """On a table of known covariance: unit variances, no correlation, the directions in order."""
    draw = np.random.default_rng(5)
    basis, _ = np.linalg.qr(draw.normal(size=(6, 6)))
    covariance = basis @ np.diag([9.0, 4.0, 1.0, 0.1, 0.1, 0.1]) @ basis.T
    projection = principal_projection(covariance, 3, spread=0.01)

    np.testing.assert_allclose(projection.T @ covariance @ projection, np.eye(3), atol=1e-9)
    lengths = np.linalg.norm(projection, axis=0)
    np.testing.assert_allclose(lengths, [1 / 3, 1 / 2, 1.0], rtol=1e-9)
    # Signs do not depend on the solver: each vector's largest entry is positive.
    assert (projection[np.abs(projection).argmax(axis=0), range(3)] > 0).all()


@pytest.mark.parametrize("spread", [0.5, 0.0])
def test_directions_of_noise_are_not_blown_up(spread: float) -> None:
    """Eigenvalues below the noise's own count as the noise's; negative ones too."""
    projection = principal_projection(np.diag([4.0, 1e-9, -0.3]), 3, spread=spread)
    lengths = np.linalg.norm(projection, axis=0)

    assert np.isfinite(projection).all()
    assert lengths[0] == pytest.approx(0.5)
    assert lengths.max() <= (spread or 4e-6) ** -0.5 * (1 + 1e-9)


def test_a_random_projection_is_drawn_without_data() -> None:
    """Equal for equal seeds, another for another one; a fit replaces it."""
    first, again, other = (Projection(num_features=5, components=2) for _ in range(3))
    other.draw(torch.Generator().manual_seed(1))

    assert torch.equal(first.projection, again.projection)
    assert not torch.equal(first.projection, other.projection)
    again.fit(centre=np.ones(5), projection=np.full((5, 2), 2.0))
    assert torch.equal(again.projection, torch.full((5, 2), 2.0))
    assert torch.equal(again.centre, torch.ones(5))
