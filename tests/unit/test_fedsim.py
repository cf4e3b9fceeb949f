"""FedSim's gates against their formulas, and the baselines on the same split network."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from securevfl.core.errors import ConfigError
from securevfl.models.fedsim import (
    ConvolutionMerge,
    FedSimConfig,
    FedSimTop,
    PerceptronMerge,
    ResidualMerge,
    SimilarityModel,
    SortGate,
    merged_width,
)
from securevfl.models.layers import initialise
from securevfl.models.pairs import ManyLinksSettings, PairModel
from securevfl.models.registry import FAMILIES

B, K, H, F, D = 6, 8, 4, 3, 2
NAN = float("nan")
SMALL = FedSimConfig(neighbours=K, hidden=H, layer_width=7, merge_width=9, kernel=3, dropout=0.0)
EVEN = dataclasses.replace(SMALL, rank_prior=0.0)


def batch(*, secondaries: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return own features, keys, an aggregate and similarities in falling order."""
    generator = torch.Generator().manual_seed(5)
    similarities = torch.randn(B, secondaries, K, generator=generator)
    return (
        torch.randn(B, F, generator=generator),
        torch.randn(B, D, generator=generator),
        torch.randn(B, K, H, generator=generator),
        similarities.sort(dim=2, descending=True).values,
    )


def build_top(config: FedSimConfig, *, outputs: int = 1) -> FedSimTop:
    """Return an initialised top model in evaluation mode."""
    top = FedSimTop(config, num_features=F, key_dim=D, outputs=outputs)
    initialise(top, seed=3, positions_seed=3)
    return top.eval()


def test_pair_model_is_a_perceptron_over_both_representations() -> None:
    """Splitting the aggregation model's first layer leaves what the paper's joint layer gives."""
    model = PairModel(
        ManyLinksSettings(hidden=H, layer_width=7), num_features=F, key_dim=D, outputs=2
    )
    features, keys, aggregate, _ = batch()
    own = model.local(features).unsqueeze(1).expand(-1, K, -1)
    rms = aggregate.square().mean(dim=(1, 2), keepdim=True).sqrt()
    joint = nn.Linear(2 * H, 7)
    joint.weight.data = torch.cat([model.of_row.weight, model.of_link.weight], dim=1)
    joint.bias.data = model.of_row.bias.data
    expected = model.out(torch.relu(joint(torch.cat([own, aggregate / rms], dim=2))))

    torch.testing.assert_close(model(features, keys, aggregate), expected)


def test_keys_are_inputs_only_if_asked_for() -> None:
    """One setting for both halves: without it no output depends on a key."""
    for asked in (False, True):
        config = ManyLinksSettings(hidden=H, keys_as_features=asked)
        model = PairModel(config, num_features=F, key_dim=D, outputs=2)
        features, keys, aggregate, _ = batch()
        moved = model(features, keys + 1, aggregate)
        assert torch.equal(moved, model(features, keys, aggregate)) is not asked


@pytest.mark.parametrize("weights", [1, 3])
def test_similarity_model_is_one_hidden_layer_from_one_number(weights: int) -> None:
    """Written out; weights start near one, so that an untrained gate lets everything through."""
    gate = SimilarityModel(5, weights=weights)
    s = torch.tensor([[-2.0, 0.3]])
    into, out = gate.layers[0], gate.layers[2]
    hidden = torch.tanh(s[..., None] * into.weight[:, 0] + into.bias)

    assert gate(s).shape == (1, 2, weights)
    torch.testing.assert_close(gate(s), 1 + hidden @ out.weight.T + out.bias)


def test_sort_gate_orders_by_similarity_or_weight_and_keeps_ties() -> None:
    """Highest first; equal scores keep their order; absent links come last, whatever they score."""
    pairs = torch.arange(5.0).view(1, 5, 1)
    similarities = torch.tensor([[0.0, 2.0, 1.0, 2.0, 9.0]])
    weights = torch.tensor([[3.0, 1.0, 3.0, 2.0, 9.0]])
    present = torch.tensor([[True, True, True, True, False]])
    given = {"similarities": similarities, "weights": weights, "present": present}

    assert SortGate("similarity")(pairs, **given).flatten().tolist() == [1, 3, 2, 0, 4]
    assert SortGate("weight")(pairs, **given).flatten().tolist() == [0, 2, 3, 1, 4]


