"""Pictures of what a run's models learned: who gets which, and what a report shows."""

import tomllib
from pathlib import Path

import pandas as pd
import pytest
import torch

from securevfl.desk.report.page import write_report
from securevfl.desk.report.plots import section_of
from securevfl.models.fet.family import FeTBottom
from securevfl.models.fet.settings import FeTConfig
from securevfl.runtime.run_folder import write_explanation
from securevfl.testing import run_in_process, save_federation, write_federation

AVERAGED = {"average_positions_every": 1, "positions_start": "separate"}
MASK = "The FeT paper&#39;s Figure 3"
ATTENTION = "share of the decoder&#39;s attention"


def simulated(path: Path, run: Path) -> None:
    """Simulate a federation file, without measuring the primary alone."""
    run_in_process(path, run)


def test_a_simulation_without_a_promise_shows_all_parties(tmp_path: Path) -> None:
    """Masks and attention of each; a secondary's own file is private."""
    path = write_federation(tmp_path, model=AVERAGED, training={"epochs": 1})
    run = tmp_path / "run"
    simulated(path, run)
    page = write_report(run).read_text(encoding="utf-8")

    assert page.count(MASK) == 2, "the primary has no mask, each secondary has one"
    assert page.count(ATTENTION) == 1
    assert page.count('aria-label="attention by rank of the link"') == 3
    assert "What bank-2&#39;s model learned" in page
    own = run / "parties" / "bank-1"
    assert (own / "explanation.json").stat().st_mode & 0o777 == 0o600
    assert not (own / "pictures.html").exists(), "the report has them"


def test_behind_a_promise_a_secondary_keeps_its_pictures(tmp_path: Path) -> None:
    """The report has what the primary holds, as it would have between processes, and says where."""
    privacy = {
        "mechanism": "gaussian",
        "encoder": "dp-trained",
        "epsilon": 50.0,
        "delta": 1e-3,
        "links_per_record": 4,
        "clip_norm": 1.0,
    }
    path = write_federation(
        tmp_path, model=AVERAGED, training={"epochs": 1, "batch_size": 64}, privacy=privacy
    )
    source = tomllib.loads(path.read_text())
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-5.0, 5.0]}
    run = tmp_path / "run"
    simulated(save_federation(tmp_path, source), run)
    report = write_report(run)
    page = report.read_text(encoding="utf-8")

    assert MASK not in page
    assert "bank-1&#39;s model" not in page
    assert "parties/NAME/pictures.html" in page
    assert page.count(ATTENTION) == 1
    text = (run / "explanation.json").read_text()
    assert "bank" not in text
    assert "mask" not in text
    for party in ("bank-1", "bank-2"):
        own = run / "parties" / party / "pictures.html"
        assert own.stat().st_mode & 0o777 == 0o600
        assert MASK in own.read_text(encoding="utf-8")
        assert f"For {party} alone" in own.read_text(encoding="utf-8")


@pytest.mark.parametrize("keys", ["texts", "numbers"])
def test_frozen_encoders_have_nothing_to_show(tmp_path: Path, keys: str) -> None:
    """No mask and no average: one line says that nothing attends, whatever keys are."""
    path = write_federation(
        tmp_path,
        rows=120,
        model={"release": "pooled", "top": "additive", "keys_as_features": False},
        training={"epochs": 1},
        privacy={"mechanism": "none", "encoder": "frozen"},
        linkage={"metric": "levenshtein" if keys == "texts" else "euclidean"},
    )
    if keys == "texts":
        source = tomllib.loads(path.read_text())
        for party in source["party"]:
            table = pd.read_csv(tmp_path / party["data"])
            table["lon"] = [f"name {value:.0f}" for value in table["lon"]]
            table.drop(columns="lat").to_csv(tmp_path / party["data"], index=False)
            party["key"] = ["lon"]
        path = save_federation(tmp_path, source)
    run = tmp_path / "run"
    simulated(path, run)
    page = write_report(run).read_text(encoding="utf-8")

    assert "An additive top model attends to no link" in page
    assert MASK not in page
    assert not list(run.glob("parties/*/explanation.json"))


@pytest.mark.parametrize("dimension", [1, 4])
@pytest.mark.parametrize("learned", [True, False])
def test_keys_of_other_dimensions_are_drawn(tmp_path: Path, dimension: int, learned: bool) -> None:
    """A curve for one, the first two of four, said so; also where the mask is level."""
    bottom = FeTBottom(FeTConfig(neighbours=5, hidden=8), num_features=2, key_dim=dimension).eval()
    if not learned:
        for weights in bottom.parameters():
            weights.data.zero_()
    generator = torch.Generator().manual_seed(0)
    features, keys = (torch.randn(6, 5, size, generator=generator) for size in (2, dimension))
    write_explanation(tmp_path, bottom.explain(features, keys, torch.ones(6, 5, dtype=torch.bool)))
    section = section_of(tmp_path, title="of one party")

    assert len(section.pictures) == 2
    assert all(picture.svg.startswith("<svg") for picture in section.pictures)
    said = "Keys have 4 dimensions: the first two are varied" in section.pictures[0].caption
    assert said == (dimension == 4)
    # A scatter's dots are one image, a curve is none.
    assert ("<image" in section.pictures[0].svg) == (dimension == 4)
