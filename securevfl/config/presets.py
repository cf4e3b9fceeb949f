"""Presets of ``[model]``, as papers write, and ``model.top``: settings that stand for others.

``model.top`` may be an estimator, for any family with frozen encoders. A family's own ``top``, as
that of ``fet``, names one of its networks, and is read by the family.

A preset fills in what a file leaves out, in ``[model]``, ``[training]``, ``[base]`` and
``[pretraining]``, and without noise ``privacy.clip_norm``. Comparisons know each as a method of its
own, ``fedsim-paper``, and of families that pretrain one for every algorithm,
``fedhssl-paper-byol``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from securevfl.config.sections import OWN, TrainingSettings, describe_estimator
from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.settings import read_settings
from securevfl.dp.privacy import Privacy
from securevfl.models.alone.margins import Named
from securevfl.models.family import AnyFamily, FamilySettings, Preset, PretrainingSettings
from securevfl.models.registry import FAMILIES, family_named

_OWN: Final = f"{OWN}: "
_CORRECTING: Final = ("tied", "mixed")


@dataclass(frozen=True, kw_only=True, slots=True)
class TopEstimator:
    """An estimator in place of a top network."""

    name: Named | Literal["tied", "mixed", "python"]
    """``tied`` and ``mixed`` are :mod:`securevfl.models.fitted_top`; ``python`` is one that only
    Python can hand over."""

    described: str | None = None
    """Class and parameters of the estimator, for ``python``."""

    @property
    def corrects(self) -> bool:
        """Whether it corrects a base, and is no model of its own."""
        return self.name in _CORRECTING


def without_top(model: Mapping[str, Any]) -> tuple[dict[str, Any], TopEstimator | None]:
    """Return a ``[model]`` table as its family reads it, and the estimator that it names, if any.

    Args:
        model: The table.
    """
    top, fields = model.get("top"), dict(model)
    if isinstance(top, str) and top.startswith(_OWN):
        del fields["top"]
        return fields, TopEstimator(name="python", described=top.removeprefix(_OWN))
    for name in (*get_args(Named), *_CORRECTING):
        if top == name:
            del fields["top"]
            return fields, TopEstimator(name=name)
    return fields, None


def top_source(top: Any) -> str:
    """Return what ``top`` of ``[model]`` is for what Python was handed: a name, or an estimator.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(top, str):
        return top
    names = '"boosting", "linear", "tied", "mixed"'
    return f"{_OWN}{describe_estimator(top, f'top: must be {names}')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetSettings:
    """A preset as settings of :func:`securevfl.simulate`."""

    model: FamilySettings
    training: TrainingSettings
    pretraining: PretrainingSettings
    privacy: Privacy
    """Without noise, and without a clip that shortens anything."""

    base: str
    """``base.estimator``; papers have none."""


def preset(
    family: str, name: str = "paper", *, algorithm: str | None = None, **model: Any
) -> PresetSettings:
    """Return a family's preset for use in Python.

    Args:
        family: As a federation file names it, for example ``"fedsim"``.
        name: Of the preset.
        algorithm: For families that pretrain: ``simsiam``, ``byol`` or ``moco``.
        model: Settings of the model that come before the preset's.

    Raises:
        ConfigError: If there is no such preset, or a setting is impossible.

    Examples:
        >>> preset("fedsim", neighbours=20).model.merge
        'convolution'
    """
    source = expand_preset(
        {
            "model": {"family": family, "preset": name, **model},
            "privacy": {"mechanism": "none"},
            "pretraining": {} if algorithm is None else {"algorithm": algorithm},
        }
    )
    own = {key: value for key, value in source["model"].items() if key != "family"}
    return PresetSettings(
        model=family_named(family).settings_from(own),
        training=read_settings(TrainingSettings, source["training"], where="training"),
        pretraining=read_settings(PretrainingSettings, source["pretraining"], where="pretraining"),
        privacy=read_settings(Privacy, source["privacy"], where="privacy"),
        base=source["base"]["estimator"],
    )


def expand_preset(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a parsed federation file with its preset written out, if it names one.

    Raises:
        ConfigError: If its family has no preset of that name.
    """
    if "preset" not in source["model"]:
        return source
    family = family_named(source["model"].get("family"))
    return _fill_from_preset(source, preset_named(family, source["model"]["preset"]))


def methods_with_presets() -> dict[str, dict[str, Any]]:
    """Return every name such as ``fedsim-paper``, with the ``[methods.NAME]`` table it means."""
    methods: dict[str, dict[str, Any]] = {}
    for family in FAMILIES.values():
        for called, method_preset in family.presets.items():
            stem, table = f"{family.name}-{called}", {"family": family.name, "preset": called}
            methods[stem] = table
            for algorithm in method_preset.algorithms:
                methods[f"{stem}-{algorithm}"] = {**table, "pretraining": {"algorithm": algorithm}}
    return methods


def preset_named(family: AnyFamily, name: object) -> Preset:
    """Return a family's preset.

    Raises:
        ConfigError: If it has none of that name; those it has are listed.
    """
    if isinstance(name, str) and name in family.presets:
        return family.presets[name]
    near = checks.did_you_mean(name, family.presets)
    there = ", ".join(map(repr, family.presets)) or "none"
    raise ConfigError(f"model.preset: {family.name!r} has {there}; got {name!r}{near}")


def pretraining_of(method_preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's fields of ``[pretraining]`` for the algorithm that a table asks for."""
    algorithm = given.get("algorithm", PretrainingSettings().algorithm)
    return {**method_preset.pretraining, **method_preset.algorithms.get(algorithm, {})}


def base_of(method_preset: Preset, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's ``[base]`` table, with the preset's estimator where it names none."""
    return {"estimator": method_preset.base, **source.get("base", {})}


def privacy_of(method_preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``[privacy]`` table, with the preset's clip norm where nothing is promised."""
    free = given.get("mechanism") == "none"
    return {**({"clip_norm": method_preset.clip_norm} if free else {}), **given}


def _fill_from_preset(source: Mapping[str, Any], method_preset: Preset) -> dict[str, Any]:
    given = source.get("pretraining", {})
    own = {key: value for key, value in source["model"].items() if key != "preset"}
    return {
        **source,
        "model": {**method_preset.model, **own},
        "training": {**method_preset.training, **source.get("training", {})},
        "base": base_of(method_preset, source),
        "pretraining": {**pretraining_of(method_preset, given), **given},
        "privacy": privacy_of(method_preset, source["privacy"]),
    }
