"""Write ``docs/federation-file.md`` and the JSON Schema of the file from the settings themselves.

    python tools/make_federation_file_page.py

Types, defaults, limits and words are those of ``tools/federation_schema.py``. A setting
without a docstring ends the program, and so does a section that this file does not know.
"""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from federation_schema import federation_schema, section_classes, settings_schema

from securevfl.data.sources.settings import Reading, Source
from securevfl.lab.methods import IN_ONE_PLACE, baseline_settings
from securevfl.linkage.metrics.metric import Field
from securevfl.models.family import AnyFamily
from securevfl.models.registry import FAMILIES
from securevfl.models.task_metrics import TASK_METRICS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/federation-file.md"
SCHEMA = ROOT / "securevfl/config/federation-file.schema.json"

_TABLE: Final = "| setting | takes | meaning |\n| --- | --- | --- |\n"

HEAD = """\
# Federation file

<!-- Made by `python tools/make_federation_file_page.py` (`make docs-pages`). Edit the docstrings
of the settings instead of this page. -->

After this page you know every setting of the one TOML file that says what a federation does.

Every party has the same file, and parties compare its hash when they meet. Nothing private is in
it. An unknown setting is refused, with the nearest name that exists. [Own tables](starting.md)
has a short file, the [tutorial](tutorial.md) a walk through one.

`[federation]`, `[privacy]`, `[linkage]` and one `[[party]]` for each party must be there, and
`[model]` unless `encoder.method = "auto"`. Below, `epochs = 20` shows a default. `1..9` are whole
numbers, `[0, 1)` all numbers from 0 to below 1. Names such as [FedSim] are papers of
[references](references.md). `securevfl check --schema > federation-file.schema.json` writes a
schema. Editors complete a file that begins with `#:schema federation-file.schema.json`.

## The settings that most files have
"""

SECTIONS = {
    "federation": "What is learned.",
    "party": """\
One table for each party. Exactly one is the primary, and at least one is a secondary. The primary
needs `address`, and `label` where something is trained. A coordinator or a dealer has a `name`, a
`role` and an `identity`, and no table.""",
    "model": """\
What the table may say depends on the family. `preset = "paper"` fills in what the file leaves out
with the paper's settings; they stand below each family, where they differ from the defaults.

With `privacy.encoder = "frozen"`, `top` may be `"boosting"` or `"linear"`, except in families that
pretrain. Scikit-learn's estimator then replaces the top network. It is fitted once, to the
primary's columns and numeric keys, the released numbers and the similarities.
[What each is worth](../research/frontier/README.md#estimators-on-top).""",
    "training": "How every family is trained.",
    "base": """\
What the joint model is averaged with, and what it must beat ([gain](local-baseline.md)).""",
    "privacy": """\
What is promised, and about what: [privacy](privacy.md). With noise, give one of `epsilon` and
`noise_multiplier`. A frozen or dp-trained encoder needs `links_per_record`, unless the unit is
`linked-row`.""",
    "linkage": """\
How rows and records find one another, and how keys are hidden: [linkage](linkage.md).""",
    "encoder": """\
How frozen encoders are made; goes with `privacy.encoder = "frozen"` and `model.release =
"pooled"`. At a small epsilon it matters most ([class means](class-means.md)).""",
    "prediction": "What a saved model may be asked for ([predictions](predictions.md)).",
    "mpc": "What parties compute on shares ([threat model](threat-model.md#computing-on-shares)).",
    "runtime": "How long a party waits for others ([lost parties](losses.md)). `_s`: seconds.",
    "pretraining": """\
For `fedhssl`, `fedgssl`, `fedcssl` and `fedlocalssl` alone ([FedHSSL](fedhssl.md)).""",
}
"""Sections in the order of the page, with the sentence that opens each."""

FIRST = {
    "federation": ("name", "task"),
    "party": ("name", "role", "data", "key", "label", "address", "scaling", "bounds", "exclude"),
    "model": ("family", "neighbours"),
    "training": ("epochs", "metric"),
    "privacy": ("epsilon", "delta", "unit", "encoder", "links_per_record", "colluding"),
    "linkage": ("metric", "protection", "max_distance"),
    "encoder": ("method",),
}
"""Settings that most files have, section by section; the sections' own tables leave them out."""

