"""What shift-tab shows of the functions that run a federation, and what they say of mistakes."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import securevfl as sv
from securevfl.core.errors import ConfigError
from securevfl.runtime.run_settings import SECTIONS, RunSettings, python_words

SCHEMA = Path(sv.__file__).parent / "config" / "federation-file.schema.json"

NOT_KEYWORDS = {
    "party": "tables and frames are the parties",
    "federation": "its task and seed are keywords; a name and versions are for a file",
    "methods": "settings of sv.compare's methods, which a file says",
}

NONE = sv.dp.Privacy(mechanism="none")


def frames() -> dict[str, Any]:
    random = np.random.default_rng(0)
    wealth = random.normal(size=120)
    bank = pd.DataFrame({"id": np.arange(120), "age": random.normal(size=120), "y": wealth > 0})
    bureau = pd.DataFrame({"id": np.arange(120), "wealth": wealth})
    return {
        "primary": bank,
        "secondaries": [bureau],
        "label": "y",
        "key": "id",
        "training": sv.TrainingSettings(epochs=2),
    }


@pytest.mark.parametrize("function", [sv.simulate, sv.train, sv.compare])
def test_a_signature_names_and_explains_every_argument(function: Any) -> None:
    """No bag of settings, no default that is an address, and an entry for each argument."""
    shown = inspect.signature(function)
    assert "**" not in str(shown)
    assert " at 0x" not in str(shown)
    for name in shown.parameters:
        assert re.search(rf"^        {name}: \S", function.__doc__, re.MULTILINE), name


def test_every_section_of_the_federation_file_is_a_keyword() -> None:
    """Or an exception with its reason."""
    sections = set(json.loads(SCHEMA.read_text(encoding="utf-8"))["properties"])
    assert set(NOT_KEYWORDS) <= sections
    for function in (sv.simulate, sv.train):
        keywords = set(inspect.signature(function).parameters)
        assert sections - keywords == set(NOT_KEYWORDS)
        assert set(RunSettings.__annotations__) <= keywords
    for kind, public in SECTIONS.values():
        assert eval(public, {"sv": sv}) is kind


def test_a_model_by_name_a_preset_and_sections_reach_the_run() -> None:
    """A preset says what is not given; what is given stays."""
    given = frames() | {"progress": False, "with_alone": False}
    run = sv.simulate(
        model="fedsim-paper",
        mpc=sv.MpcSettings(engine="masked"),
        runtime=sv.RuntimeSettings(wait_s=7.0),
        **given,
    )
    assert run.trained is not None
    config = run.trained.config
    assert (config.privacy.mechanism, config.base.estimator) == ("none", "none")
    assert config.runtime.wait_s == 7.0
    assert config.training.epochs == 2
    assert run.report().read_text(encoding="utf-8").startswith("<!")
    assert run.plot().axes
    worth = repr(sv.contribution(run))
    assert "secondary-1, if gone tomorrow: " in worth


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"privacy": 8.0}, r"^privacy: must be sv.dp.Privacy\(...\), got 8.0$"),
        ({"training": {"epochs": 3}}, r"^training: must be sv.TrainingSettings"),
        ({"model": pd.DataFrame({"x": [1]})}, "frames go in by name"),
        ({"linkage": sv.LinkageSettings(metric="levenshtein", protection="none")}, r"FeT\(top="),
    ],
)
def test_mistakes_are_named_in_words_of_python(change: dict[str, Any], message: str) -> None:
    """Where no file says the settings, no advice is about a file."""
    texts = {
        name: frame.assign(id=frame["id"].map("n{}".format))
        for name, frame in (("bank", frames()["primary"]), ("bureau", frames()["secondaries"][0]))
    }
    own = (
        {"primary": texts["bank"], "secondaries": [texts["bureau"]]} if "linkage" in change else {}
    )
    given: dict[str, Any] = {"model": "fet", "privacy": NONE, **frames(), **own, **change}
    with pytest.raises(ConfigError, match=message) as raised:
        sv.simulate(**given, progress=False)
    assert "model.top" not in str(raised.value)
    with pytest.raises(ConfigError, match="run: must be a run folder"):
        sv.contribution(None)


def test_advice_is_spelled_as_keywords() -> None:
    said = python_words('[mpc] engine = "crypten", training.top_noise = true, [encoder] says')
    assert said == (
        'mpc=sv.MpcSettings(engine="crypten"), training=sv.TrainingSettings(top_noise=True), '
        "encoder= says"
    )


def test_an_estimator_shows_what_was_changed() -> None:
    linkage = sv.LinkageSettings(metric="levenshtein", protection="none")
    model = sv.FederatedClassifier(
        "fedsim", key=["id"], secondaries=frames()["secondaries"] * 9, linkage=linkage, epochs=3
    )
    assert len(repr(model).splitlines()) <= 5
    assert "epochs=3" in repr(model)
    assert "neighbours" not in repr(model)


def test_frames_are_compared_like_with_like() -> None:
    """A preset trains for the file's epochs unless it is asked for the paper's, and says so."""
    given = frames() | {"privacy": NONE, "seeds": 1}
    found = sv.compare(methods=["alone", "fedsim", "fedsim-paper"], **given)
    assert set(found["methods"]) == {"alone", "fedsim", "fedsim-paper"}
    assert 'optimizer = "lamb"' in " ".join(found["adapted"]["fedsim-paper"])