def test_without_the_sort_gate_the_order_is_arbitrary() -> None:
    """Fresh in training, fixed in evaluation; no pair is lost."""
    pairs = torch.arange(1.0, 41.0).view(2, 20, 1)
    ones = torch.ones(2, 20)
    given = {"similarities": ones, "weights": ones, "present": ones.bool()}
    gate = SortGate("none")
    first, second = gate(pairs, **given), gate(pairs, **given)
    gate.eval()

    assert not torch.equal(first, second)
    assert torch.equal(first.sort(dim=1).values, pairs)
    assert torch.equal(gate(pairs, **given), gate(pairs, **given))
    assert not torch.equal(gate(pairs, **given), pairs)


@pytest.mark.parametrize(("given", "regression", "classes"), [(None, 0.3, 0.7), (0.1, 0.1, 0.1)])
def test_dropout_depends_on_the_task_unless_it_is_set(
    given: float | None, regression: float, classes: float
) -> None:
    """More of it for classes, as the published code has it; what a file says holds for both."""
    for kind, share in ((False, regression), (True, classes)):
        top = FedSimTop(
            FedSimConfig(dropout=given), num_features=F, key_dim=D, outputs=1, classes=kind
        )
        dropout = top.merge.correction.perceptron[0]
        assert dropout.dropped_values == round(256 * share)


def test_convolution_is_torchs_own() -> None:
    """A k_conv x 1 kernel over a K x P image, one input channel."""
    gate = ConvolutionMerge(SMALL, outputs=2, dropout=0.0).eval()
    pairs = torch.randn(B, K, SMALL.pair_outputs)
    weight = gate.convolution.weight.view(SMALL.channels, 1, SMALL.kernel, 1)
    image = nn.functional.conv2d(pairs.unsqueeze(1), weight, gate.convolution.bias).relu()
    expected = gate.perceptron(image.permute(0, 2, 3, 1).flatten(1))

    torch.testing.assert_close(gate(pairs), expected)


def test_perceptron_gate_has_about_as_many_weights() -> None:
    """The ablation changes what the gate sees, not how much it can hold: within five percent."""
    config = FedSimConfig()
    sizes = [
        sum(weights.numel() for weights in kind(config, outputs=1, dropout=0.0).parameters())
        for kind in (ConvolutionMerge, PerceptronMerge)
    ]

    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)


def test_residual_gate_starts_from_the_mean_of_predictions() -> None:
    """Without its linear part an untrained gate is AvgSim's: its convolution starts silent."""
    gate = ResidualMerge(EVEN, outputs=2, dropout=0.0)
    initialise(gate, seed=3, positions_seed=3)
    pairs = torch.randn(B, K, merged_width(EVEN, outputs=2))
    gate.linear.weight.data.zero_()

    torch.testing.assert_close(gate(pairs), pairs[:, :, :2].mean(dim=1))


@pytest.mark.parametrize("decay", [1.0, 2.0])
def test_places_start_by_their_rank(decay: float) -> None:
    """The untrained mean has place j by j^-decay of it, whatever the gate was before."""
    config = dataclasses.replace(SMALL, rank_prior=decay)
    gate = ResidualMerge(config, outputs=2, dropout=0.0)
    gate.places.data.normal_()
    initialise(gate, seed=3, positions_seed=3)
    pairs = torch.randn(B, K, merged_width(config, outputs=2))
    gate.linear.weight.data.zero_()
    shares = torch.tensor([j**-decay for j in range(1, K + 1)])

    expected = (pairs[:, :, :2] * shares[:, None]).sum(dim=1) / shares.sum()
    torch.testing.assert_close(gate(pairs), expected)


