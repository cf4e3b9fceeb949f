"""The benchmark of ISO noise: whom its noise reaches, and what its tables and its figure say."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.scripts import run_script

from research.fedhssl import methods, privacy


def test_fine_tuning_noises_what_secondaries_learn_and_no_more() -> None:
    prepared = methods.prepare(privacy.SETS["digits"][0](None), "cpu")
    setting = methods.Setting(model={"encoder_hidden": 8, "hidden": 8}, pretraining={})
    config = methods.family_config("fedsplitnn", setting)
    torch.manual_seed(1)
    top = methods.FedHSSLTop(config, num_features=32, outputs=10)
    bottom = methods.FedHSSLBottom(config, num_features=32)
    rows = torch.arange(64)

    def gradients(scale: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outputs = methods.joint(top, [bottom], prepared.views, rows, iso_scale=scale)
        prepared.head.loss(outputs, prepared.targets[rows]).backward()
        found = [[p.grad for p in m.parameters() if p.grad is not None] for m in (top, bottom)]
        for model in (top, bottom):
            model.zero_grad()
        return found[0], found[1]

    (own, theirs), (own_noised, theirs_noised) = gradients(0.0), gradients(5.0)
    assert all(map(torch.equal, own, own_noised))
    # Equal by chance with probability below 1e-100.
    assert not any(map(torch.equal, theirs, theirs_noised))


def test_the_attack_recovers_what_a_model_knows_of_classes() -> None:
    """A model that hands its columns on knows something of digits; one of zeros does not."""
    prepared = methods.prepare(privacy.SETS["digits"][0](None), "cpu")

    class Hands(torch.nn.Module):
        def __init__(self, weight: float) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, view: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return self.weight * view

    assert privacy.recovered(prepared, [Hands(1.0)], 0) > 0.6
    assert privacy.recovered(prepared, [Hands(0.0)], 0) < 0.2


def line(seed: int, value: float, **cell: Any) -> dict[str, Any]:
    return {
        "set": "made", "metric": "accuracy", "seed": seed, "value": value, "method": "fedhssl",
        "algorithm": "simsiam", "aligned": 0.2, "lambda_f": 0.0, **cell,
    }  # fmt: skip


def test_tables_pair_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """Losses of 2, 3 and 4 points: mean 3, and 4.303 / sqrt(3) = 2.5 by Student's t (2 degrees)."""
    base = (0.90, 0.92, 0.94)
    made = [line(seed, value, places=None, lambda_p=0.0) for seed, value in enumerate(base)]
    made += [
        line(seed, value - 0.02 - 0.01 * seed, places="both", lambda_p=0.4)
        for seed, value in enumerate(base)
    ]
    privacy.print_pretraining(made)
    rows = capsys.readouterr().out.splitlines()
    assert "| simsiam: nothing | 0 | 0.920 ± 0.020 |  |" in rows
    assert "| simsiam: both | 0.4 | 0.890 ± 0.010 | -3.0 ± 2.5 |" in rows
    assert np.count_nonzero(["both" in row for row in rows]) == 1


def test_the_figure_of_measured_strengths_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The paper's Table XI, NUSWIDE with 20 % aligned, gives Table XII's 0.284."""
    command = ["cap"]
    for point in (("1", "0.538", "0.471"), ("5", "0.519", "0.449"), ("25", "0.503", "0.443")):
        command += ["--point", *point]
    run_script("fedhssl/privacy.py", *command)
    assert capsys.readouterr().out.strip() == "0.284"
