"""FeT's parts against their formulas, and its order, masking and learning."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from securevfl.models.fet import attention
from securevfl.models.fet.attention import Attention, softmax
from securevfl.models.fet.family import DynamicMask, FeTBottom, FeTFamily, FeTTop, attention_bias
from securevfl.models.fet.positions import FourierPositions, fourier_positions
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.frozen import FrozenBottom
from securevfl.models.layers import initialise

B, K, F, D = 5, 6, 3, 2
SEQUENCE = FeTConfig(neighbours=K, hidden=16, heads=4, encoder_blocks=2, dropout=0.0)
POOLED = FeTConfig(neighbours=K, hidden=16, heads=4, dropout=0.0, release="pooled")


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, keys and presence of a batch with some links absent, none of row 4."""
    generator = torch.Generator().manual_seed(seed)
    present = torch.ones(B, K, dtype=torch.bool)
    present[1, 3:] = False
    present[4] = False
    return (
        torch.randn(B, K, F, generator=generator),
        torch.randn(B, K, D, generator=generator),
        present,
    )


def build_bottom(config: FeTConfig, *, seed: int = 3) -> FeTBottom:
    """Return an initialised bottom model in evaluation mode."""
    bottom = FeTBottom(config, num_features=F, key_dim=D)
    initialise(bottom, seed=seed, positions_seed=seed)
    return bottom.eval()


