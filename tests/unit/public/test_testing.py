"""``sv.testing`` in one process: frames, files and quick runs of a small federation."""

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import securevfl as sv
from securevfl.core.errors import ConfigError
from securevfl.federation.messages import RoundKind
from securevfl.testing import lying_party
from securevfl.transport import channels, star
from securevfl.transport.framing import encode


def test_frames_follow_from_the_seed() -> None:
    frames, again = sv.testing.make_frames(), sv.testing.make_frames()
    assert list(frames) == ["agency", "bank-1", "bank-2"]
    assert all(frames[name].equals(again[name]) for name in frames)
    assert not frames["agency"].equals(sv.testing.make_frames(seed=8)["agency"])


@pytest.mark.parametrize("shared", [True, False])
def test_the_label_depends_on_partners_where_the_signal_is_shared(shared: bool) -> None:
    """Rows of one entity have nearly equal keys at all parties, in another order."""
    frames = sv.testing.make_frames(secondaries=1, shared_signal=shared, binary=True)
    own, partner = frames["agency"], frames["bank-1"].sort_index()
    assert np.abs(own[["lon", "lat"]] - partner[["lon", "lat"]]).to_numpy().max() < 0.1
    signal = own["x0"] + (partner["x0"] if shared else 0.0)
    assert np.array_equal(own["y"], signal > 0)
    assert frames["bank-1"].index[0] != 0


def test_frames_go_into_a_simulation() -> None:
    frames = sv.testing.make_frames(rows=40)
    run = sv.simulate(
        primary=frames.pop("agency"),
        secondaries=frames,
        label="y",
        key=["lon", "lat"],
        task="multiclass",
        model=sv.models.FeT(neighbours=2, hidden=4, heads=1),
        privacy=sv.dp.Privacy(mechanism="none"),
        training=sv.TrainingSettings(epochs=1),
        with_alone=False,
        progress=False,
    )
    assert np.isfinite(run.losses).all()


def test_sections_change_the_file(tmp_path: Path) -> None:
    """They update those of the file; a promise and another family take their place."""
    path = sv.testing.write_federation(
        tmp_path,
        rows=20,
        secondaries=1,
        of_secondaries={"scaling": "none"},
        training={"epochs": 5},
        model={"family": "top1sim"},
    )
    source = tomllib.loads(path.read_text())
    assert (source["training"]["epochs"], source["training"]["batch_size"]) == (5, 32)
    assert source["model"] == {"family": "top1sim"}
    assert ["scaling" in party for party in source["party"]] == [False, True]
    assert len(sv.testing.read_tables(path)["bank-1"].features) == 20


def test_a_quick_run_has_a_model_and_no_local_baseline(tmp_path: Path) -> None:
    """Its temporary folder is there for as long as the result."""
    path = sv.testing.write_federation(tmp_path, rows=40)
    run = sv.testing.run_in_process(path)
    assert run.metrics["alone_test"] is None
    assert len(run.predict(tmp_path / "agency.csv").values) == 40
    assert (
        run.losses
        == sv.testing.run_in_process(
            sv.read_federation(path), tables=None, data_root=tmp_path
        ).losses
    )


def test_a_lie_is_a_function_that_a_process_can_read() -> None:
    with pytest.raises(ConfigError, match="must be a function at the top of a file"):
        sv.testing.Lie(party="bank-1", message="SHARE", alter=lambda message: message)


def test_a_lie_is_of_a_party(tmp_path: Path) -> None:
    path = sv.testing.write_federation(tmp_path, rows=20)
    lie = sv.testing.Lie(party="shop", message="SHARE", alter=twice)
    with pytest.raises(ConfigError, match="lies: 'shop' is no party"):
        sv.testing.run_between_processes(path, lies=[lie])


def twice(message: sv.testing.Message) -> sv.testing.Message:
    return replace(message, round_number=2 * message.round_number)


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Take back what lies do to the modules that send."""
    for module in (channels, star):
        monkeypatch.setattr(module, "encode", encode)
    return monkeypatch


def test_a_lie_that_is_never_sent_fails(patch: pytest.MonkeyPatch) -> None:
    """The party's process runs its command line, and then says so."""
    lie = sv.testing.Lie(party="bank-1", message="GRADIENT", alter=twice)
    seen: list[str] = []
    patch.setattr("securevfl.cli.main.main", lambda: seen.extend(sys.argv[1:]))
    patch.setattr(sys, "argv", ["", "1", lie.as_text(), "party", "fed.toml"])
    with pytest.raises(SystemExit, match="GRADIENT: this party sends no message of that type"):
        lying_party.main()
    assert seen == ["party", "fed.toml"]


def test_messages_of_one_type_are_altered(patch: pytest.MonkeyPatch) -> None:
    sent = lying_party.alter_sent({"GRADIENT": twice})
    numbers = [
        star.encode(sv.testing.Message(kind=kind, round_number=3)).round_number
        for kind in (RoundKind.GRADIENT, RoundKind.PLAN)
    ]
    assert (numbers, sent["GRADIENT"]) == ([6, 3], 1)
