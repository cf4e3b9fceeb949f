"""Write ``docs/federation-file.md`` from the docstrings of the settings themselves.

    python tools/make_federation_file_page.py

Types and defaults are those of the dataclasses, words those of the docstring below each field, and
limits those of the calls of :mod:`securevfl.core.checks` that name the field. A setting without a
docstring ends the program, and so does a section that this file does not know.
"""

import ast
import dataclasses
import inspect
import itertools
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from securevfl.config.federation import FederationConfig
from securevfl.config.linkage import LinkageSettings
from securevfl.config.methods import IN_ONE_PLACE, baseline_settings
from securevfl.config.parties import PartySettings
from securevfl.config.presets import TopEstimator
from securevfl.config.sections import TrainingSettings
from securevfl.data.sources.settings import Reading, Source
from securevfl.linkage.metrics.metric import Field
from securevfl.linkage.stage.linking import METRICS, PROTECTIONS
from securevfl.models.family import AnyFamily
from securevfl.models.registry import FAMILIES
from securevfl.models.task_metrics import TASK_METRICS

PAGE = Path(__file__).resolve().parents[1] / "docs/federation-file.md"

HEAD = """\
# The federation file

<!-- Made by `python tools/make_federation_file_page.py` (`make docs-pages`). Edit the docstrings
of the settings instead of this page. -->

One TOML file says what a federation does. Every party has the same one and compares its hash with
the others' when they meet; nothing private is in it. An unknown section or setting is refused, with
the nearest name that exists. The shortest file that trains is in the README; a walk through one is
the [tutorial](tutorial.md).

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
before they are trained; the others read nothing of it. See [pretraining](pretraining.md).""",
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
[compare](compare.md). `NAME` is a family, one of the baselines below, or a name of your choice with
`family = "…"` in the table. A family takes settings of `[training]` and of its `[model]` here, side
by side, and those of `[pretraining]` in `[methods.NAME.pretraining]`. The baselines train with all
that they need in one place, and take the following."""

LIMITS = {
    "positive": "> 0",
    "non_negative": "≥ 0",
    "open_unit": "in (0, 1)",
    "rate": "in (0, 1]",
    "fraction": "in [0, 1)",
}
"""What the functions of :mod:`securevfl.core.checks` ask for; ``at_least`` has its own number."""

NAMES: dict[tuple[type[Any], str], Iterable[str]] = {
    (LinkageSettings, "metric"): METRICS,
    (LinkageSettings, "protection"): PROTECTIONS,
    (TrainingSettings, "metric"): dict.fromkeys(
        metric.name for metrics in TASK_METRICS.values() for metric in metrics
    ),
}
"""Settings that take a name of a table."""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


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
            parts += [f"### `NAME.source.toml`\n\n{SOURCE}\n", table_of(Source, set_of(Reading))]
        if section == "linkage":
            parts += [f"### `[linkage.fields.COLUMN]`\n\n{FIELDS}\n", table_of(Field, {"name"})]
    parts.append(f"## `[methods.NAME]`\n\n{METHODS}\n")
    for kind, names in baselines().items():
        parts += [f"### {_listed(names)}\n", table_of(kind)]
    return "\n".join(parts)


def section_classes() -> dict[str, type[Any]]:
    """Return the dataclass of every section but ``[model]``, as the parsed file holds them."""
    elsewhere = (AnyFamily, PartySettings, TopEstimator)
    found: dict[str, type[Any]] = {"party": PartySettings}
    for name, hint in get_type_hints(FederationConfig).items():
        for kind in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(kind) and kind not in elsewhere:
                found[name] = typing.cast("type[Any]", kind)
    return found


def settings_of(family: AnyFamily) -> type[Any]:
    """Return the dataclass of a family's ``[model]`` table."""
    return family.settings_class


def families_by_settings() -> list[list[AnyFamily]]:
    """Return all families, those with the same settings together."""
    groups: dict[str, list[AnyFamily]] = {}
    for family in FAMILIES.values():
        groups.setdefault(table_of(settings_of(family)), []).append(family)
    return list(groups.values())


