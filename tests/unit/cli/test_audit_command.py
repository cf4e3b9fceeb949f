"""``securevfl lab audit`` refuses impossible settings before any process starts."""

import pytest
from typer.testing import CliRunner

from securevfl.core.errors import ConfigError
from securevfl.lab.commands import app


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--secondaries", "0"], "secondaries must be at least 1"),
        (["--rounds", "1"], "rounds must be at least 2"),
        (["--noise-multiplier", "nan"], "noise_multiplier must be finite"),
        (["--noise-multiplier", "0.1"], "noise_multiplier must lie in"),
        (["--clip-norm", "0"], "clip_norm must be finite and > 0"),
        (["--label-epsilon", "0.1"], "label_epsilon must lie in [0.5, 8]"),
        (["--label-epsilon", "nan"], "label_epsilon must lie in [0.5, 8]"),
        (["--timeout", "-1"], "timeout_s must be finite and > 0"),
    ],
)
def test_impossible_settings_are_refused(options: list[str], message: str) -> None:
    """Each names the setting and what it may be; the command ends with exit code 2."""
    result = CliRunner().invoke(app, ["audit", *options])

    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert result.exception.exit_code == 2
