"""FedCVT: its estimates, its pseudo-labels, and that it learns from them."""

import pytest
import torch
from aligned.halves import digits_halves
from aligned.views import scarce_rows

from securevfl.config.methods import FedCVTConfig
from securevfl.core.errors import ConfigError, DataError
from securevfl.lab.fedcvt import KnownRows, agreed_labels, attend, fit_fedcvt
from securevfl.models.fedhssl.augment import CategoricalColumn
from securevfl.models.fedhssl.encoders import EncoderConfig

SMALL = EncoderConfig(hidden=32, width=16, norm="layer")


def test_attention_takes_the_nearest_value_when_sharp_and_the_mean_when_flat() -> None:
    """Two extremes of one temperature; a hidden row is never taken."""
    keys = torch.eye(3) * 4
    values = torch.tensor([[1.0], [2.0], [6.0]])
    sharp = attend(keys, keys, values, temperature=0.01)
    assert torch.allclose(sharp, values)
    assert torch.allclose(attend(keys, keys, values, temperature=1e6), torch.full((3, 1), 3.0))
    hidden = attend(keys, keys, values, temperature=0.01, hidden=torch.eye(3, dtype=torch.bool))
    assert torch.allclose(hidden, torch.tensor([[4.0], [3.5], [1.5]]))


def test_sharpened_weights_are_powers_of_the_softmax() -> None:
    """What the paper writes: p^(1/T), normalised."""
    queries, keys = torch.randn(4, 5), torch.randn(6, 5)
    plain = (queries @ keys.T / 5**0.5).softmax(dim=1)
    powers = plain**2 / (plain**2).sum(dim=1, keepdim=True)

    assert torch.allclose(attend(queries, keys, torch.eye(6), temperature=0.5), powers, atol=1e-5)


def test_labels_need_agreement_and_confidence_of_all() -> None:
    """One dissent or one doubt is enough to leave a row out."""
    sure, unsure = torch.tensor([[5.0, 0.0]]), torch.tensor([[0.1, 0.0]])
    logits = torch.cat([sure, sure, sure]), torch.cat([sure, unsure, sure.flip(1)])
    classes, agreed = agreed_labels(*logits, confidence=0.6)

    assert agreed.tolist() == [True, False, False]
    assert classes[0] == 0


def known(labelled: int, seed: int = 0) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, KnownRows]:
    data = digits_halves()
    rows = scarce_rows(data, aligned=0.4, labelled=labelled, seed=seed)
    views = tuple(torch.as_tensor(view) for view in data.views)
    parts = {
        name: torch.as_tensor(getattr(rows, name)) for name in ("labelled", "aligned", "local")
    }
    return views, torch.as_tensor(data.labels), KnownRows(**parts)


def test_it_learns_digits_and_follows_from_its_seed() -> None:
    """From 100 labels, far above chance, which is a tenth; equal seeds, equal networks."""
    views, labels, rows = known(100)
    config = FedCVTConfig(least_steps=50, batch_size=32, epochs=1)
    test = torch.as_tensor(digits_halves().test)
    networks = [
        fit_fedcvt(views, labels, classes=10, rows=rows, encoder=SMALL, config=config, seed=seed)
        for seed in (1, 1)
    ]
    with torch.no_grad():
        outputs = [network(views[0][test], views[1][test]) for network in networks]

    assert (outputs[0].argmax(dim=1) == labels[test]).double().mean() > 0.6
    assert torch.equal(outputs[0], outputs[1])


def test_labels_of_other_rows_are_never_read() -> None:
    """Wrong labels everywhere but at the labelled rows change nothing."""
    views, labels, rows = known(20)
    wrong = torch.full_like(labels, -1)
    wrong[rows.labelled] = labels[rows.labelled]
    config = FedCVTConfig(least_steps=3, epochs=1, batch_size=16)
    one, other = (
        fit_fedcvt(views, given, classes=10, rows=rows, encoder=SMALL, config=config, seed=1)
        for given in (labels, wrong)
    )

    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_three_parties_and_no_labels_are_refused() -> None:
    """With what it needs."""
    views, labels, rows = known(20)
    nothing = KnownRows(labelled=rows.labelled[:0], aligned=rows.aligned, local=rows.local)
    settings = {"classes": 10, "encoder": SMALL, "config": FedCVTConfig(), "seed": 0}
    with pytest.raises(ConfigError, match="two parties, got 3"):
        fit_fedcvt((*views, views[0]), labels, rows=rows, **settings)
    with pytest.raises(DataError, match="needs labelled rows"):
        fit_fedcvt(views, labels, rows=nothing, **settings)


def test_categories_are_embedded_at_each_party() -> None:
    """Codes of both parties are read as categories, and what they tell is learned."""
    views = (torch.tensor([[0.0, 1.0], [4.0, 2.0]] * 8), torch.tensor([[2.0], [1.0]] * 8))
    rows = torch.arange(16)
    network = fit_fedcvt(
        views,
        rows % 2,
        classes=2,
        rows=KnownRows(labelled=rows, aligned=rows, local=rows),
        encoder=EncoderConfig(kind="embedding", hidden=8, width=8, embedding=3, norm="layer"),
        config=FedCVTConfig(least_steps=30, epochs=1, learning_rate=1e-2),
        seed=0,
        columns=((CategoricalColumn((0,), 5),), (CategoricalColumn((0,), 3),)),
    )

    assert (network(*views).argmax(dim=1) == rows % 2).all()
