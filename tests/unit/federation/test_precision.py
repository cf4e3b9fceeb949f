"""Networks compute in bfloat16 where the federation file says so, and nothing else does."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.fixed_entropy import fixed_entropy
from helpers.labelled_cuda import labelled_cuda
from helpers.labelled_runs import RUNS, run, write
from helpers.secondaries import FEATURES, LINKS, ROWS, WIDTH, make_secondary
from torch import nn

from securevfl import read_federation
from securevfl.core.devices import computing_in
from securevfl.core.errors import ConfigError
from securevfl.core.progress import ProgressEvent, RoundDone
from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.release import SecondaryRelease
from securevfl.federation.rounds.secondary import Secondary
from securevfl.models.fet import attention
from securevfl.models.fet.attention import EncoderBlock, softmax
from securevfl.models.fet.family import FeTBottom
from securevfl.models.fet.positions import FourierPositions
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.optimisers import PacedOptimizer
from securevfl.models.tasks import TaskHead
from securevfl.stages.pretraining.learner import Objective, PartyLearner

SINGLE, HALF = torch.float32, torch.bfloat16


def sections(name: str, precision: str) -> dict[str, Any]:
    """Return a run's sections with the precision of its networks."""
    found = {**RUNS[name], "training": {**RUNS[name].get("training", {}), "precision": precision}}
    if "pretraining" in found:
        found["pretraining"] = {**found["pretraining"], "precision": precision}
    return found


@contextmanager
def dtypes_seen() -> Iterator[dict[str, set[torch.dtype]]]:
    """Collect the dtypes of what linear layers give, and of what crosses each boundary."""
    seen: dict[str, set[torch.dtype]] = {}

    def see(what: str, *values: Any) -> None:
        seen.setdefault(what, set()).update(
            one.dtype for one in values if isinstance(one, torch.Tensor) and one.is_floating_point()
        )

    def layer(module: nn.Module, _inputs: Any, output: Any) -> None:
        if type(module) is nn.Linear:
            see("a layer's output", output)

    def spied(owner: type, name: str, what: str) -> Any:
        method = getattr(owner, name)

        def call(self: Any, *args: Any, **more: Any) -> Any:
            see(what, *args, *more.values())
            found = method(self, *args, **more)
            see(what, *(found if isinstance(found, list) else [found]))
            return found

        return mock.patch.object(owner, name, call)

    def stepped(self: PacedOptimizer, *args: Any, **more: Any) -> None:
        step(self, *args, **more)
        see("a weight", *self.parameters, *(one.grad for one in self.parameters))

    release, step = SecondaryRelease.release, PacedOptimizer.step

    def released(own: SecondaryRelease, plan: Any, represent: Any, **more: Any) -> Any:
        def given(due: RoundPlan) -> torch.Tensor:
            found: torch.Tensor = represent(due)
            see("what is clipped", found)
            return found

        return release(own, plan, given, **more)

    watched = nn.modules.module.register_module_forward_hook(layer)
    try:
        with (
            mock.patch.object(SecondaryRelease, "release", released),
            mock.patch.object(PacedOptimizer, "step", stepped),
            spied(TaskHead, "loss", "a loss"),
            spied(Secondary, "learn", "a gradient that travels"),
            spied(PartyLearner, "project", "a projection that travels"),
            spied(Objective, "__call__", "a loss of pretraining"),
        ):
            yield seen
    finally:
        watched.remove()


@pytest.mark.parametrize("name", ["fet", "fet-dp", "fedsim-paper", "fedgssl"])
def test_layers_are_half_and_all_between_parties_is_single(name: str, tmp_path: Path) -> None:
    """Losses are near those of single precision, as the same seeds give them."""
    losses, seen = {}, {}
    for precision in ("float32", "bfloat16"):
        folder = tmp_path / precision
        folder.mkdir()
        path = write(folder, sections(name, precision))
        with fixed_entropy(), dtypes_seen() as seen[precision]:
            losses[precision] = run(path, folder / "run", device="cpu").losses

    assert seen["float32"].pop("a layer's output") == {SINGLE}
    assert HALF in seen["bfloat16"].pop("a layer's output")
    assert len(seen["float32"]) >= (6 if name == "fedgssl" else 4)
    assert set(seen["float32"]) == set(seen["bfloat16"])
    for what, dtypes in seen["bfloat16"].items():
        assert dtypes == {SINGLE}, what
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.03)


