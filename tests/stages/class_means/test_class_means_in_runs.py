"""Class means in a run: charged, then fitted, once; refused where they would not hold."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.federations import FROZEN
from helpers.removal import World, world

from securevfl.config.reading import read_federation
from securevfl.core.errors import ConfigError, PrivacyError, SecureVflError
from securevfl.models.alone import choice
from securevfl.models.alone.choice import optimism_of_seen
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.stages.class_means.fitting import ClassMeansFitting
from securevfl.testing import save_federation, write_federation

MODEL = {"release": "pooled", "hidden": 3, "heads": 1, "top": "tied"}
CLASS_MEANS = {"method": "class-means", "labels": "plaintext", "share": 0.1}
SHORT = {"rows": 90, "training": {"batch_size": 32, "split": "random"}}
CHOOSE = {"protection": "none", "choose": "records"}
PARTIES = ("agency", "bank-1", "bank-2")


def write_means(folder: Path, *, bounds: bool = True, **sections: Any) -> Path:
    """Write a federation whose encoders are class means, with declared bounds."""
    settings = {
        "model": MODEL,
        "encoder": CLASS_MEANS,
        "privacy": FROZEN,
        "linkage": CHOOSE,
        "base": {"estimator": "linear"},
        **SHORT,
        **sections,
    }
    path = write_federation(folder, **settings)
    source = tomllib.loads(path.read_text())
    for party in source["party"][1:]:
        if bounds:
            party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    return save_federation(folder, source)


def run(path: Path, out: Path, *, resume: bool = False, with_alone: bool = False) -> RunResult:
    config = read_federation(path)
    tables = read_tables(config, path.parent)
    options = RunOptions(run_folder=out, resume=resume)
    return simulate_federation(config, tables, options, with_alone=with_alone)


def fitting_of(one: World) -> ClassMeansFitting:
    """Return what fits a secondary's encoder."""
    kept = one.secondary.kept
    assert kept is not None
    return ClassMeansFitting(one.plan, one.plan.config.party(one.secondary.name), kept)