READING = """\
A table in the party's own, such as `reading = { separator = ";", decimal = "," }`, for files that
can be read in several ways ([tables](starting.md#dialects-of-text-files))."""

SOURCE = """\
A file of its party alone, which `data` names. It takes the settings of `reading` too, and must have
`file` or `url`."""

FIELDS = """\
With `metric = "mixed"` every key column has such a table, by the primary's name of the column."""

TASK_METRICS_OPENING = """\
Every run reports all metrics of its task; `training.metric` chooses the best epoch. They are
scikit-learn's; ↑: higher is better. Where a split's labels lack what a metric needs, it is null.
The chosen metric must be defined on all three splits, or the run is refused."""

METHODS = """\
Settings that `securevfl lab compare` gives a method ([experiments](experiments.md#compare)). `NAME`
is a family, a baseline below, or your own word with `family = "…"` in the table. A family takes
settings of `[training]` and `[model]`, and of `[pretraining]` in `[methods.NAME.pretraining]`."""


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
    parts = [HEAD, first_settings(classes), "The other settings follow, by section.\n"]
    for section, opening in SECTIONS.items():
        brackets = "[[party]]" if section == "party" else f"[{section}]"
        parts.append(f"## `{brackets}`\n\n{opening}\n")
        if section == "model":
            parts += model_parts()
        else:
            parts.append(table_of(classes[section], set(FIRST.get(section, ()))))
        if section == "training":
            parts += [f"### Metrics by task\n\n{TASK_METRICS_OPENING}\n", task_metrics()]
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


def first_settings(classes: Mapping[str, type[Any]]) -> str:
    """Return the table of :data:`FIRST`."""
    lines = []
    for section, names in FIRST.items():
        rows = _model_rows() if section == "model" else _rows_of(classes[section])
        lines += [rows[name].replace("| `", f"| `{section}.", 1) for name in names]
    return _TABLE + "\n".join(lines) + "\n"


def _model_rows() -> dict[str, str]:
    """Return the rows of the settings that every family has, whose defaults are the family's."""
    defaults: dict[int, list[str]] = {}
    for name, family in FAMILIES.items():
        settings = settings_schema(family.settings_class)["properties"]
        if "neighbours" in settings:
            defaults.setdefault(settings["neighbours"]["default"], []).append(name)
    several = "; ".join(f"{value} in {_listed(names)}" for value, names in defaults.items())
    return {
        "family": f"| `family` | {_listed(list(FAMILIES))} | The kind of model. |",
        "neighbours": f"| `neighbours` | 1..10000 | K, links of a row at every secondary; default: "
        f"{several}, and for exact keys. |",
    }


def model_parts() -> list[str]:
    """Return the tables of ``[model]``: of several families first, then of each."""
    groups = families_by_settings()
    tables = [
        {
            name: row
            for name, row in _rows_of(one[0].settings_class).items()
            if name not in FIRST["model"]
        }
        for one in groups
    ]
    often = Counter(row for table in tables for row in table.values())
    shared = {row: None for table in tables for row in table.values() if often[row] > 1}
    parts = ["### Several families\n", _TABLE + "\n".join(shared) + "\n"]
    for families, table in zip(groups, tables, strict=True):
        named = _listed([family.name for family in families])
        above = [name for name, row in table.items() if row in shared]
        own = [row for row in table.values() if row not in shared]
        parts.append(f"### family {named}\n")
        if above:
            parts.append(f"Above: {_listed(above)}.\n")
        parts.append((_TABLE + "\n".join(own) + "\n" if own else "") + presets_of(families))
    return parts


def families_by_settings() -> list[list[AnyFamily]]:
    """Return all families, those with the same settings together."""
    groups: dict[str, list[AnyFamily]] = {}
    for family in FAMILIES.values():
        groups.setdefault(table_of(family.settings_class), []).append(family)
    return list(groups.values())


