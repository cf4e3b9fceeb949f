"""``securevfl lab audit`` refuses impossible settings before any process starts."""

from typing import Any

import pytest
from typer.testing import CliRunner

from securevfl import AuditSettings
from securevfl.core.errors import ConfigError
from securevfl.lab.commands import app


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--secondaries", "0"], "secondaries must be at least 1"),
        (["--noise-multiplier", "nan"], "noise_multiplier must be finite"),
        (["--noise-multiplier", "0.1"], "noise_multiplier must lie in"),
        (["--label-epsilon", "0.1"], "label_epsilon must lie in [0.5, 8]"),
        (["--label-epsilon", "nan"], "label_epsilon must lie in [0.5, 8]"),
    ],
)
def test_impossible_settings_are_refused(options: list[str], message: str) -> None:
    """Each names the setting and what it may be; the command ends with exit code 2."""
    result = CliRunner().invoke(app, ["audit", *options])

    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert result.exception.exit_code == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 1}, "rounds must be at least 2"),
        ({"clip_norm": 0.0}, "clip_norm must be finite and > 0"),
        ({"timeout_s": -1.0}, "timeout_s must be finite and > 0"),
    ],
)
def test_impossible_settings_of_python_are_refused(settings: dict[str, Any], message: str) -> None:
    """Those that the command leaves at their defaults."""
    with pytest.raises(ConfigError, match=message):
        AuditSettings(**settings)