def test_residual_gate_can_hold_on_to_one_place() -> None:
    """An output whose first place has all the weight is Top1Sim's, whatever the others do."""
    gate = ResidualMerge(EVEN, outputs=2, dropout=0.0)
    initialise(gate, seed=3, positions_seed=3)
    pairs = torch.randn(B, K, merged_width(EVEN, outputs=2))
    gate.linear.weight.data.zero_()
    gate.places.data[0, 0] = 100.0
    expected = torch.stack([pairs[:, 0, 0], pairs[:, :, 1].mean(dim=1)], dim=1)

    torch.testing.assert_close(gate(pairs), expected)


def test_correction_of_the_residual_gate_is_the_papers_convolution_of_its_own_outputs() -> None:
    """Predictions go around the convolution; the l_m further outputs go through both parts."""
    gate = ResidualMerge(EVEN, outputs=2, dropout=0.0).eval()
    pairs = torch.randn(B, K, merged_width(EVEN, outputs=2))
    even = pairs.mean(dim=1)
    expected = even[:, :2] + gate.linear(even[:, 2:]) + gate.correction(pairs[:, :, 2:])

    torch.testing.assert_close(gate(pairs), expected)


def test_average_gate_is_the_weighted_mean_of_predictions() -> None:
    """With similarities as weights and no merge model: sum of s_k o_k over K."""
    config = dataclasses.replace(SMALL, weight="similarity", merge="average")
    top = build_top(config, outputs=2)
    features, keys, aggregate, similarities = batch()
    pairs = top.pairs(features, keys, aggregate)
    expected = (pairs * similarities[:, 0, :, None]).sum(dim=1) / K

    torch.testing.assert_close(top(features, keys, aggregate, similarities), expected)


@pytest.mark.parametrize("sort", ["similarity", "weight"])
def test_the_order_in_which_links_come_does_not_matter(sort: str) -> None:
    """Sorted, a row is a set of links with similarities."""
    top = build_top(dataclasses.replace(SMALL, sort=sort))
    features, keys, aggregate, similarities = batch()
    order = torch.randperm(K, generator=torch.Generator().manual_seed(1))
    moved = top(features, keys, aggregate[:, order], similarities[:, :, order])

    torch.testing.assert_close(moved, top(features, keys, aggregate, similarities))


def test_absent_links_weigh_nothing() -> None:
    """Whatever stands in a slot without a link, even noise, does not reach the output."""
    config = dataclasses.replace(SMALL, neighbours=K)
    top = build_top(config)
    features, keys, aggregate, similarities = batch()
    similarities[2, :, 5:] = NAN
    similarities[4] = NAN
    merged: list[Tensor] = []
    top.merge.register_forward_pre_hook(lambda _gate, inputs: merged.extend(inputs))
    assert torch.isfinite(top(features, keys, aggregate, similarities)).all()
    (sorted_pairs,) = merged

    assert not sorted_pairs[2, 5:].any()
    assert not sorted_pairs[4].any()
    assert sorted_pairs[2, :5].all(dim=1).all()


def test_similarities_of_secondaries_are_averaged_over_those_that_have_a_link() -> None:
    """As SplitAvg averages their vectors, slot by slot."""
    top = build_top(SMALL)
    features, keys, aggregate, similarities = batch(secondaries=2)
    similarities[0, 1, 6:] = NAN
    mean = similarities.mean(dim=1, keepdim=True)
    mean[0, 0, 6:] = similarities[0, 0, 6:]

    torch.testing.assert_close(
        top(features, keys, aggregate, similarities), top(features, keys, aggregate, mean)
    )