def presets_of(families: list[AnyFamily]) -> str:
    """Return what the families' presets stand for, equal ones together."""
    classes = section_classes()
    lines: dict[str, list[str]] = {}
    for family in families:
        for name, preset in family.presets.items():
            sections = {
                "model": (preset.model, family.settings_class),
                "training": (preset.training, classes["training"]),
                "pretraining": (preset.pretraining, classes["pretraining"]),
                **{
                    f"pretraining], {algorithm}": (fields, classes["pretraining"])
                    for algorithm, fields in preset.algorithms.items()
                },
            }
            parts = []
            for section, (fields, kind) in sections.items():
                usual = {
                    key: one.get("default")
                    for key, one in settings_schema(kind)["properties"].items()
                }
                other = [
                    f"{key} = {_toml(value)}"
                    for key, value in fields.items()
                    if usual.get(key) != (list(value) if isinstance(value, tuple) else value)
                ]
                if other:
                    brackets = f"[{section}" if "]" in section else f"[{section}]"
                    parts.append(f"{brackets} `{', '.join(other)}`")
            lines.setdefault(f'`preset = "{name}"`: {"; ".join(parts)}', []).append(family.name)
    several = len(lines) > 1
    return "".join(
        f"\n{f'Of {_listed(names)}, ' if several else ''}{text}.\n" for text, names in lines.items()
    )


def task_metrics() -> str:
    """Return the Markdown table of every task's metrics, one metric of several tasks once."""
    lines: dict[str, list[str]] = {}
    for task, metrics in TASK_METRICS.items():
        for one in metrics:
            better = "↑" if one.higher_is_better else "↓"
            needs = "" if one.needs == "a row" else f"; needs {one.needs}"
            unit = {"label": ", in the label's unit", "none": ""}.get(one.unit, f" {one.unit}")
            text = f"| `{one.name}` | {one.meaning}: {one.values}{unit} {better}{needs} |"
            lines.setdefault(text, []).append(task)
    head = "| task | metric | meaning |\n| --- | --- | --- |\n"
    return head + "\n".join(f"| {', '.join(tasks)} {row}" for row, tasks in lines.items()) + "\n"


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
    return _TABLE + "\n".join(_rows_of(kind, without or set()).values()) + "\n"


def _rows_of(kind: type[Any], without: Collection[str] = ()) -> dict[str, str]:
    """Return the row of each of a dataclass's settings, by name."""
    table = settings_schema(kind, without=without)
    rows = {}
    for name, setting in table["properties"].items():
        default = setting.get("default", "")
        written = name if default in ("", {}) else f"{name} = {json.dumps(default)}"
        takes = f"{_takes(setting)}; required" if name in table["required"] else _takes(setting)
        meaning = re.sub(r"``(.+?)``", r"`\1`", setting["description"])
        rows[name] = f"| `{written}` | {takes} | {_cell(meaning)} |"
    return rows


def _takes(setting: dict[str, Any]) -> str:
    """Return what a setting takes, in the words of a person who writes TOML."""
    if "anyOf" in setting:
        return " or ".join(map(_takes, setting["anyOf"]))
    if "enum" in setting:
        return ", ".join(f"`{json.dumps(value)}`" for value in setting["enum"])
    match setting["type"]:
        case "array":
            return f"list of {_plural(setting['items'])}"
        case "object" if isinstance(setting.get("additionalProperties"), dict):
            return f"table of {_plural(setting['additionalProperties'])}"
        case "object":
            return "table"
        case "boolean":
            return "`true`, `false`"
        case "string":
            return "text"
        case kind:
            return _limits(setting) or ("whole number" if kind == "integer" else "number")


def _limits(number: dict[str, Any]) -> str:
    low, least = number.get("exclusiveMinimum"), number.get("minimum")
    high, most = number.get("exclusiveMaximum"), number.get("maximum")
    if number["type"] == "integer":
        return "" if least is None else f"{least:g}.." + ("" if most is None else f"{most:.0f}")
    if high is None and most is None:
        return "" if low is least is None else f">{low:g}" if least is None else f"≥{least:g}"
    begin = f"[{least:g}" if low is None else f"({low:g}"
    return f"{begin}, {f'{most:g}]' if high is None else f'{high:g})'}"


def _plural(items: dict[str, Any]) -> str:
    if "anyOf" in items:
        return " or ".join(map(_plural, items["anyOf"]))
    if items["type"] == "array":
        return f"lists of {_plural(items['items'])}"
    if items["type"] == "object":
        return "tables"
    words = {"string": "texts", "integer": "whole numbers", "number": "numbers"}
    return f"{words[items['type']]} {_limits(items)}".rstrip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    main()