def family_part(families: list[AnyFamily]) -> str:
    """Return a heading and a table for families with the same settings."""
    names = _listed([family.name for family in families])
    return f"### family {names}\n\n{table_of(settings_of(families[0]))}{presets_of(families)}"


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
    docs, limits = dict(docstrings(kind)), dict(limits_of(kind))
    hints = get_type_hints(kind)
    lines = ["| setting | takes | default | meaning |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(kind):
        if not field.init or field.name in (without or ()):
            continue
        if field.name not in docs:
            raise LookupError(f"{kind.__module__}.{kind.__name__}.{field.name} has no docstring")
        names = NAMES.get((kind, field.name))
        takes = _words(Literal[tuple(names)] if names is not None else hints[field.name])
        if field.name in limits:
            # A limit is the number's, also where something else may stand for it.
            limit = limits[field.name]
            limited, found = re.subn(r"number(?= or )", f"number {limit}", takes, count=1)
            takes = limited if found else f"{takes} {limit}"
        meaning = re.sub(r"``(.+?)``", r"`\1`", " ".join(docs[field.name].split()))
        lines.append(f"| `{field.name}` | {takes} | {_default(field)} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def set_of(kind: type[Any]) -> set[str]:
    """Return the names of a dataclass's settings."""
    return {field.name for field in dataclasses.fields(kind)}


def docstrings(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield (field, text below it) of a dataclass and of those it inherits from, its own last."""
    for base in _bases(kind):
        body = _class_body(base)
        for statement, below in itertools.pairwise(body):
            match statement, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    yield name, text
                case _:
                    pass


def limits_of(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield (field, limit) for every check of a field in the class and in those it inherits from.

    A check names its field as ``checks.positive(epsilon=self.epsilon)``, or hands over a dict whose
    values are such.
    """
    for base in _bases(kind):
        for method in _class_body(base):
            if isinstance(method, ast.FunctionDef):
                yield from _limits_in(method, vars(inspect.getmodule(base)))


def _limits_in(method: ast.FunctionDef, constants: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    dicts = {
        node.targets[0].id: list(_own_fields(node.value))
        for node in ast.walk(method)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(method):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="checks"), attr=check)):
                pass
            case _:
                continue
        if check == "at_least":
            limit = f"≥ {ast.unparse(node.args[0])}"
        elif check == "within":
            least, most = (_number_of(one, constants) for one in node.args)
            limit = f"{least} to {most:,}"
        elif check in LIMITS:
            limit = LIMITS[check]
        else:
            continue
        for keyword in node.keywords:
            if keyword.arg is not None:
                names = [keyword.arg]
            elif isinstance(keyword.value, ast.Name):
                names = dicts[keyword.value.id]
            else:
                names = list(_own_fields(keyword.value))
            yield from ((name, limit) for name in names)


def _number_of(node: ast.expr, constants: Mapping[str, Any]) -> int:
    """Return a limit that is written as a number, as a constant or as one of a module."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return int(constants[name])
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return int(getattr(constants[module], name))
        case _:
            raise SystemExit(f"{ast.unparse(node)}: is no limit that this program can read")


def _own_fields(node: ast.AST) -> Iterator[str]:
    """Yield the fields whose values an expression holds: ``self.x``, or names for ``getattr``."""
    reads_by_name = any(isinstance(one, ast.Name) and one.id == "getattr" for one in ast.walk(node))
    for one in ast.walk(node):
        match one:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield name
            case ast.Constant(value=str(name)) if reads_by_name:
                yield name


def _bases(kind: type[Any]) -> list[type[Any]]:
    return [base for base in reversed(kind.__mro__) if dataclasses.is_dataclass(base)]


def _class_body(kind: type[Any]) -> list[ast.stmt]:
    module = ast.parse(inspect.getsource(kind))
    definition = module.body[0]
    assert isinstance(definition, ast.ClassDef)
    return definition.body


def _words(hint: Any) -> str:
    """Return a type in the words of somebody who writes TOML."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(one) for one in inside if one is not type(None))
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in inside)
    if origin is tuple:
        return f"a list of {_plural(inside[0])}"
    if origin is dict:
        return f"a table of {_plural(inside[1])}"
    if dataclasses.is_dataclass(hint):
        return "a table"
    names = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}
    return names[hint]


def _plural(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"lists of {_plural(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "tables"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_plural(one) for one in get_args(hint))
    return {str: "texts", int: "whole numbers", float: "numbers"}[hint]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "must be given"
    if field.default is None:
        return "not set"
    if dataclasses.is_dataclass(field.default):
        return "`{}`"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    main()
