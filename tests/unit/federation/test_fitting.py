"""Encoders fitted behind noise: booked first, once, only when asked for; refused where unsound."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.federations import FROZEN

from securevfl.config.federation import FederationConfig
from securevfl.config.reading import read_federation
from securevfl.config.sections import PartySettings
from securevfl.core.errors import BudgetExceededError, ConfigError, DataError, PrivacyError
from securevfl.federation import encoder_fitting
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunFacts, plan_run
from securevfl.federation.session.peers import Next, ReplyHere
from securevfl.ledger.ledger import Ledger
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import simulate_federation
from securevfl.testing import save_federation, write_federation

MODEL = {"release": "pooled", "hidden": 4, "heads": 2, "top": "additive"}
FITTED = {"method": "principal", "share": 0.1}
SHORT = {"rows": 90, "training": {"epochs": 2, "batch_size": 32}}


SPENDING = ("fit", "charge")


def write_fitted(folder: Path, **sections) -> Path:
    """Write a federation with fitted encoders and declared bounds."""
    settings = {"model": MODEL, "encoder": FITTED, "privacy": FROZEN, **SHORT, **sections}
    path = write_federation(folder, **settings)
    source = tomllib.loads(path.read_text())
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    return save_federation(folder, source)


def config_of(folder: Path, **sections) -> FederationConfig:
    return read_federation(write_fitted(folder, **sections))


def built(config: FederationConfig, party: PartySettings) -> encoder_fitting.FittedBottom:
    assert config.encoder is not None
    return encoder_fitting.build_encoder(config, config.encoder, party, num_features=3)


def run(path: Path, out: Path, *, resume: bool = False):
    config = read_federation(path)
    return simulate_federation(
        config,
        read_tables(config, path.parent),
        RunOptions(run_folder=out, resume=resume),
        with_alone=False,
    )


def booked(folder: Path, party: str) -> list[dict]:
    lines = (folder / "parties" / party / "ledger.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_every_party_books_the_fitting_before_the_first_release(tmp_path: Path) -> None:
    """One line, then the releases; all together they are the epsilon that was asked for."""
    result = run(write_fitted(tmp_path), tmp_path / "run")

    for party in ("agency", "bank-1", "bank-2"):
        kinds = [line["kind"] for line in booked(tmp_path / "run", party)]
        assert [kind for kind in kinds if kind in SPENDING] == ["fit", "charge", "charge", "charge"]
        fit, *_, last = (
            line for line in booked(tmp_path / "run", party) if line["kind"] in SPENDING
        )
        assert 0 < fit["epsilon"] < last["epsilon"] <= 50.0
    privacy = result.metrics["privacy"]
    assert privacy["epsilon"] == pytest.approx(50.0, rel=1e-6)
    assert privacy["epsilon"] <= 50.0
    assert privacy["fitting_noise_multiplier"] == next(
        line["noise_multiplier"]
        for line in booked(tmp_path / "run", "bank-1")
        if line["kind"] == "fit"
    )
    assert "fitting of encoders" in {row["channel"] for row in privacy["channels"]}


def test_resuming_after_the_releases_fits_nothing_again(tmp_path: Path) -> None:
    """What was released lies with the primary; a second fitting would spend privacy for nothing."""
    path = write_fitted(tmp_path)
    run(path, tmp_path / "run")
    run(path, tmp_path / "run", resume=True)

    for party in ("agency", "bank-1", "bank-2"):
        kinds = [line["kind"] for line in booked(tmp_path / "run", party)]
        assert kinds.count("fit") == 1
        assert kinds.count("open") == 2


def test_nothing_is_computed_when_the_budget_forbids_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The charge comes first: without it no statistic is made, let alone used."""

    def spent(_ledger: Ledger) -> float:
        raise BudgetExceededError("the budget is spent")

    def never(*_args, **_kwargs):
        raise AssertionError("statistics were computed without a charge")

    monkeypatch.setattr(encoder_fitting, "noised_moments", never)
    config = config_of(tmp_path, encoder={"method": "principal"})
    bottom = built(config, config.secondaries[0])
    facts = RunFacts(rows=90, train_rows=63, validation_rows=9, test_rows=18)
    plan = plan_run(config, facts)
    ledger = Ledger(None, party="bank-1", plan=plan.releases, noise_share_std=plan.noise_share_std)
    monkeypatch.setattr(Ledger, "charge_fitting", spent)
    records = np.zeros((9, 3), np.float32)
    fit = encoder_fitting.PrincipalFitting(plan, bottom, records, ledger)
    with pytest.raises(BudgetExceededError):
        fit()