def test_positional_encoding_is_the_formula_of_the_paper() -> None:
    """[Li21] equations (2) and (6), written out element by element in float64."""
    positions = FourierPositions(D, num_features=6, hidden=4, width=3, scale=0.5).double()
    positions.requires_grad_(False)
    key = torch.tensor([[0.3, -1.2]], dtype=torch.float64)
    angles = [sum(w * x for w, x in zip(row, key[0], strict=True)) for row in positions.frequencies]
    r = [math.cos(a) / math.sqrt(6) for a in angles] + [math.sin(a) / math.sqrt(6) for a in angles]
    inner = [
        sum(w * x for w, x in zip(row, r, strict=True)) + b
        for row, b in zip(positions.into.weight, positions.into.bias, strict=True)
    ]
    gelu = [x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in inner]
    expected = [
        float(sum(w * x for w, x in zip(row, gelu, strict=True)) + b)
        for row, b in zip(positions.out.weight, positions.out.bias, strict=True)
    ]

    assert positions(key)[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_frequencies_start_with_standard_deviation_one_over_gamma() -> None:
    """N(0, gamma^-2) is a variance: gamma = 0.05 gives 20, not 400; seed fixed, 5 sigma wide."""
    positions = FourierPositions(4, num_features=10_000, hidden=2, width=2, scale=0.05)
    initialise(positions, seed=1, positions_seed=1)
    n = positions.frequencies.numel()

    assert float(positions.frequencies.detach().std()) == pytest.approx(
        20, rel=5 / math.sqrt(2 * n)
    )


def test_fourier_features_approximate_the_gaussian_kernel() -> None:
    """r(x).r(y) is near exp(-|x-y|^2 / (2 gamma^2)) / 2, so near keys are encoded alike."""
    positions = FourierPositions(D, num_features=20_000, hidden=2, width=2, scale=0.7)
    positions.requires_grad_(False)
    initialise(positions, seed=4, positions_seed=4)
    x, y = torch.tensor([[0.2, 0.1]]), torch.tensor([[0.6, -0.4]])
    product = float((positions.features(x) * positions.features(y)).sum())

    # The mean of 10,000 cosines, each of standard deviation at most 1: five of them.
    assert product == pytest.approx(
        0.5 * math.exp(-(0.4**2 + 0.5**2) / (2 * 0.7**2)), abs=0.5 * 5 / 100
    )


def test_octaves_spread_the_frequencies_and_leave_features_at_full_size() -> None:
    """The last row's deviation is 2^octaves that of the first; features have a mean square of 1."""
    rows, octaves = 4_000, 5
    positions = FourierPositions(
        D, num_features=2 * rows, hidden=2, width=2, scale=0.5, octaves=octaves
    )
    positions.requires_grad_(False)
    initialise(positions, seed=6, positions_seed=6)
    tenth = rows // 10
    deviations = [
        float(part.square().mean().sqrt())
        for part in (positions.frequencies[:tenth], positions.frequencies[-tenth:])
    ]
    # Deviations within a tenth of the rows, squared and averaged over the half octave there.
    within = np.linspace(0, octaves, rows)[:tenth]
    expected = float(np.sqrt(np.mean(4.0**within))) / 0.5
    square = positions.features(torch.randn(50, D)).square().mean(dim=1)

    # Five deviations of the estimate, from 2 * tenth numbers; seed fixed.
    assert deviations[0] == pytest.approx(expected, rel=5 / math.sqrt(4 * tenth))
    assert deviations[1] / deviations[0] == pytest.approx(
        2 ** (octaves * (rows - tenth) / (rows - 1)), rel=10 / math.sqrt(4 * tenth)
    )
    torch.testing.assert_close(square, torch.ones(50))


@pytest.mark.parametrize(("octaves", "learned"), [(None, True), (0, False)])
def test_what_near_keys_say_is_learned_from_the_first_epochs(
    octaves: int | None, learned: bool
) -> None:
    """A label that changes from one twentieth of a deviation to the next, as of flats near schools.

    With one frequency scale, as in the paper, as many steps learn none of it: its keys look alike.
    """
    generator = torch.Generator().manual_seed(8)
    keys = torch.rand(256, D, generator=generator)
    label = torch.randn(20, 20, generator=generator)[tuple((20 * keys).long().T)]
    config = FeTConfig(fourier_octaves=octaves)
    positions = fourier_positions(config, D)
    initialise(positions, seed=8, positions_seed=8)
    output = nn.Linear(config.hidden, 1)
    initialise(output, seed=9, positions_seed=9)
    optimizer = torch.optim.AdamW([*positions.parameters(), *output.parameters()], lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        loss = (output(positions(keys))[:, 0] - label).square().mean()
        loss.backward()
        optimizer.step()

    explained = 1 - float(loss.detach() / label.var())
    assert explained > 0.8 if learned else explained < 0.2


def test_keys_of_many_columns_and_the_papers_form_have_one_frequency_scale() -> None:
    """Few frequencies cover a plane in detail, not four dimensions; the file may say otherwise."""
    assert [FeTConfig().octaves(dimension) for dimension in (1, 2, 3, 4)] == [5, 5, 0, 0]
    assert FeTConfig(fourier_octaves=3).octaves(4) == 3
    assert FeTFamily.presets["paper"].model["fourier_octaves"] == 0


def test_attention_is_softmax_of_scores_plus_bias() -> None:
    """The fused kernel against attention written out; minus infinity hides a position."""
    attention = Attention(8, heads=2)
    queries, memory = torch.randn(3, 4, 8), torch.randn(3, 5, 8)
    bias = torch.randn(3, 5)
    bias[:, 2] = float("-inf")
    q = attention.query(queries).view(3, 4, 2, 4)
    k, v = attention.key_value(memory).view(3, 5, 2, 2, 4).unbind(2)
    scores = torch.einsum("bqhe,bmhe->bhqm", q, k) / 2 + bias[:, None, None, :]
    mixed = torch.einsum("bhqm,bmhe->bqhe", scores.softmax(-1), v).reshape(3, 4, 8)

    torch.testing.assert_close(attention(queries, memory, bias), attention.out(mixed))


def test_reordering_links_reorders_a_sequence() -> None:
    """A bottom model is equivariant: masks and attention do not know the order of the links."""
    bottom = build_bottom(dataclasses.replace(SEQUENCE, ranked=False))
    features, keys, present = batch(1)
    order = torch.tensor([4, 0, 5, 2, 1, 3])

    torch.testing.assert_close(
        bottom(features[:, order], keys[:, order], present[:, order]),
        bottom(features, keys, present)[:, order],
        atol=1e-5,
        rtol=1e-4,
    )


def test_reordering_links_leaves_a_pooled_row_alone() -> None:
    """One vector a row is invariant to the order of its links."""
    bottom = build_bottom(dataclasses.replace(POOLED, ranked=False))
    features, keys, present = batch(2)
    order = torch.tensor([4, 0, 5, 2, 1, 3])

    torch.testing.assert_close(
        bottom(features[:, order], keys[:, order], present[:, order]),
        bottom(features, keys, present),
        atol=1e-5,
        rtol=1e-4,
    )


def test_learned_ranks_know_the_order_of_links() -> None:
    """A rank's number moves attention to that place in the list; another order, another row."""
    bottom = build_bottom(POOLED)
    features, keys, _ = batch(2)
    present = torch.ones(B, K, dtype=torch.bool)
    with torch.no_grad():
        bottom.rank_bias[0] = 50.0
    out = bottom(features, keys, present)
    others = torch.tensor([0, 5, 4, 3, 2, 1])
    swapped = torch.tensor([1, 0, 2, 3, 4, 5])

    torch.testing.assert_close(
        bottom(features[:, others], keys[:, others], present), out, atol=1e-5, rtol=1e-4
    )
    assert not torch.allclose(bottom(features[:, swapped], keys[:, swapped], present), out)


@pytest.mark.parametrize("decay", [0.0, 1.0, 2.0])
def test_a_pooled_row_starts_by_the_ranks_of_its_links(decay: float) -> None:
    """Without a mask and blocks, the j-th of the links that are there has j^-decay of the mean."""
    config = dataclasses.replace(POOLED, rank_prior=decay, dynamic_masking=False)
    bottom = build_bottom(config)
    bottom.blocks = nn.ModuleList()
    features, keys, present = batch(2)
    shares = torch.tensor([j**-decay for j in range(1, K + 1)]) * present
    shares = shares / shares.sum(dim=1, keepdim=True).clamp_min(1e-9)
    links = bottom.norm(bottom.embedding(features, keys))

    expected = (links * shares.unsqueeze(2)).sum(dim=1, keepdim=True)
    torch.testing.assert_close(bottom(features, keys, present), expected)


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_the_primarys_attention_starts_by_ranks(
    decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that all look alike get j^-decay of its attention each; with 0 it is even."""
    config = dataclasses.replace(SEQUENCE, rank_prior=decay)
    top = FeTTop(config, num_features=F, key_dim=D, outputs=1)
    initialise(top, seed=3, positions_seed=3)
    alike = torch.randn(B, 1, 16).expand(-1, K, -1)
    shares: list[torch.Tensor] = []

    def noted(scores: torch.Tensor) -> torch.Tensor:
        shares.append(softmax(scores))
        return shares[-1]

    monkeypatch.setattr(attention, "softmax", noted)
    top.eval()(torch.randn(B, F), torch.randn(B, D), alike, None)
    expected = np.arange(1, K + 1) ** -decay

    assert shares[0].mean(dim=(0, 1)).tolist() == pytest.approx(expected / expected.sum(), abs=1e-5)


def test_without_ranks_nothing_tells_a_near_link_from_a_far_one() -> None:
    """``rank_prior`` is a start of what is learned; where nothing is, it is not there."""
    config = dataclasses.replace(SEQUENCE, ranked=False, rank_prior=4.0)
    top = FeTTop(config, num_features=F, key_dim=D, outputs=1)
    initialise(top, seed=3, positions_seed=3)
    features, keys, aggregate = torch.randn(B, F), torch.randn(B, D), torch.randn(B, K, 16)
    told = top.eval()(features, keys, aggregate, None)

    torch.testing.assert_close(top(features, keys, aggregate.flip(1), None), told)


@pytest.mark.parametrize("config", [SEQUENCE, POOLED], ids=["sequence", "pooled"])
def test_absent_links_have_no_influence(config: FeTConfig) -> None:
    """What stands in an absent link's place changes nothing, gradients included."""
    bottom = build_bottom(config)
    features, keys, present = batch(3)
    absent = ~present.unsqueeze(-1)
    features.requires_grad_()
    out = bottom(features, keys, present)
    out.square().sum().backward()
    other = bottom(features + 7 * absent, keys - 9 * absent, present)

    torch.testing.assert_close(other, out)
    assert torch.count_nonzero(features.grad * absent) == 0


@pytest.mark.parametrize("config", [SEQUENCE, POOLED], ids=["sequence", "pooled"])
def test_a_row_without_links_is_zero_and_finite(config: FeTConfig) -> None:
    """No NaN from a softmax over nothing, forwards or backwards."""
    bottom = build_bottom(config)
    features, keys, present = batch(4)
    out = bottom(features, keys, present)
    out.square().sum().backward()

    assert torch.count_nonzero(out[4]) == 0
    assert torch.count_nonzero(out[0]) > 0
    assert all(
        bool(torch.isfinite(p.grad).all()) for p in bottom.parameters() if p.grad is not None
    )


def test_rows_do_not_mix() -> None:
    """Changing one row's links leaves every other row's representation as it was."""
    bottom = build_bottom(SEQUENCE)
    features, keys, present = batch(5)
    changed = features.clone()
    changed[0] += 1
    before, after = bottom(features, keys, present), bottom(changed, keys, present)

    torch.testing.assert_close(after[1:], before[1:])
    assert not torch.allclose(after[0], before[0])


def test_every_parameter_gets_a_gradient() -> None:
    """Nothing is built and left unused, in the bottom models or the top."""
    features, keys, present = batch(6)
    for config in (SEQUENCE, POOLED):
        bottom = build_bottom(config)
        top = FeTTop(config, num_features=4, key_dim=D, outputs=2)
        out = top(torch.randn(B, 4), torch.randn(B, D), bottom(features, keys, present), None)
        out.square().sum().backward()
        dead = [
            name
            for model in (bottom, top)
            for name, parameter in model.named_parameters()
            if parameter.grad is None or torch.count_nonzero(parameter.grad) == 0
        ]
        # A pooled aggregate has one position, whose softmax is 1 whatever the scores, and so does
        # the primary's own row; a softmax does not see one bias added to all scores either.
        lone = (
            ".attention.query",
            "self_attention.query",
            "memory_attention.query",
            "decoder.0.memory_norm",
            "mask.score.layers.3.bias",
        )
        assert [name for name in dead if not any(part in name for part in lone)] == []


def test_the_mask_moves_attention() -> None:
    """A link whose mask is very low no longer matters; with masking off, it does."""
    keys, present = torch.randn(1, K, D), torch.ones(1, K, dtype=torch.bool)
    bias = attention_bias(torch.tensor([[0.0, 0, 0, 0, 0, -50.0]]), present)
    attention = Attention(8, heads=2)
    memory = torch.randn(1, K, 8)
    changed = memory.clone()
    changed[0, 5] += 3
    hidden = attention(memory, memory, bias)[0, :5] - attention(memory, changed, bias)[0, :5]
    plain = attention(memory, memory)[0, :5] - attention(memory, changed)[0, :5]

    assert float(hidden.detach().abs().max()) < 1e-6 < 1e-3 < float(plain.detach().abs().max())
    assert DynamicMask(D, hidden=4)(keys, present).shape == (1, K)


def test_the_mask_reads_how_a_link_lies_to_its_neighbourhood() -> None:
    """Moving one link moves the masks of the others: they are relative to the links' centre."""
    mask = DynamicMask(D, hidden=8)
    keys, present = torch.randn(1, K, D), torch.ones(1, K, dtype=torch.bool)
    moved = keys.clone()
    moved[0, 0] += 5

    assert not torch.allclose(mask(keys, present)[0, 1:], mask(moved, present)[0, 1:])


@pytest.mark.parametrize("kind", ["fourier", "linear"])
def test_a_frozen_encoder_works_record_by_record(kind: str) -> None:
    """Changing one link changes its own position alone, and absent ones are zero."""
    bottom = FrozenBottom(FeTConfig(frozen_map=kind, hidden=16), num_features=F, key_dim=D)
    initialise(bottom, seed=2, positions_seed=2)
    features, keys, present = batch(7)
    changed = features.clone()
    changed[0, 2] += 1
    before, after = bottom(features, keys, present), bottom(changed, keys, present)
    differs = (before != after).any(dim=2)

    assert differs.nonzero().tolist() == [[0, 2]]
    assert torch.count_nonzero(before[~present]) == 0


def test_a_frozen_encoder_has_nothing_to_learn() -> None:
    """No parameter, no gradient, the same in training and in evaluation, and it is saved."""
    bottom = FrozenBottom(FeTConfig(hidden=16, dropout=0.5), num_features=F, key_dim=D)
    features, keys, present = batch(8)

    assert list(bottom.parameters()) == []
    assert not bottom(features, keys, present).requires_grad
    assert torch.equal(
        bottom.train()(features, keys, present), bottom.eval()(features, keys, present)
    )
    assert set(bottom.state_dict()) == {"projection", "phase"}


def test_frozen_fourier_features_approximate_their_kernel() -> None:
    """[RR07]: inner products near exp(-|x-y|^2 / (2 s^2)), s = bandwidth sqrt(inputs)."""
    config = FeTConfig(hidden=16_384, heads=1, frozen_bandwidth=0.8, keys_as_features=False)
    bottom = FrozenBottom(config, num_features=F, key_dim=D)
    initialise(bottom, seed=5, positions_seed=5)
    x, y = torch.tensor([0.2, 0.5, -0.3]), torch.tensor([-0.1, 0.9, 0.4])
    out = bottom(torch.stack([x, y])[None], torch.zeros(1, 2, D), torch.ones(1, 2) > 0)[0]
    expected = math.exp(-float((x - y).square().sum()) / (2 * 0.8**2 * F))

    # 16,384 terms 2 cos cos / 16,384, each of standard deviation at most sqrt(2): five of them.
    assert float(out[0] @ out[1]) == pytest.approx(expected, abs=5 * math.sqrt(2) / 128)


@pytest.mark.parametrize("config", [SEQUENCE, POOLED], ids=["sequence", "pooled"])
def test_a_small_batch_can_be_learned_by_heart(config: FeTConfig) -> None:
    """Labels that only the linked records tell are fitted: gradients reach the bottom model."""
    bottom = build_bottom(config).train()
    top = FeTTop(config, num_features=1, key_dim=D, outputs=2)
    initialise(top, seed=1, positions_seed=3)
    generator = torch.Generator().manual_seed(11)
    features = torch.randn(16, K, F, generator=generator)
    keys = torch.randn(16, K, D, generator=generator)
    present = torch.ones(16, K, dtype=torch.bool)
    labels = (features[:, :, 0].mean(dim=1) > 0).long()
    own, own_keys = torch.zeros(16, 1), torch.zeros(16, D)
    parameters = [*bottom.parameters(), *top.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    loss = torch.tensor(math.inf)
    for _ in range(100):
        # As in a run: rows are clipped to norm 1 before the primary sees them.
        part = nn.functional.normalize(bottom(features, keys, present), dim=(1, 2))
        loss = nn.functional.cross_entropy(top(own, own_keys, part, None), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert float(loss.detach()) < 0.1


def test_the_aggregates_scale_does_not_matter_to_the_top() -> None:
    """A clip norm of 1e-2 leaves the primary's outputs where 1 does."""
    top = FeTTop(SEQUENCE, num_features=4, key_dim=D, outputs=2).eval()
    own, keys, part = torch.randn(B, 4), torch.randn(B, D), torch.randn(B, K, 16) / 10

    torch.testing.assert_close(
        top(own, keys, part / 100, None), top(own, keys, part, None), atol=1e-3, rtol=0
    )


def test_no_model_holds_a_batch_norm() -> None:
    """Rows of a batch must not mix in a bottom model (docs/privacy.md, section 4)."""
    for model in (build_bottom(SEQUENCE), FeTTop(SEQUENCE, num_features=4, key_dim=D, outputs=2)):
        assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_cpus_outputs() -> None:
    """The same weights and inputs give the same outputs on both devices."""
    bottom = build_bottom(SEQUENCE)
    features, keys, present = batch(9)
    here = bottom(features, keys, present)
    there = bottom.cuda()(features.cuda(), keys.cuda(), present.cuda())

    torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=1e-4)
