"""The [privacy] table: impossible values and unsound promises."""

import math

import pytest

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.settings import read_settings
from securevfl.dp import Privacy


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"epsilon": 1.0, "delta": 0.0}, r"privacy\.delta must lie in \(0, 1\), got 0.0"),
        ({"epsilon": 1.0, "delta": 1.0}, r"privacy\.delta must lie in \(0, 1\), got 1.0"),
        ({"epsilon": math.nan}, r"privacy\.epsilon must be finite and > 0, got nan"),
        ({"epsilon": -1.0}, r"privacy\.epsilon must be finite and > 0"),
        ({"noise_multiplier": math.inf}, r"privacy\.noise_multiplier must be finite and > 0"),
        ({"epsilon": 1.0, "clip_norm": 0.0}, r"privacy\.clip_norm must be finite and > 0"),
        ({"epsilon": 1.0, "sampling_rate": 0.0}, r"privacy\.sampling_rate must lie in \(0, 1\]"),
        ({"epsilon": 1.0, "sampling_rate": 1.5}, r"privacy\.sampling_rate must lie in \(0, 1\]"),
        ({"epsilon": 1.0, "colluding": -1}, r"privacy\.colluding must be at least 0"),
        ({"epsilon": 1.0, "links_per_record": 0}, r"privacy\.links_per_record must be at least 1"),
        (
            {"epsilon": 1.0, "mask_degree": 3},
            r"privacy\.mask_degree: .* even number from 2 on, got 3",
        ),
        (
            {"epsilon": 1.0, "mask_degree": 0},
            r"privacy\.mask_degree: .* even number from 2 on, got 0",
        ),
        ({"epsilon": 1.0, "mask_degree": 4, "colluding": 4}, r"mask_degree: 4 .* at least 6"),
        ({"epsilon": 1.0, "mask_degree": 4, "colluding": 5}, r"mask_degree: 4 .* at least 6"),
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, r"privacy\.epsilon: exactly one .* got both"),
        ({}, r"privacy\.epsilon: exactly one .* got neither"),
        ({"mechanism": "none", "epsilon": 1.0}, r'privacy\.mechanism: "none" adds no noise'),
        ({"epsilon": 1.0, "unit": "row"}, r"privacy\.unit: must be one of"),
        ({"epsilon": 1.0, "q": 0.5}, r"privacy\.q: no such field"),
    ],
)
def test_an_impossible_value_names_its_field(table: dict, text: str) -> None:
    """Exit code 2: the file is wrong, and the message says where."""
    with pytest.raises(ConfigError, match=text):
        read_settings(Privacy, table, where="privacy")


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"sampling_rate": 0.1}, "use a frozen or dp-trained encoder"),
        ({"sampling_rate": 0.1, "unit": "linked-row", "encoder": "frozen"}, "linked-row"),
        ({"encoder": "frozen"}, "links_per_record: must be given"),
        ({"encoder": "frozen", "unit": "entity"}, "links_per_record: must be given"),
    ],
)
def test_an_unsound_promise_says_what_would_be_sound(table: dict, text: str) -> None:
    """Exit code 4: the guarantee does not hold; with as-published accounting it is not claimed."""
    with pytest.raises(PrivacyError, match=text) as raised:
        read_settings(Privacy, {"epsilon": 1.0, **table}, where="privacy")

    assert raised.value.exit_code == 4
    assert Privacy(epsilon=1.0, accounting="as-published", **table).epsilon == 1.0


def test_delta_is_compared_with_the_number_of_records() -> None:
    """Delta at or above 1/n is a warning, below it none."""
    privacy = Privacy(epsilon=1.0, delta=1e-3)

    assert privacy.delta_warning(999) is None
    assert "not below 1/1000" in (privacy.delta_warning(1000) or "")
    assert Privacy(mechanism="none").delta_warning(10**9) is None