def test_a_promise_holds_in_half_precision() -> None:
    """One record moves its own rows alone, to the last bit, and no row is over the clip norm."""
    secondary = make_secondary(bottom=_fet(), clip_norm=0.25)
    secondary.contribution.noise = ExactDiscreteGaussian(1000.0)
    secondary.precision = "bfloat16"
    links = secondary.data.links.link(np.arange(ROWS)).indices
    index, present = torch.from_numpy(links).clamp_min(0), torch.from_numpy(links >= 0)
    plan = RoundPlan(round_number=1, rows=np.arange(ROWS), active=(1,), purpose="test")
    before = secondary.represent(plan)
    secondary.data.features[index[0, 0]] += 1.0
    after = secondary.represent(plan)
    others = ~((index == index[0, 0]) & present).any(dim=1)
    assert others.any()
    assert not others.all()
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])

    clipped = secondary.contribution.aggregation.clip(100 * after)
    assert clipped.dtype == SINGLE
    units = secondary.contribution.aggregation.units(clipped, bounded=True).double()
    length = (
        (units * secondary.contribution.aggregation.cut.ring.granularity).flatten(1).norm(dim=1)
    )
    assert 0.249 < float(length.max()) <= 0.25


def _fet() -> nn.Module:
    torch.manual_seed(0)
    config = FeTConfig(neighbours=LINKS, hidden=WIDTH, heads=1, dropout=0.0)
    return FeTBottom(config, num_features=FEATURES, key_dim=2)


def test_angles_norms_and_shares_of_attention_are_single() -> None:
    """Half precision would put places many radians off, and give shares three digits."""
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    positions = FourierPositions(2, num_features=8, hidden=8, width=8, scale=1.0, octaves=5)
    keys = 10 * torch.randn(20, 2)
    block = EncoderBlock(FeTConfig(neighbours=4, hidden=8, heads=2, dropout=0.0))
    hidden = torch.randn(5, 4, 8)

    def shares_of_attention() -> torch.Tensor:
        noted: list[torch.Tensor] = []

        def note(scores: torch.Tensor) -> torch.Tensor:
            noted.append(softmax(scores))
            return noted[-1]

        with mock.patch.object(attention, "softmax", note):
            block(hidden)
        return noted[0]

    shares, features = shares_of_attention(), positions.features(keys)
    with computing_in("bfloat16", cpu):
        assert positions(keys).dtype == HALF
        assert torch.equal(positions.features(keys), features)
        assert block.attention_norm(hidden.bfloat16()).dtype == SINGLE
        half = shares_of_attention()
        with computing_in("float32", cpu):
            assert torch.equal(shares_of_attention(), shares), "a block within a block has its own"
    assert half.dtype == SINGLE
    torch.testing.assert_close(half.sum(dim=-1), torch.ones(5, 2, 4))


class CutError(Exception):
    """The end of a run before its time."""


def _cut_in_epoch_2(event: ProgressEvent) -> None:
    if isinstance(event, RoundDone) and event.epoch == 2:
        raise CutError


def test_a_cut_run_goes_on_and_a_kept_model_answers_as_it_did(tmp_path: Path) -> None:
    """To the last bit of each loss, and of each answer for a test row."""
    made = sections("fet", "bfloat16")
    path = write(tmp_path, {**made, "training": {**made["training"], "epochs": 2}})
    whole = run(path, tmp_path / "whole", device="cpu")
    with pytest.raises(CutError):
        run(path, tmp_path / "cut", device="cpu", observe=_cut_in_epoch_2)
    again = run(path, tmp_path / "cut", device="cpu", resume=True)
    assert again.losses == whole.losses[-len(again.losses) :]

    written = pd.read_csv(tmp_path / "whole" / "predictions.csv")
    table = pd.read_csv(tmp_path / "agency.csv")
    assert whole.trained is not None
    answers = whole.predict(table.iloc[written["row"] - 1].reset_index(drop=True)).frame()
    given = [f"probability_{number}" for number in range(3)]
    assert np.array_equal(answers[given], written[given])


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("fet-linear", {}, "training.precision: model.top trains no network"),
        (
            "fet",
            {"precision": "float16"},
            "training.precision: must be one of 'float32', 'bfloat16'",
        ),
    ],
)
def test_where_it_means_nothing_it_is_refused(
    name: str, changes: dict[str, str], said: str, tmp_path: Path
) -> None:
    made = sections(name, "bfloat16")
    made["training"] |= changes
    with pytest.raises(ConfigError) as refused:
        read_federation(write(tmp_path, made))
    assert said in str(refused.value)


def test_a_gpu_without_bfloat16_is_refused_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an old GPU")
    path = write(tmp_path, sections("fet", "bfloat16"))
    with labelled_cuda(), pytest.raises(ConfigError, match="an old GPU does not compute in bfloat"):
        run(path, tmp_path / "run", device="cuda")
    assert not (tmp_path / "run").exists()
