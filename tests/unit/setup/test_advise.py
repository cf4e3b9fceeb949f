"""``securevfl lab advise``: from the federation file and the primary's table alone."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
from helpers.command_line import securevfl

from securevfl import read_federation
from securevfl.lab.advice import Advice, Outcome, RehearsalResult, outcome_of

pytestmark = pytest.mark.pictures

Capture = pytest.CaptureFixture[str]

ROWS = 300
COLUMNS = 4


def federation(folder: Path, **sections: Any) -> Path:
    """Write a federation of which only the primary's table is here.

    The label is the sign of the sum of all columns, so those that are set aside are half of what
    there is to know; the key tells nothing. An estimator is the top model, for speed.
    """
    random = np.random.default_rng(1)
    values = random.normal(size=(ROWS, COLUMNS))
    frame = pd.DataFrame(values, columns=[f"x{i}" for i in range(COLUMNS)])
    frame["id"] = random.permutation(ROWS).astype(float)
    frame["y"] = (values.sum(axis=1) > 0).astype(int)
    frame.to_csv(folder / "bank.csv", index=False)
    bank = {"name": "bank", "role": "primary", "data": "bank.csv", "key": ["id"], "label": "y"}
    source = {
        "federation": {"name": "test", "task": "binary", "seed": 3},
        "model": {"family": "fet", "neighbours": 2, "hidden": 2, "release": "pooled"}
        | {"top": "linear"},
        "encoder": {"method": "principal"},
        "base": {"estimator": "none"},
        "privacy": {"epsilon": 8.0, "delta": 1e-6, "encoder": "frozen", "links_per_record": 1},
        "linkage": {"protection": "none", "choose": "records"},
        "party": [
            bank | {"address": "127.0.0.1:0"},
            *(
                {"name": name, "role": "secondary", "data": f"{name}.csv", "key": ["id"]}
                | {"scaling": "bounds", "bounds": [0, 1]}
                for name in ("telecom", "retailer")
            ),
        ],
        **sections,
    }
    path = folder / "fed.toml"
    path.write_text(tomli_w.dumps(source), encoding="utf-8")
    return path


def test_a_rehearsal_finds_what_was_set_aside_and_loses_it_behind_noise(
    tmp_path: Path, capfd: Capture
) -> None:
    """Without noise the signs of the other columns come back, at epsilon 0.05 nothing of them."""
    path, plot = federation(tmp_path), tmp_path / "advice.svg"

    ended = securevfl(
        capfd, "lab", "advise", path, "--epsilon", "0.05", "--seeds", 2, "--plot", plot, "--json"
    )

    assert ended.code == 0, ended.err
    said = json.loads(ended.out)
    low, none = said["rehearsal"]["epsilons"]
    assert (low["epsilon"], none["epsilon"]) == (0.05, None)
    assert said["worth"].startswith("not worth it at any epsilon tried")
    assert min(none["gains"]) > 0.05
    assert max(low["gains"]) < 0.02
    assert low["alone"] == none["alone"]
    for one in (low, none):
        # What a placebo gains as well is not the partners'.
        assert one["gain"] <= one["test"] - one["alone"] + 1e-9
    casts = said["rehearsal"]["casts"]
    assert [cast["seed"] for cast in casts] == [3, 4]
    assert [len(cast["set_aside"]) for cast in casts] == [2, 2]
    bounds = {one["epsilon"]: one for one in said["bounds"]}
    assert bounds[None]["blocks"] == 1.0
    assert bounds[0.05]["blocks"] < 0.01
    assert bounds[0.05]["settings"]["encoder.method"] == "principal"
    assert "rehearsed gain over alone" in plot.read_text(encoding="utf-8")


def test_people_read_bounds_settings_and_verdicts(tmp_path: Path, capfd: Capture) -> None:
    ended = securevfl(
        capfd, "lab", "advise", federation(tmp_path), "--epsilon", "8,8", "--seeds", 1
    )

    assert ended.code == 0, ended.err
    out = " ".join(ended.out.split())
    for said in (
        "what can survive: unit secondary-record, delta 1e-06, 2 secondaries",
        "settings at epsilon 8, none: model.family = fet",
        "rehearsal: 2 of 4 columns set aside for 2 pretended secondaries",
        "epsilon 8: partners of such information gain",
        "one seed says nothing of chance",
        "A rehearsal is no promise.",
        "note: the ranges of 2 columns were taken from the table",
        "is it worth it? no answer: one seed says nothing of chance",
    ):
        assert said in out
    assert "done 2/2: seed 3, without noise" in ended.err
    # 0.69 and not 0.70, and 0.81 for 0.82: fitting and the counts of linked rows take their shares.
    assert re.search(r"│ 8 │ 0\.67 │ 0\.69 │ 0\.69 │ 0\.81 │", out)


def test_bounds_alone_simulate_nothing(tmp_path: Path, capfd: Capture) -> None:
    """And say what would stop the file: a partner who has declared nothing."""
    path = federation(tmp_path)
    text = path.read_text(encoding="utf-8").replace('scaling = "bounds"\n', "", 1)
    path.write_text(re.sub(r"bounds = \[[^]]*\]\n", "", text, count=1), encoding="utf-8")

    ended = securevfl(capfd, "lab", "advise", path, "--seeds", 0, "--json")

    assert ended.code == 0, ended.err
    said = json.loads(ended.out)
    assert said["rehearsal"] is None
    assert [one["epsilon"] for one in said["bounds"]] == [1, 2, 4, 8, 16, None]
    assert "would be refused: party 'telecom': scaling = \"standard\"" in said["notes"][0]
    assert ended.err == ""


def without_columns(path: Path) -> None:
    table = pd.read_csv(path.parent / "bank.csv")
    table[["id", "x0", "y"]].to_csv(path.parent / "bank.csv", index=False)


def without_label(path: Path) -> None:
    path.write_text(path.read_text(encoding="utf-8").replace('label = "y"\n', ""), "utf-8")


def without_table(path: Path) -> None:
    (path.parent / "bank.csv").unlink()


@pytest.mark.parametrize(
    ("arguments", "spoil", "said"),
    [
        (["--epsilon", "8,none"], None, "--epsilon: must be positive numbers"),
        (["--epsilon", "0"], None, "--epsilon: must be positive numbers"),
        (["--seeds", "-1"], None, "--seeds: must be at least 0, got -1"),
        (["--key-noise", "-1"], None, "--key-noise: must be a number from 0 on"),
        (["--plot", "a.png"], None, "--plot a.png: the name must end with .svg"),
        ([], without_columns, "has 1 column beside key and label"),
        ([], without_label, "party.label: the primary must name its label column"),
        ([], without_table, "bank.csv"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    spoil: Callable[[Path], None] | None,
    said: str,
    tmp_path: Path,
    capfd: Capture,
) -> None:
    path = federation(tmp_path)
    if spoil is not None:
        spoil(path)

    ended = securevfl(capfd, "lab", "advise", path, *arguments)

    assert ended.code == 2
    assert said in ended.complaint
    assert ended.out == ""


@pytest.mark.parametrize(
    ("gain", "deviation", "outcome"),
    [
        (0.05, 0.02, "clear"),
        (0.03, 0.02, "unclear"),
        (0.01, 0.02, "none"),
        (0.0, 0.0, "none"),
        (-0.03, 0.02, "loss"),
    ],
)
def test_what_a_gain_is_called(gain: float, deviation: float, outcome: str) -> None:
    assert outcome_of(gain, deviation) == outcome


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ({8.0: "clear", 16.0: "clear"}, "worth it: at epsilon 8, 16 partners"),
        ({8.0: "none", 16.0: "clear"}, "not worth it at the file's epsilon 8: a clear gain at eps"),
        ({8.0: "unclear", 4.0: "none"}, "perhaps at the file's epsilon 8: a gain that chance may"),
        ({8.0: "none", None: "clear"}, "not worth it at the file's epsilon 8: the noise hides"),
        ({8.0: "none", None: "none"}, "not worth it at the file's epsilon 8: partners of such"),
        ({4.0: "clear"}, "worth it: at epsilon 4 partners"),
        ({8.0: None}, "no answer: one seed says nothing"),
        ({}, "no answer: nothing was rehearsed"),
    ],
)
def test_it_ends_with_one_answer(
    tmp_path: Path, outcomes: dict[float | None, Outcome | None], said: str
) -> None:
    """At the epsilon that the file promises, where that was rehearsed."""
    path = federation(tmp_path)
    played = [
        RehearsalResult(
            epsilon=epsilon,
            metric="accuracy",
            alone=0.7,
            test=0.8,
            gain=0.1,
            deviation=0.01,
            gains=(0.1, 0.1),
            used=2,
            outcome=outcome,
        )
        for epsilon, outcome in outcomes.items()
    ]
    found = Advice(
        file=path, config=read_federation(path), training_rows=9, bounds=[], rehearsed=played
    )
    assert found.worth().startswith(said)
