"""The settings that a federation would run by at an epsilon."""

from collections.abc import Mapping
from typing import Any, Final

from securevfl.config.federation import FederationConfig

Overrides = Mapping[str, Mapping[str, Any]]
"""Settings by table of the federation file; None takes one out."""

# Of a family's settings, those that decide what a release holds and what reads it.
_OF_MODEL: Final = ("release", "neighbours", "hidden", "top")


def settings_for(config: FederationConfig, epsilon: float | None) -> Overrides:
    """Return what a run at an epsilon has otherwise than the file says.

    Args:
        config: The federation file.
        epsilon: What would be promised; None: nothing, and no noise is added.
    """
    privacy: dict[str, Any] = {
        "mechanism": "none" if epsilon is None else "gaussian",
        "epsilon": epsilon,
        "noise_multiplier": None,
        "gradient_noise_multiplier": None,
    }
    if epsilon is None and config.privacy.encoder == "dp-trained":
        # An encoder that learns without a promise is called so, and takes none of its settings.
        privacy |= {"encoder": "trained", "gradient_share": None, "gradient_clip_norm": None}
    return {"privacy": privacy}


def merged(source: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Return a parsed federation file with other settings; the source stays as it is."""
    result = dict(source)
    for section, fields in overrides.items():
        table = {**result.get(section, {}), **fields}
        result[section] = {name: value for name, value in table.items() if value is not None}
    return result


def chosen_settings(config: FederationConfig) -> dict[str, Any]:
    """Return the settings that decide what survives and what reads it, by table and name."""
    model = config.model
    found: dict[str, Any] = {"model.family": config.family.name}
    found |= {f"model.{name}": getattr(model, name) for name in _OF_MODEL if hasattr(model, name)}
    if config.top is not None:
        found["model.top"] = config.top.name
    if config.encoder is not None:
        found["encoder.method"] = config.encoder.method
        found["encoder.layout"] = "blocks" if config.encoder.in_blocks else "sum"
        if config.encoder.labels is not None:
            found["encoder.labels"] = config.encoder.labels
    found["privacy.encoder"] = config.privacy.encoder
    found["privacy.clip_norm"] = config.privacy.clip_norm
    if config.privacy.links_per_record is not None:
        found["privacy.links_per_record"] = config.privacy.links_per_record
    found["linkage.choose"] = config.linkage.choose
    return found
