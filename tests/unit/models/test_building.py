"""A family's models are held to what they claim before a run depends on it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp.regime import REGIMES
from securevfl.models.building import (
    bottom_of,
    check_bottom,
    check_top,
    require_no_batch_norm,
    require_rows_apart,
    top_of,
)
from securevfl.models.fet.family import FeTFamily
from securevfl.models.registry import FAMILIES

FET = FAMILIES["fet"]
SETTINGS = FET.settings_class(neighbours=3, hidden=4, heads=2)


class Recordwise(nn.Module):
    """A bottom model made of one function of features and presence."""

    recordwise = True

    def __init__(self, compute: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.positions = nn.Identity()
        self.layer = nn.Linear(2, 4)
        self.compute = compute

    def forward(self, features: Tensor, keys: Tensor, present: Tensor) -> object:
        return self.compute(self.layer(features), present.unsqueeze(-1))


class Whole(Recordwise):
    """The same, and records may be mixed."""

    recordwise = False


def check(bottom: nn.Module, *, pooled: bool = False) -> None:
    check_bottom(FET, SETTINGS, bottom, num_features=2, key_dim=1, pooled=pooled)


@pytest.mark.parametrize(
    "compute",
    [
        lambda records, present: (records + records.mean(dim=1, keepdim=True)) * present,
        lambda records, present: records.flip(1) * present,
        lambda records, _: records,
    ],
    ids=["mean", "other order", "absent links"],
)
def test_records_that_are_not_alone_are_refused(
    compute: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Where L = K, a clip of each record bounds nothing if one moves several positions."""
    check(Recordwise(lambda records, present: records * present))
    check(Whole(compute))
    with pytest.raises(PrivacyError, match="bottom model of 'fet' claims to be recordwise"):
        check(Recordwise(compute))


def test_pooling_needs_records_alone() -> None:
    """A release that averages K clipped vectors takes the claim as its bound."""
    with pytest.raises(PrivacyError, match="is not recordwise, but its vectors are clipped"):
        check(Whole(lambda records, present: records * present), pooled=True)


@pytest.mark.parametrize(
    ("compute", "complaint"),
    [
        (lambda records, _: records[:, :1], r"gives \(2, 1, 4\) .* expected \(2, 3, 4\)"),
        (lambda records, _: {"out": records}, "gives dict for a batch of 2 rows"),
        (lambda records, _: records @ records, r"fails on .*RuntimeError: .*test_building\.py:\d+"),
        (nn.Bilinear(2, 2, 1), r"fails on .*RuntimeError: .*test_building\.py:\d+"),
    ],
)
def test_other_shapes_are_refused(
    compute: Callable[[Tensor, Tensor], object], complaint: str
) -> None:
    """With what came and what must come, or with the place of the error."""
    with pytest.raises(ConfigError, match=complaint):
        check(Whole(compute))


def test_parts_that_are_missing_are_named() -> None:
    """A plain module is no half of a network."""
    with pytest.raises(ConfigError, match="bottom model of 'fet' lacks positions or recordwise"):
        check(nn.Linear(2, 4))
    with pytest.raises(ConfigError, match="top model of 'fet' lacks positions"):
        check_top(FET, SETTINGS, nn.Linear(2, 4), num_features=2, key_dim=1, outputs=1)


def test_tops_of_other_tasks_are_refused() -> None:
    """Three classes need three logits."""
    top = FET.build_top(SETTINGS, num_features=2, key_dim=1, outputs=2)
    check_top(FET, SETTINGS, top, num_features=2, key_dim=1, outputs=2)
    with pytest.raises(ConfigError, match=r"top model of 'fet' gives \(2, 2\).* expected \(2, 3\)"):
        check_top(FET, SETTINGS, top, num_features=2, key_dim=1, outputs=3)


class Broken(FeTFamily):
    """Its builders fail."""

    def build_bottom(self, settings: object, **_: object) -> nn.Module:
        raise KeyError(type(settings).__name__)

    def build_top(self, settings: object, **_: object) -> nn.Module:
        return nn.Linear(0, "two")


def test_builders_that_fail_are_named() -> None:
    """With the error, and the line of the family's own code."""
    sizes = {"num_features": 2, "key_dim": 1, "feature_names": ("a", "b")}
    with pytest.raises(ConfigError, match=r"bottom model of 'fet' can't be built: KeyError: 'FeTC"):
        bottom_of(Broken(), SETTINGS, frozen=False, pooled=False, **sizes)
    with pytest.raises(ConfigError, match=r"top model .*TypeError: .*test_building\.py:\d+"):
        top_of(Broken(), SETTINGS, outputs=1, classes=False, **sizes)


def test_used_up_memory_is_no_fault_of_a_model() -> None:
    """What the machine lacks is not blamed on whoever wrote the family."""

    def needs_all(*_given: Tensor) -> Tensor:
        return torch.empty(1 << 60, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match="allocate memory") as raised:
        check(Whole(needs_all))
    assert not isinstance(raised.value, ConfigError)