def test_scale_of_the_aggregate_does_not_matter() -> None:
    """A clip norm of 1 or 100 is the same to the top model: only directions were released."""
    top = build_top(SMALL)
    features, keys, aggregate, similarities = batch()

    torch.testing.assert_close(
        top(features, keys, aggregate / 50, similarities),
        top(features, keys, aggregate, similarities),
    )


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize(
    "ablation",
    [
        {},
        {"weight": "learned"},
        {"weight": "similarity"},
        {"weight": "none"},
        {"sort": "weight"},
        {"sort": "none"},
        {"weight": "learned", "merge": "convolution"},
        {"merge": "perceptron"},
        {"merge": "average"},
    ],
    ids=str,
)
def test_every_ablation_learns(ablation: dict[str, str], outputs: int) -> None:
    """A few steps lower the loss of each variant, and every weight gets a gradient."""
    torch.manual_seed(0)
    top = build_top(dataclasses.replace(SMALL, **ablation), outputs=outputs)
    given = batch()
    targets = torch.randn(B, outputs, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.Adam(top.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = (top(*given) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))

    assert losses[-1] < 0.7 * losses[0]
    assert all(weights.grad is not None for weights in top.parameters())


def test_avgsim_is_the_mean_of_its_predictions_and_featuresim_reads_similarities() -> None:
    """The only difference between the two is one more input of the aggregation model."""
    features, keys, aggregate, similarities = batch()
    for name in ("avgsim", "featuresim"):
        family = FAMILIES[name]
        config = family.settings_class(neighbours=K, hidden=H)
        top = family.build_top(config, num_features=F, key_dim=D, outputs=2)
        reads = family.needs_similarities(config)
        given = similarities if reads else None
        pairs = top.pairs(features, keys, aggregate, similarities[:, 0] if reads else None)
        assert reads == (name == "featuresim")
        torch.testing.assert_close(top(features, keys, aggregate, given), pairs.mean(dim=1))


def test_featuresim_averages_over_the_links_there_are() -> None:
    """Links that are not there are no predictions."""
    features, keys, aggregate, similarities = batch()
    family = FAMILIES["featuresim"]
    config = family.settings_class(neighbours=K, hidden=H)
    top = family.build_top(config, num_features=F, key_dim=D, outputs=2)
    pairs = top.pairs(features, keys, aggregate, similarities[:, 0])
    similarities[:, :, 3:] = NAN

    torch.testing.assert_close(
        top(features, keys, aggregate, similarities), pairs[:, :3].mean(dim=1)
    )


@pytest.mark.parametrize("name", ["top1sim", "exact"])
def test_one_to_one_baselines_link_one_record(name: str) -> None:
    """K is no setting of theirs."""
    family = FAMILIES[name]

    assert family.cut_shape(family.settings_class(hidden=5)) == (1, 5)
    with pytest.raises(ConfigError, match=r"model\.neighbours: no such field"):
        family.settings_from({"neighbours": 3})


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"neighbours": 4, "kernel": 5}, "model.kernel must be at most neighbours=4, got 5"),
        ({"weight": "none", "sort": "weight"}, 'sort: "weight" needs weights'),
        ({"merge": "cnn"}, "model.merge: must be one of 'residual', 'convolution', 'perceptron'"),
        ({"sort": "distance"}, "model.sort: must be one of 'similarity', 'weight', 'none'"),
        ({"channels": 0}, "model.channels must be at least 1"),
        ({"rank_prior": -1}, "model.rank_prior must be at least 0, got -1"),
        ({"rank_prior": 17}, "model.rank_prior must be at most 16, got 17"),
        ({"dropout": 1.0}, r"model.dropout must lie in \[0, 1\)"),
        ({"heads": 2}, "model.heads: no such field"),
    ],
)
def test_impossible_settings_are_refused_by_name(table: dict[str, object], text: str) -> None:
    """Each message has the field, the rule and the value."""
    with pytest.raises(ConfigError, match=text):
        FAMILIES["fedsim"].settings_from(table)


def test_avgsim_leaves_empty_slots_out() -> None:
    """Without noise: the mean over the links there are; of a row without any, what zeros give."""
    torch.manual_seed(0)
    family = FAMILIES["avgsim"]
    settings = family.settings_from({"neighbours": 4, "hidden": 3})
    top = family.build_top(settings, num_features=2, key_dim=2, outputs=1).eval()
    features, keys = torch.randn(2, 2), torch.zeros(2, 2)
    aggregate = torch.randn(2, 4, 3)
    aggregate[0, 2:] = 0
    aggregate[1] = 0
    with torch.no_grad():
        got = top(features, keys, aggregate, None)
        pairs = top.pairs(features, keys, aggregate)
    assert torch.allclose(got[0], pairs[0, :2].mean(dim=0))
    assert torch.allclose(got[1], pairs[1, 0])
