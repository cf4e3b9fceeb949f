"""Where runs are trained: what is asked in vain is told in a line, before anything starts."""

import importlib.util

import pytest

from securevfl.core.errors import ConfigError
from securevfl.lab.study import StudyOptions


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"engine": "spark"}, 'engine: must be "local" or "ray"'),
        ({"jobs": 0}, "jobs: must be at least 1"),
        ({"address": "auto"}, 'address: is for engine "ray"'),
        ({"gpus_per_run": 0.5}, 'gpus-per-run: is for engine "ray"'),
        ({"engine": "ray", "gpus_per_run": -1.0}, "gpus-per-run: must be at least 0"),
    ],
)
def test_what_does_not_go_together(asked: dict[str, object], complaint: str) -> None:
    """Whatever is installed."""
    with pytest.raises(ConfigError, match=complaint):
        StudyOptions(**asked)


def test_ray_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that can be pasted."""
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda _name: None)
        with pytest.raises(ConfigError, match=r"pip install 'securevfl\[ray\]'"):
            StudyOptions(engine="ray").require_there("cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    with pytest.raises(ConfigError, match="has no use with device cpu"):
        StudyOptions(engine="ray", gpus_per_run=0.5).require_there("cpu")
    with pytest.raises(ConfigError, match="device cuda needs more than 0"):
        StudyOptions(engine="ray", gpus_per_run=0).require_there("cuda")
    # The GPU is on the nodes, not here.
    StudyOptions(engine="ray").require_there("cuda")
