"""What is changed so that a method of a comparison fits a file that was written for another one.

Rows, tables, the budget and K are equal for all methods. How links are chosen and how encoders are
made goes with a family, though: what one cannot take is changed for it, and said.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from securevfl.config.presets import expanded
from securevfl.config.top import without_top
from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.models.family import AnyFamily
from securevfl.models.registry import FAMILIES, family_named


def adapted(source: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a method's federation file with what its family can take, and what was changed.

    Args:
        source: The file as the method sees it.

    Raises:
        ConfigError: If its ``[model]`` table is wrong.
    """
    result, notes = dict(source), []
    model, _ = without_top(expanded(source)["model"])
    family = family_named(model.pop("family", None))
    require_own_fields(family, model)
    settings = family.settings_from(model)
    frozen = source["privacy"].get("encoder") == "frozen"
    pooled = frozen and family.pooled(settings, frozen=frozen)
    linkage = source["linkage"]
    if linkage.get("choose") == "records" and (not pooled or family.needs_similarities(settings)):
        result["linkage"] = {**linkage, "choose": "rows"}
        notes.append('linkage.choose = "rows", as it does not pool records')
    if "encoder" in source and not pooled:
        del result["encoder"]
        notes.append("no [encoder], which pools records")
    return result, tuple(notes)


def require_own_fields(family: AnyFamily, model: Mapping[str, Any]) -> None:
    """Refuse a field of ``[model]`` that another family has, and say where it would go.

    Args:
        family: The one that the file names.
        model: The table, without ``family``.

    Raises:
        ConfigError: With the fields that the family has, and the nearest of them.
    """
    own = _fields(family)
    others = {
        field: [other.name for other in FAMILIES.values() if field in _fields(other)]
        for field in sorted(set(model) - set(own))
    }
    for field, owners in others.items():
        if not owners:
            continue
        fixed = getattr(family.settings_class, field, None)
        always = isinstance(fixed, int | float | str)
        why = f"{field} is always {fixed!r} there" if always else f"{', '.join(owners)} have it"
        owner = "NAME" if always else owners[0]
        near = checks.nearest(field, own)
        hint = "" if near is None else f"the nearest is {near!r}; "
        raise ConfigError(
            f"model.{field}: no such field of family {family.name!r}: {why}; leave it out, or for "
            f"a comparison write it in [methods.{owner}]; {hint}{family.name} has: "
            f"{', '.join(sorted(own))}"
        )


def _fields(family: AnyFamily) -> tuple[str, ...]:
    return tuple(one.name for one in dataclasses.fields(family.settings_class) if one.init)
