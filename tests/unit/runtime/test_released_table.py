"""A frozen run's releases as a table: the numbers that the top model saw, and what they promise."""

import json
import math
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from helpers.command_line import securevfl
from helpers.damage import damage
from helpers.federations import FROZEN

import securevfl as sv
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.progress import ProgressEvent, RowsReleased
from securevfl.federation.checkpoint import read_state
from securevfl.testing import run_in_process, save_federation, write_federation

ROWS, BATCH, ROUNDS, WIDTH = 60, 16, 4, 4


def federation(folder: Path, *, privacy: dict[str, Any], **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = write_federation(
        folder,
        rows=ROWS,
        **{
            "model": {"release": "pooled", "top": "additive", "hidden": WIDTH},
            "encoder": {"method": "random"},
            "training": {"epochs": 1, "batch_size": BATCH, "labelled_rows": 30},
            "privacy": privacy,
            **sections,
        },
    )
    source = tomllib.loads(path.read_text())
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    return save_federation(folder, source)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run under a promise; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("finished")
    path = federation(folder, privacy={**FROZEN, "links_per_record": 1})
    run_in_process(path, folder / "run")
    return folder


def kept_rows(run: Path) -> np.ndarray:
    folder = run / "parties" / "agency" / "released"
    parts = [read_state(folder / f"{number}.pt")["state"] for number in range(1, ROUNDS + 1)]
    return np.concatenate([part["aggregate"].flatten(1).numpy() for part in parts])


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_table_has_the_released_numbers_and_their_promise(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit what the top model saw, in every way to ask; no byte of the run changes."""
    run = finished / "run"
    before = everything(finished)
    frame = sv.features(run, own=True, data_root=finished)
    told = frame.attrs["securevfl"]
    names = ["bank-1_0", "bank-1_1", "bank-2_0", "bank-2_1"]
    assert frame.columns[:6].tolist() == ["row", "part", *names]
    assert np.array_equal(frame[names].to_numpy(), kept_rows(run))
    assert frame["row"].tolist() == list(range(1, ROWS + 1))

    metrics = json.loads((run / "metrics.json").read_text())
    for name in ("statement", "warning", "epsilon", "delta", "unit", "links_per_record"):
        assert told[name] == metrics["privacy"][name]
    assert told["run"] == metrics["run"]
    model = json.loads((run / "parties" / "agency" / "model" / "model.json").read_text())
    assert told["ledger_head"] == model["ledger_head"]

    # The rows of the parts are those of the run, by what else it has written of them.
    tested = pd.read_csv(run / "predictions.csv")["row"].tolist()
    assert frame.loc[frame["part"] == "test", "row"].tolist() == tested
    assert frame["part"].value_counts()[["train", "unlabelled"]].tolist() == [30, ROWS - 30 - 18]
    table = pd.read_csv(finished / "agency.csv")
    assert frame["label"].tolist() == table["y"].tolist()
    own = [f"own_{name}" for name in ("x0", "x1", "x2", "lon", "lat")]
    assert frame.columns[6:].tolist() == [*own, "label"]
    wanted = table[["x0", "x1", "x2", "lon", "lat"]].to_numpy()
    assert np.allclose(frame[own].to_numpy(), wanted, atol=1e-6)

    for name in ("out.parquet", "out.csv"):
        asked = [
            "model",
            "embeddings",
            run,
            "--own",
            "--data-root",
            finished,
            "--out",
            tmp_path / name,
        ]
        done = securevfl(capfd, *asked, "--json")
        assert (done.code, json.loads(done.out)["statement"]) == (0, told["statement"])
    assert "this costs nothing" in securevfl(capfd, *asked).err
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert json.loads(schema.metadata[b"securevfl"]) == told
    assert json.loads((tmp_path / "out.csv.json").read_text()) == told
    parquet, csv = pd.read_parquet(tmp_path / "out.parquet"), pd.read_csv(tmp_path / "out.csv")
    assert np.array_equal(parquet[names].to_numpy(), kept_rows(run))
    assert np.array_equal(csv[names].to_numpy(dtype=np.float32), kept_rows(run))
    assert everything(finished) == before


def test_the_deviation_is_that_of_the_noise(tmp_path: Path) -> None:
    """The same run without noise gives the numbers behind it, and rows that nobody links.

    The root mean square of n = 960 differences has a deviation of 1/sqrt(2n) = 2.3 %; it is more
    than 15 % off, six and a half deviations, by chance in less than 1e-10 of all runs.
    """
    sections: dict[str, Any] = {
        "model": {"release": "pooled", "top": "additive", "hidden": 16},
        "encoder": {"method": "random", "layout": "sum"},
        "linkage": {"max_distance": 0.2},
    }
    plain = {"mechanism": "none", "encoder": "frozen", "links_per_record": 1}
    frames = []
    for name, privacy in (("noised", {**FROZEN, "links_per_record": 1}), ("plain", plain)):
        # Sixteen numbers a record need as many features.
        path = federation(tmp_path / name, privacy=privacy, **sections)
        widen(path)
        run_in_process(path, tmp_path / name / "run")
        frames.append(sv.features(tmp_path / name / "run", data_root=path.parent))
    noised, exact = frames
    numbers = [f"released_{number}" for number in range(16)]
    noise = noised[numbers].to_numpy(dtype=np.float64) - exact[numbers].to_numpy()
    told = noised.attrs["securevfl"]["noise_deviation"]
    assert math.sqrt((noise**2).mean()) == pytest.approx(told, rel=0.15)
    told = exact.attrs["securevfl"]
    assert (told["noise_deviation"], told["epsilon"]) == (0.0, None)
    zeros = int((exact[numbers] == 0).all(axis=1).sum())
    assert 0 < told["unlinked_rows"] == zeros < ROWS
    assert noised.attrs["securevfl"]["unlinked_rows"] is None


def widen(path: Path) -> None:
    """Give every secondary sixteen features, and take half of one's records away."""
    random = np.random.default_rng(2)
    for number in (1, 2):
        table = path.parent / f"bank-{number}.csv"
        frame = pd.read_csv(table)
        for axis in range(3, 16):
            frame[f"x{axis}"] = random.normal(size=len(frame)).clip(-4, 4)
        frame.iloc[: ROWS // 2].to_csv(table, index=False)


def test_what_is_damaged_or_of_another_run_is_refused(finished: Path, tmp_path: Path) -> None:
    """One line each; a file's name proves nothing, and neither does a right checksum."""

    def refused(name: str) -> str:
        with pytest.raises((ConfigError, PrivacyError)) as error:
            sv.features(tmp_path / name, data_root=finished)
        return str(error.value)

    def copy(name: str) -> Path:
        shutil.copytree(finished / "run", tmp_path / name)
        return tmp_path / name / "parties" / "agency"

    damage(copy("flipped") / "released" / "2.pt", "flipped")
    assert "released/2.pt: is damaged" in refused("flipped")
    own = copy("swapped")
    (own / "released" / "1.pt").replace(own / "released" / "2.pt")
    assert "other rows were released" in refused("swapped")
    (copy("cut") / "released" / "4.pt").unlink()
    assert "holds 48 of the 60 rows; go on with the run" in refused("cut")
    damage(copy("no-run") / "run.pt", "empty")
    assert "run.pt: is damaged" in refused("no-run")
    lines = (own := copy("ledger")) / "ledger.jsonl"
    lines.write_text("\n".join(lines.read_text().splitlines()[:2]) + "\n")
    assert "lacks releases that the kept rows were made with" in refused("ledger")
    shutil.rmtree(copy("secondary"))
    assert "has no folder of the primary, 'agency'" in refused("secondary")
    own = copy("wider")
    text = (tmp_path / "wider" / "federation.toml").read_text()
    (tmp_path / "wider" / "federation.toml").write_text(text.replace("hidden = 4", "hidden = 6"))
    assert "was written under other settings" in refused("wider")
    assert "other rows were released than the 40" in refused_with_fewer_rows(finished, tmp_path)


def refused_with_fewer_rows(finished: Path, tmp_path: Path) -> str:
    frame = pd.read_csv(finished / "agency.csv")
    frame.iloc[:40].to_csv(tmp_path / "agency.csv", index=False)
    with pytest.raises(ConfigError) as error:
        sv.features(finished / "run", data_root=tmp_path)
    return str(error.value)


def test_a_trained_run_and_other_endings_are_refused(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command ends with one line and exit code 2, before anything is read."""
    path = write_federation(tmp_path, rows=ROWS, training={"epochs": 1})
    run_in_process(path, tmp_path / "trained")
    asked = ["model", "embeddings", tmp_path / "trained", "--data-root", tmp_path]
    done = securevfl(capfd, *asked, "--out", tmp_path / "out.parquet")
    assert "released anew in every epoch and not kept" in done.complaint
    assert done.code == 2
    done = securevfl(capfd, "model", "embeddings", finished / "run", "--out", "features.xlsx")
    assert "must end with .csv, .csv.gz or .parquet" in done.complaint
    assert done.code == 2


def test_a_run_that_still_trains_has_its_table(tmp_path: Path) -> None:
    """Once all rows are released the top model need not be there; before, there is no table."""
    plain = {"mechanism": "none", "encoder": "frozen", "links_per_record": 1}
    path = federation(tmp_path, privacy=plain)

    class CutError(Exception):
        pass

    def until(rounds: int) -> Any:
        def observe(event: ProgressEvent) -> None:
            if isinstance(event, RowsReleased) and event.done == rounds:
                raise CutError

        return observe

    for name, rounds in (("half", 2), ("whole", ROUNDS)):
        with pytest.raises(CutError):
            run_in_process(path, tmp_path / name, observe=until(rounds))
    assert len(sv.features(tmp_path / "whole", data_root=tmp_path)) == ROWS
    with pytest.raises(ConfigError, match="holds 32 of the 60 rows"):
        sv.features(tmp_path / "half", data_root=tmp_path)