def test_secondaries_write_into_blocks_of_their_own_or_all_into_all(tmp_path: Path) -> None:
    """Blocks share the width; a sum is as wide as it is."""
    config = config_of(tmp_path)
    made = [built(config, party) for party in config.secondaries]
    assert [(one.offset, one.components) for one in made] == [(0, 2), (2, 2)]
    summed = config_of(tmp_path, encoder={**FITTED, "layout": "sum"}, model={**MODEL, "hidden": 2})
    made = [built(summed, party) for party in summed.secondaries]
    assert [(one.offset, one.components) for one in made] == [(0, 2), (0, 2)]


def test_blocks_make_an_entity_cheaper_than_a_sum_does(tmp_path: Path) -> None:
    """Two secondaries' changes at right angles: sqrt(2) of one, where a sum counts 2."""
    facts = RunFacts(rows=90, train_rows=63, validation_rows=9, test_rows=18)
    settings = {"privacy": {**FROZEN, "unit": "entity"}}
    blocks = plan_run(config_of(tmp_path, **settings), facts)
    summed = plan_run(config_of(tmp_path, encoder={**FITTED, "layout": "sum"}, **settings), facts)

    assert blocks.noise_share_std == pytest.approx(summed.noise_share_std / 2**0.5)


def test_no_secondary_writes_into_anothers_coordinates(tmp_path: Path) -> None:
    """In the very units that are released, without noise: what the square root rests on."""
    path = write_fitted(
        tmp_path,
        privacy={"mechanism": "none", "encoder": "frozen", "links_per_record": 2},
        linkage={"choose": "records"},
    )
    written: dict[str, list[torch.Tensor]] = {}
    answer = Secondary.hear_round

    def listen(secondary: Secondary, plan: RoundPlan, reply: ReplyHere) -> Next:
        after = answer(secondary, plan, reply)
        cut = secondary.contribution.aggregation.cut
        rows = cut.decode(reply.words[-1], rows=len(plan.rows), active=("a",), round_number=1)
        written.setdefault(secondary.name, []).append(rows.flatten(0, 1))
        return after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Secondary, "hear_round", listen)
        run(path, tmp_path / "run")
    first, second = (torch.cat(written[name]) for name in ("bank-1", "bank-2"))
    assert first[:, :2].any()
    assert second[:, 2:].any()
    assert not first[:, 2:].any()
    assert not second[:, :2].any()


def test_a_random_projection_costs_nothing(tmp_path: Path) -> None:
    """No line in the ledger, and all of the budget for the releases."""
    fitted = run(write_fitted(tmp_path), tmp_path / "fitted").metrics["privacy"]
    path = write_fitted(tmp_path, encoder={"method": "random"})
    random = run(path, tmp_path / "random").metrics["privacy"]

    kinds = [line["kind"] for line in booked(tmp_path / "random", "bank-1")]
    assert "fit" not in kinds
    assert random["fitting_noise_multiplier"] is None
    assert random["noise_share_std"] < fitted["noise_share_std"]


@pytest.mark.parametrize(
    ("sections", "error", "text"),
    [
        ({"encoder": {"method": "kernel"}}, ConfigError, "encoder.method"),
        ({"encoder": {"method": "random", "share": 0.0}}, ConfigError, "encoder.share"),
        ({"encoder": {}}, ConfigError, "encoder.method"),
        ({"model": {**MODEL, "hidden": 5, "heads": 1}}, ConfigError, "must share it equally"),
        ({"model": {**MODEL, "release": "sequence"}}, ConfigError, "rows are pooled"),
        (
            {"privacy": {"mechanism": "none", "encoder": "trained"}},
            ConfigError,
            'privacy.encoder = "frozen"',
        ),
    ],
)
def test_tables_that_do_not_go_together_are_refused(
    sections: dict, error: type[Exception], text: str, tmp_path: Path
) -> None:
    """By the name of the field, and with what would go."""
    with pytest.raises(error, match=text):
        config_of(tmp_path, **sections)


def test_more_numbers_than_features_are_refused(tmp_path: Path) -> None:
    """Nothing is padded with directions that do not exist."""
    config = config_of(tmp_path, model={**MODEL, "hidden": 8})
    with pytest.raises(DataError, match="fewer than the 4 numbers"):
        built(config, config.secondaries[0])


def test_fitting_needs_scaling_that_no_record_can_move(tmp_path: Path) -> None:
    """A mean taken from the table would be a second, uncounted statistic of it."""
    path = write_federation(tmp_path, model=MODEL, encoder=FITTED, privacy=FROZEN, **SHORT)
    with pytest.raises(PrivacyError, match='scaling = "standard"'):
        run(path, tmp_path / "run")


def test_published_accounting_knows_no_fitting(tmp_path: Path) -> None:
    """It is refused before anything is read."""
    path = write_fitted(tmp_path, privacy={**FROZEN, "accounting": "as-published"})
    with pytest.raises(PrivacyError, match="no formula for fitted encoders"):
        run(path, tmp_path / "run")
