"""A family in a script: registered in the process, simulated, and held to promises."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import securevfl as sv
from securevfl.core.errors import ConfigError
from securevfl.models import registry
from securevfl.testing import write_federation

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_family.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    return vars(importlib.import_module(EXAMPLE.stem))


def test_the_example_learns_and_says_what_a_promise_refuses(
    example: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is as short as it says, without a package or an entry point."""
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 80
    metrics = example["main"](rows=200, epochs=2)
    assert metrics["family"] == "split"
    refused = capsys.readouterr().out
    assert "'module.1' is a BatchNorm1d, which mixes the rows" in refused
    assert "use LayerNorm or GroupNorm" in refused


def test_a_file_may_name_it_where_one_process_does_all(
    example: dict[str, Any], tmp_path: Path
) -> None:
    """Processes that cannot import it are refused before any is started."""
    sv.models.split_model(lambda *sizes: example["bottom"](*sizes), nn.Linear, name="plain")
    path = write_federation(tmp_path, rows=60, model={"family": "plain"})
    assert sv.read_federation(path).family.name == "plain"
    with pytest.raises(ConfigError, match="import a model's code from its module, and cannot: "):
        sv.train(path, out=tmp_path / "run")
    options = sv.StudyOptions(jobs=2)
    with pytest.raises(ConfigError, match="in this process only, and comparing in other processes"):
        sv.compare(path, ["plain", "fet"], out=tmp_path / "run", options=options)
    assert not (tmp_path / "run").exists()


def test_it_may_be_registered_again_and_takes_nobodys_name(example: dict[str, Any]) -> None:
    """As a notebook's cell that runs twice."""
    sv.models.split_model(example["bottom"], nn.Linear, name="plain")
    plain = type(registry.family_named("plain"))
    again = sv.models.register(type("Plain", (plain,), {}))
    assert type(registry.family_named("plain")) is again
    with pytest.raises(ConfigError, match=r"models\.register: the name 'fet' is taken"):
        sv.models.register(type("Fet", (plain,), {"name": "fet"}))
    with pytest.raises(ConfigError, match=r"models\.register: lacks .*: build_bottom"):
        sv.models.register(type("Half", (sv.models.Family,), {"name": "half"}))