def test_checks_leave_no_trace() -> None:
    """Modes, weights and random streams are as they were."""
    family = FAMILIES["fedsim"]
    settings = family.settings_class(sort="none", neighbours=6)
    bottom = family.build_bottom(settings, num_features=2, key_dim=1)
    top = family.build_top(settings, num_features=2, key_dim=1, outputs=1)
    top.pairs.eval()
    before = torch.get_rng_state()
    check_bottom(family, settings, bottom, num_features=2, key_dim=1, pooled=False)
    check_top(family, settings, top, num_features=2, key_dim=1, outputs=1)

    assert torch.equal(before, torch.get_rng_state())
    assert bottom.training
    assert top.training
    assert not top.pairs.training


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.LazyBatchNorm1d()])
def test_batch_norm_is_refused(layer: nn.Module) -> None:
    """One record would move every row of its batch."""
    with pytest.raises(PrivacyError, match="mixes the rows of a batch"):
        require_no_batch_norm(nn.Sequential(nn.Linear(4, 4), layer), encoder="dp-trained")
    require_no_batch_norm(nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4)), encoder="frozen")


def regime_of(encoder: str) -> dict[str, Any]:
    regime = REGIMES[encoder]
    return {
        "encoder": regime.name,
        "learns": regime.learns,
        "noises_updates": regime.noises_updates,
    }


def apart(bottom: nn.Module, encoder: str = "frozen") -> None:
    require_rows_apart(FET, SETTINGS, bottom, num_features=2, key_dim=1, **regime_of(encoder))


class Remembering(Whole):
    """Adds what it saw in the batch before."""

    def __init__(self) -> None:
        super().__init__(lambda records, _: records)
        self.before = torch.zeros(())

    def forward(self, features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        seen, self.before = self.before, features.detach().mean()
        return self.layer(features) + seen


class WhileTraining(Whole):
    """Mixes rows in training alone."""

    def forward(self, features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        out: Tensor = self.layer(features)
        return out - out.mean(dim=0) if self.training else out


class Growing(nn.Module):
    """Starts as nothing at all: its weights are zero."""

    recordwise = False

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Identity()
        self.weight = nn.Parameter(torch.zeros(2, 4))

    def forward(self, features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        out = features @ self.weight
        return out - out.mean(dim=0)


@pytest.mark.parametrize("encoder", ["frozen", "trained", "dp-trained"])
@pytest.mark.parametrize(
    ("bottom", "complaint"),
    [
        (Whole(lambda records, _: records - records.mean(0, keepdim=True)), "mixes the rows"),
        (Whole(lambda records, _: records.cumsum(0)), "mixes the rows"),
        (Whole(lambda records, _: records * records.abs().amax()), "mixes the rows"),
        (Whole(lambda records, _: records / (1 + records.norm() / 1e6)), "mixes the rows"),
        (WhileTraining(lambda _, __: None), "mixes the rows"),
        (Growing(), "mixes the rows"),
        (Remembering(), "keeps state between batches"),
        (
            Whole(lambda records, _: records if records[0].sum() > 1e9 else records + 0),
            r"can't be computed row by row.*data-dependent.*test_building\.py:\d+",
        ),
        (Whole(lambda records, _: records + records.max().item() * 0), "row by row"),
    ],
    ids=[
        "mean", "sum", "largest", "little", "training", "zeros", "memory", "if", "number",
    ],
)  # fmt: skip
def test_rows_that_are_not_alone_are_refused(
    bottom: nn.Module, complaint: str, encoder: str
) -> None:
    """Whatever layers it is made of, as soon as one of a few rows shows it."""
    with pytest.raises(PrivacyError, match=f"bottom model of 'fet' .*{complaint}"):
        apart(bottom, encoder)


OWN = {
    "fet": {"neighbours": 3, "hidden": 8, "heads": 2},
    "fedsplitnn": {"norm": "layer", "encoder_hidden": 8, "hidden": 8},
    **{name: {"hidden": 8} for name in ("fedsim", "exact", "top1sim", "avgsim", "featuresim")},
}


@pytest.mark.parametrize("encoder", ["frozen", "dp-trained"])
@pytest.mark.parametrize(
    "name",
    [name for name, one in FAMILIES.items() if not one.pretraining and name != "class-means"],
)
def test_own_families_keep_rows_apart(name: str, encoder: str) -> None:
    """They are held to it here, and not in every run."""
    family = FAMILIES[name]
    settings = family.settings_class(**OWN.get(name, {}))
    bottom = family.build_bottom(settings, num_features=2, key_dim=1, frozen=encoder == "frozen")
    sizes = {"num_features": 2, "key_dim": 1}
    require_rows_apart(family, settings, bottom, **regime_of(encoder), **sizes)


class Attending(Whole):
    """What people write: torch's own layer of attention, and a linear one."""

    def __init__(self) -> None:
        super().__init__(lambda records, _: records)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)

    def forward(self, features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        records = self.layer(features)
        # The mean of a row without a link is that of its empty slots.
        mask = ~present & present.any(dim=1, keepdim=True)
        out: Tensor = self.attention(records, records, records, key_padding_mask=mask)[0]
        return out * present.unsqueeze(-1)


@pytest.mark.parametrize("encoder", ["frozen", "dp-trained"])
def test_attention_keeps_rows_apart(encoder: str) -> None:
    """Also where torch has it go row after row, and without torch's warning of that."""
    apart(Attending(), encoder)


def test_what_is_tried_stays_as_it_was() -> None:
    """Also weights and buffers; dropped units and own draws do not look like mixing."""
    bottom = Whole(lambda records, _: nn.functional.dropout(records, training=bottom.training))
    bottom.layer = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.LayerNorm(4))
    before = {name: value.clone() for name, value in bottom.state_dict().items()}
    random = torch.get_rng_state()
    apart(bottom, "dp-trained")
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in bottom.state_dict().items())
    assert bottom.training