def booked(folder: Path, party: str) -> list[dict[str, Any]]:
    lines = (folder / "parties" / party / "ledger.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("labels", ["plaintext", "randomised"])
def test_everything_is_booked_before_it_is_released(labels: str, tmp_path: Path) -> None:
    """The fit, then rows, at every party; what secondaries learn of labels at the primary alone."""
    encoder = {**CLASS_MEANS, "labels": labels}
    result = run(write_means(tmp_path, encoder=encoder), tmp_path / "run")

    for party in PARTIES:
        kinds = [line["kind"] for line in booked(tmp_path / "run", party)]
        spent = [kind for kind in kinds if kind in ("fit", "labels", "charge")]
        own = ["labels"] if party == "agency" else []
        assert spent == ["fit", *own, "charge", "charge", "charge"]
    (line,) = [one for one in booked(tmp_path / "run", "agency") if one["kind"] == "labels"]
    assert line["mechanism"] == labels
    assert line["epsilon"] == (None if labels == "plaintext" else 2.0)
    assert result.metrics["privacy"]["epsilon"] == pytest.approx(50.0, rel=1e-6)


def test_class_means_tell_what_the_primary_lacks(tmp_path: Path) -> None:
    """Without noise: every party has a column that the label is a sum of."""
    path = write_means(
        tmp_path,
        rows=240,
        privacy={"mechanism": "none", "encoder": "frozen", "links_per_record": 1},
        encoder=CLASS_MEANS,
        base={"estimator": "best"},
    )
    metrics = run(path, tmp_path / "run", with_alone=True).metrics
    assert metrics["base"]["used"] == "joint"
    assert metrics["base"]["rows"] == 192, "training rows decide beside validation rows"
    assert metrics["test"] > metrics["alone_test"] + 0.05


def test_a_resumed_run_tells_the_same_labels_and_fits_nothing_again(tmp_path: Path) -> None:
    """Labels that were drawn again would say more, and a second fit would spend for nothing."""
    path = write_means(tmp_path, encoder={**CLASS_MEANS, "labels": "randomised"})
    run(path, tmp_path / "run")
    drawn = (tmp_path / "run/parties/agency/labels.pt").read_bytes()
    # As if the crash had come before the last round was kept.
    last = max((tmp_path / "run/parties/agency/released").iterdir(), key=lambda one: one.name)
    last.unlink()
    run(path, tmp_path / "run", resume=True)

    assert (tmp_path / "run/parties/agency/labels.pt").read_bytes() == drawn
    for party in PARTIES:
        kinds = [line["kind"] for line in booked(tmp_path / "run", party)]
        assert kinds.count("fit") == 1
        assert kinds.count("labels") == (party == "agency")
        assert kinds.count("open") == 2


def test_a_resumed_run_knows_what_directions_were_fitted_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else training rows would decide as if no direction had seen their labels."""
    known: list[tuple[int, float]] = []

    def watched(*parts: Any, columns: int, surviving: float, **more: Any) -> float:
        known.append((columns, surviving))
        return optimism_of_seen(*parts, columns=columns, surviving=surviving, **more)

    monkeypatch.setattr(choice, "optimism_of_seen", watched)
    path = write_means(tmp_path)
    run(path, tmp_path / "run")
    state = tmp_path / "run/parties/agency"
    # As if the crash had come between the last round and the fit of the top model.
    for name in ("epoch-1.pt", "best-1.pt"):
        (state / name).unlink()
    (before,) = set(known)
    known.clear()
    run(path, tmp_path / "run", resume=True)

    assert set(known) == {before}
    assert before[0] == sum(
        len(read_tables(read_federation(path), tmp_path)[name].feature_names)
        for name in PARTIES[1:]
    )
    assert 0 < before[1] < 1


def test_a_secondary_that_had_its_class_sums_gets_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two label noises on one sum average out; the primary refuses, and books nothing more."""
    path = write_means(tmp_path, encoder={**CLASS_MEANS, "labels": "shares"})
    source = tomllib.loads(path.read_text())
    source["party"].append({"name": "dealer", "role": "dealer"})
    save_federation(tmp_path, source)
    run(path, tmp_path / "run")
    last = max((tmp_path / "run/parties/agency/released").iterdir(), key=lambda one: one.name)
    last.unlink()
    # The secondary says that its class means are not fitted, and would send its sums again.
    monkeypatch.setattr(ClassMeansFitting, "encoder_fixed", False)
    monkeypatch.setattr(ClassMeansFitting, "begin", lambda _self, **_leaves: None)

    with pytest.raises(PrivacyError, match="bank-1, bank-2: had class sums of this run and says"):
        run(path, tmp_path / "run", resume=True)
    kinds = [line["kind"] for line in booked(tmp_path / "run", "agency")]
    assert kinds.count("labels") == 1


@pytest.mark.parametrize("cap", [1, 2])
def test_no_record_moves_what_is_summed_by_more_than_is_charged(cap: int, tmp_path: Path) -> None:
    """Every tenth record of a table is taken away, as a run links and scales it."""
    path = write_means(tmp_path, privacy={**FROZEN, "links_per_record": cap})
    whole = fitting_of(world(path))
    bins = np.random.default_rng(0).integers(0, 4, 90)
    sums = whole.format.by_bins(whole.vectors(), bins)
    changes = []
    for gone in range(0, 90, 10):
        without = fitting_of(world(path, gone=gone))
        assert without.format == whole.format
        rest = without.format.by_bins(without.vectors(), bins)
        changes.append(float(np.linalg.norm(sums - rest)))
    assert 0 < max(changes) <= whole.format.change_of_record


def test_rows_are_refused_before_class_means_are_fitted(tmp_path: Path) -> None:
    """A primary that leaves the step out would get rows of an encoder that nobody has fitted."""
    with pytest.raises(PrivacyError, match="before it has let their encoder be fitted"):
        world(write_means(tmp_path)).release(range(4), number=1)


def test_sums_that_left_and_were_lost_are_not_made_again(tmp_path: Path) -> None:
    """With other noise they would be a second release, which nobody has paid for."""
    class_means = fitting_of(world(write_means(tmp_path)))
    class_means.begin(leaves=True)
    with pytest.raises(PrivacyError, match="start another run"):
        class_means.begin(leaves=True)
    class_means.begin(leaves=False)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"encoder": {"method": "class-means"}}, "encoder.labels"),
        ({"encoder": {**CLASS_MEANS, "layout": "blocks"}}, "encoder.layout"),
        ({"encoder": {"method": "principal", "labels": "plaintext"}}, "encoder.labels"),
        ({"encoder": {"method": "random", "labels": "shares"}}, "encoder.labels"),
        ({"linkage": {**CHOOSE, "choose": "rows"}}, "encoder.method"),
        ({"privacy": {**FROZEN, "unit": "linked-row"}}, "privacy.unit"),
        ({"privacy": {**FROZEN, "sampling_rate": 0.5}}, "privacy.sampling_rate"),
        ({"base": {"estimator": "none"}}, "model.top"),
        ({"model": {**MODEL, "hidden": 4}}, "write numbers = 3"),
    ],
)
def test_what_does_not_go_together_is_refused(
    sections: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """In one line that names the field, before anything is released."""
    with pytest.raises((ConfigError, PrivacyError), match=says) as refused:
        run(write_means(tmp_path, **sections), tmp_path / "run")
    assert isinstance(refused.value, SecureVflError)
    assert "\n" not in str(refused.value)
