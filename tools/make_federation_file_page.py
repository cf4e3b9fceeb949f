"""Write ``docs/federation-file.md`` and the JSON Schema of the file from the settings themselves.

    python tools/make_federation_file_page.py

Types, defaults, limits and words are those of ``tools/federation_schema.py``. A setting
without a docstring ends the program, and so does a section that this file does not know.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from federation_schema import federation_schema, section_classes, settings_schema

from securevfl.config.methods import IN_ONE_PLACE, baseline_settings
from securevfl.data.sources.settings import Reading, Source
from securevfl.linkage.metrics.metric import Field
from securevfl.models.family import AnyFamily
from securevfl.models.registry import FAMILIES
from securevfl.models.task_metrics import TASK_METRICS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/federation-file.md"
SCHEMA = ROOT / "securevfl/config/federation-file.schema.json"

HEAD = """\
# The federation file

<!-- Made by `python tools/make_federation_file_page.py` (`make docs-pages`). Edit the docstrings
of the settings instead of this page. -->

One TOML file says what a federation does. Every party has the same one and compares its hash with
the others' when they meet; nothing private is in it. An unknown section or setting is refused, with
the nearest name that exists. The shortest file that trains is in [starting](starting.md#by-hand);
a walk through one is the [tutorial](tutorial.md).

Editors with TOML schemas (Even Better TOML, Taplo) complete and check a file that begins with
`#:schema federation-file.schema.json`; `securevfl check --schema > federation-file.schema.json`
writes that schema.

This page lists every setting. `[federation]`, `[model]`, `[privacy]`, `[linkage]` and one
`[[party]]` for each party must be there; the other sections may be left out. Settings without a
default must be written. Names in square brackets, such as [FedSim], are papers of
[references](references.md).
"""

SECTIONS = {
    "federation": "What is learned.",
    "party": """\
One table for each party, opened by `[[party]]`. Exactly one is the primary; at least one is a
secondary. A primary or secondary needs `data` and `key`; the primary also `address`, and `label`
where something is trained. A coordinator or a dealer has a `name`, a `role` and an `identity`, and
no table.""",
    "model": """\
`family` names the model; what else the table may say depends on the family. `preset = "paper"`
fills in what the file leaves out with what the family's paper writes, in other sections too; what
that is stands below each family's settings.

With `privacy.encoder = "frozen"` every family but those that pretrain may have `top = "boosting"`
(scikit-learn's histogram boosting) or `top = "linear"` (ridge or logistic regression): an estimator
in place of its top network, fitted once to the primary's own columns, numeric keys (whatever
`keys_as_features` says), the released numbers, and links' similarities in families that read them.
`epochs`, `learning_rate` and the like then mean nothing. What each is worth:
[frontier](../notebook/frontier.md#estimators-on-top). `python: ...` stands there in the file of a
run whose estimator `securevfl.simulate(top=...)` was handed.""",
    "training": "How every family is trained.",
    "base": """\
What the joint model is averaged with, and what it must beat to be used
([base](local-baseline.md)).""",
    "privacy": """\
What is promised, and about what. Read [privacy](privacy.md) before you choose. With
`mechanism = "gaussian"` exactly one of `epsilon` and `noise_multiplier` must be given; a frozen or
dp-trained encoder also needs `links_per_record`, unless the unit is `linked-row`.""",
    "linkage": """\
How rows and records find one another, and how keys are hidden meanwhile. What each protection
shows, and to whom, is in [linkage](linkage.md).""",
    "encoder": """\
How frozen encoders are made; the section may be left out. It goes with `privacy.encoder =
"frozen"` and `model.release = "pooled"`. At a small epsilon it matters more than anything else:
[frontier](results.md#accuracy-against-epsilon).""",
    "prediction": "What a kept model may be asked for ([predictions](predictions.md)).",
    "runtime": "How long a party waits before it gives another one up. All times are in seconds.",
    "pretraining": """\
For the families `fedhssl`, `fedgssl`, `fedcssl` and `fedlocalssl`, which learn without labels
before they are trained; the others read nothing of it. See [pretraining](fedhssl.md).""",
}
"""Sections in the order of the page, with the sentence that opens each."""

READING = """\
A table in the party's own, such as `reading = { separator = ";", decimal = "," }`. Nothing in it is
needed where a file can be read in one way only: [tables](tables.md)."""

SOURCE = """\
A file of its party alone, which `data` names; no other party reads it. All settings of `reading`
may stand in it, at its top, and one of `file` and `url` must."""

FIELDS = """\
With `metric = "mixed"` every key column has such a table, under the primary's name of the column;
the name is not a setting."""

TASK_METRICS_OPENING = """\
Every run reports all metrics of its task on validation and test rows; `training.metric` is the one
that chooses the best epoch and ends training, the first of each task unless the file says
otherwise. They are scikit-learn's; of two labels the second class is the one that `positive` of
the primary's party names, or else the one that sorts last. Where a split's labels do not have what
a metric needs, it is not defined: null in files. The chosen one must be defined on training,
validation and test rows, or the run is refused before anything is released."""

METHODS = """\
`securevfl lab compare` gives a method these settings on top of the file's own; see
[experiments](experiments.md#compare). `NAME` is a family, one of the baselines below, or a name of
your choice with `family = "…"` in the table. A family takes settings of `[training]` and of its
`[model]` here, side by side, and those of `[pretraining]` in `[methods.NAME.pretraining]`. The
baselines train with all that they need in one place, and take the following."""


def main() -> None:
    """Write the page and the schema."""
    PAGE.write_text(page(), encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")


def schema() -> str:
    """Return the JSON Schema."""
    return json.dumps(federation_schema(), indent=1, ensure_ascii=False) + "\n"


def page() -> str:
    """Return the page.

    Raises:
        LookupError: If a setting has no docstring, or a section is not in :data:`SECTIONS`.
    """
    classes = section_classes()
    unknown = sorted({*classes, "model"} ^ set(SECTIONS))
    if unknown:
        raise LookupError(f"SECTIONS and the sections of a federation file differ in {unknown}")
    parts = [HEAD]
    for section, opening in SECTIONS.items():
        brackets = "[[party]]" if section == "party" else f"[{section}]"
        parts.append(f"## `{brackets}`\n\n{opening}\n")
        if section == "model":
            parts += [family_part(families) for families in families_by_settings()]
        else:
            parts.append(table_of(classes[section]))
        if section == "training":
            parts += [f"### metrics by task\n\n{TASK_METRICS_OPENING}\n", task_metrics()]
        if section == "party":
            parts += [f"### `reading`\n\n{READING}\n", table_of(Reading)]
            parts += [
                f"### `NAME.source.toml`\n\n{SOURCE}\n",
                table_of(Source, {one.name for one in dataclasses.fields(Reading)}),
            ]
        if section == "linkage":
            parts += [f"### `[linkage.fields.COLUMN]`\n\n{FIELDS}\n", table_of(Field, {"name"})]
    parts.append(f"## `[methods.NAME]`\n\n{METHODS}\n")
    for kind, names in baselines().items():
        parts += [f"### {_listed(names)}\n", table_of(kind)]
    return "\n".join(parts)


def families_by_settings() -> list[list[AnyFamily]]:
    """Return all families, those with the same settings together."""
    groups: dict[str, list[AnyFamily]] = {}
    for family in FAMILIES.values():
        groups.setdefault(table_of(family.settings_class), []).append(family)
    return list(groups.values())


def family_part(families: list[AnyFamily]) -> str:
    """Return a heading and a table for families with the same settings."""
    names = _listed([family.name for family in families])
    return f"### family {names}\n\n{table_of(families[0].settings_class)}{presets_of(families)}"


def presets_of(families: list[AnyFamily]) -> str:
    """Return a list of what the families' presets stand for, equal ones together."""
    lines: dict[str, list[str]] = {}
    for family in families:
        for name, preset in family.presets.items():
            sections = {
                "model": preset.model,
                "training": preset.training,
                "pretraining": preset.pretraining,
                **{
                    f'pretraining` with `algorithm = "{algorithm}"': fields
                    for algorithm, fields in preset.algorithms.items()
                },
            }
            parts = [
                f"in `[{section}]`: "
                + ", ".join(f"`{key} = {_toml(value)}`" for key, value in fields.items())
                for section, fields in sections.items()
                if fields
            ]
            lines.setdefault(f'`preset = "{name}"` is {"; ".join(parts)}', []).append(family.name)
    if not lines:
        return ""
    return (
        "\n"
        + "\n".join(
            f"- Of {_listed(names)}, {text}; without noise `privacy.clip_norm` never bites."
            for text, names in lines.items()
        )
        + "\n"
    )


def task_metrics() -> str:
    """Return the Markdown table of every task's metrics."""
    lines = ["| task | metric | what it is | unit | values | better | needs |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for task, metrics in TASK_METRICS.items():
        for one in metrics:
            unit = "the label's" if one.unit == "label" else one.unit
            better = "higher" if one.higher_is_better else "lower"
            cells = (task, f"`{one.name}`", one.meaning, unit, one.values, better, one.needs)
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def baselines() -> dict[type[Any], list[str]]:
    """Return the settings of methods that train in one place, with the methods' names."""
    found: dict[type[Any], list[str]] = {}
    for name in IN_ONE_PLACE:
        found.setdefault(type(baseline_settings({}, name)), []).append(name)
    return found


def table_of(kind: type[Any], without: set[str] | None = None) -> str:
    """Return the Markdown table of a dataclass's settings.

    Args:
        kind: The dataclass.
        without: Fields that a file does not set.

    Raises:
        LookupError: If a field has no docstring.
    """
    table = settings_schema(kind, without=without or ())
    lines = ["| setting | takes | default | meaning |", "| --- | --- | --- | --- |"]
    for name, setting in table["properties"].items():
        default = "must be given" if name in table["required"] else "not set"
        if "default" in setting:
            default = f"`{json.dumps(setting['default'])}`"
        meaning = re.sub(r"``(.+?)``", r"`\1`", setting["description"])
        lines.append(f"| `{name}` | {_takes(setting)} | {default} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def _takes(setting: dict[str, Any]) -> str:
    """Return what a setting takes, in the words of somebody who writes TOML."""
    if "anyOf" in setting:
        return " or ".join(map(_takes, setting["anyOf"]))
    if "enum" in setting:
        return ", ".join(f"`{json.dumps(value)}`" for value in setting["enum"])
    match setting["type"]:
        case "array":
            return f"a list of {_plural(setting['items'])}"
        case "object" if isinstance(setting.get("additionalProperties"), dict):
            return f"a table of {_plural(setting['additionalProperties'])}"
        case "object":
            return "a table"
        case "boolean":
            return "`true`, `false`"
        case "string":
            return "text"
        case kind:
            return f"{'whole number' if kind == 'integer' else 'number'}{_limits(setting)}"


def _limits(number: dict[str, Any]) -> str:
    low, least = number.get("exclusiveMinimum"), number.get("minimum")
    high, most = number.get("exclusiveMaximum"), number.get("maximum")
    if high is None and most is None:
        return "" if low is least is None else f" > {low:g}" if least is None else f" ≥ {least:g}"
    if least is not None and most is not None:
        return f" {least:g} to {most:,.0f}"
    begin = f"[{least:g}" if low is None else f"({low:g}"
    return f" in {begin}, {f'{most:,g}]' if high is None else f'{high:g})'}"


def _plural(items: dict[str, Any]) -> str:
    if "anyOf" in items:
        return " or ".join(map(_plural, items["anyOf"]))
    if items["type"] == "array":
        return f"lists of {_plural(items['items'])}"
    if items["type"] == "object":
        return "tables"
    words = {"string": "texts", "integer": "whole numbers", "number": "numbers"}
    return f"{words[items['type']]}{_limits(items)}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    main()
