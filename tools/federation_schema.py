"""JSON Schema of the federation file, with which editors complete and check one as it is written.

Types and defaults are those of the settings' dataclasses, descriptions the docstrings below their
fields. Limits are those of the checks in a field's annotation, and of the calls of
:mod:`securevfl.core.checks` that name a field.
"""

import ast
import dataclasses
import inspect
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, cast, get_args, get_type_hints

from pydantic import TypeAdapter

from securevfl.config.federation import FederationConfig
from securevfl.config.linkage import LinkageSettings
from securevfl.config.presets import TopEstimator
from securevfl.config.sections import PartySettings, TrainingSettings
from securevfl.core import checks
from securevfl.linkage.metrics.metric import Field
from securevfl.linkage.stage.linkage_parts import METRICS, PROTECTIONS
from securevfl.models.alone.margins import Named
from securevfl.models.family import AnyFamily
from securevfl.models.registry import FAMILIES
from securevfl.models.task_metrics import TASK_METRICS

_LIMITS: Final[Mapping[str, Mapping[str, float]]] = {
    name: check.limits
    for name, check in vars(checks).items()
    if isinstance(check, checks.NumberCheck)
}
"""What functions of :mod:`securevfl.core.checks` without a number of their own ask for."""

_BOUNDS: Final[Mapping[str, tuple[str, ...]]] = {
    "at_least": ("minimum",),
    "whole_from": ("minimum",),
    "at_most": ("maximum",),
    "within": ("minimum", "maximum"),
}
"""What the numbers of others mean."""

_NAMES: Final[Mapping[tuple[type[Any], str], Iterable[str]]] = {
    (LinkageSettings, "metric"): METRICS,
    (LinkageSettings, "protection"): PROTECTIONS,
    (TrainingSettings, "metric"): dict.fromkeys(
        metric.name for metrics in TASK_METRICS.values() for metric in metrics
    ),
}
"""Settings that take a name of a table."""


def federation_schema() -> dict[str, Any]:
    """Return the JSON Schema of a federation file.

    Raises:
        LookupError: If a setting has no docstring.
    """
    sections = {name: settings_schema(kind) for name, kind in section_classes().items()}
    sections["linkage"]["properties"]["fields"]["additionalProperties"] = settings_schema(
        Field, without=("name",)
    )
    sections["encoder"]["properties"]["method"]["enum"].append("auto")
    models = [_model_schema(family) for family in FAMILIES.values()]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "securevfl federation file",
        "type": "object",
        "properties": {
            **sections,
            "party": {"type": "array", "items": sections["party"], "minItems": 2},
            "model": {"type": "object", "anyOf": models},
            "methods": {"type": "object", "additionalProperties": {"type": "object"}},
        },
        # With encoder.method = "auto" [model] may be left out.
        "required": ["federation", "privacy", "linkage", "party"],
        "additionalProperties": False,
    }


def _model_schema(family: AnyFamily) -> dict[str, Any]:
    schema = settings_schema(family.settings_class)
    networks = schema["properties"].get("top", {}).get("enum", [])
    return {
        **schema,
        "properties": {
            "family": {"const": family.name, "description": "The model's family."},
            "preset": {"enum": list(family.presets), "description": "Settings of a paper."},
            **schema["properties"],
            "top": {
                "anyOf": [
                    {"enum": [*networks, *get_args(Named), "tied", "mixed"]},
                    {"type": "string", "pattern": "^python: "},
                ],
                "description": "The top model: one of the family's networks, or an estimator.",
            },
        },
    }


def section_classes() -> dict[str, type[Any]]:
    """Return the dataclass of every section but ``[model]``, as the parsed file holds them."""
    elsewhere = (AnyFamily, PartySettings, TopEstimator)
    found: dict[str, type[Any]] = {"party": PartySettings}
    for name, hint in get_type_hints(FederationConfig).items():
        for kind in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(kind) and kind not in elsewhere:
                found[name] = cast("type[Any]", kind)
    return found


def settings_schema(kind: type[Any], *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the JSON Schema of one table of settings.

    Args:
        kind: The dataclass.
        without: Fields that a file does not set.

    Raises:
        LookupError: If a field has no docstring.
    """
    docs, limits, properties = dict(_docstrings(kind)), _limits_of(kind), {}
    found = TypeAdapter(kind).json_schema()
    for field in dataclasses.fields(kind):
        if not field.init or field.name in without:
            continue
        if field.name not in docs:
            raise LookupError(f"{kind.__module__}.{kind.__name__}.{field.name} has no docstring")
        schema = found["properties"][field.name]
        if (kind, field.name) in _NAMES:
            schema["enum"] = list(_NAMES[kind, field.name])
        choices = [one for one in schema.pop("anyOf", ()) if one != {"type": "null"}]
        if len(choices) == 1:  # TOML has no null: a setting is left out
            schema |= choices[0]
        elif choices:
            schema["anyOf"] = choices
        for one in (schema, schema.get("items", {}), *choices):
            if one.get("type") in ("integer", "number"):
                one |= limits.get(field.name, {})
        if "$ref" in schema:
            schema = settings_schema(type(field.default)) | {"default": {}}
        schema.pop("title", None)
        if schema.get("default", ...) is None:
            del schema["default"]
        properties[field.name] = schema | {"description": " ".join(docs[field.name].split())}
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in found.get("required", ()) if name not in without],
        "additionalProperties": False,
    }


def _docstrings(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield (field, text below it) of a dataclass and of those it inherits from, its own last."""
    for _, body in _class_bodies(kind):
        for statement, below in itertools.pairwise(body):
            match statement, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    yield name, text
                case _:
                    pass


def _limits_of(kind: type[Any]) -> dict[str, dict[str, float]]:
    """Return the limits of every field: its annotation, and checks of the class and its bases.

    A check in a method names its field as ``checks.positive(epsilon=self.epsilon)``, or takes a
    dict whose values are such.
    """
    found: dict[str, dict[str, float]] = {}
    for name, _, own in checks.limits_of(kind):  # type: ignore[arg-type]  # a class is hashable
        for check in own:
            if isinstance(check, checks.NumberCheck):
                found.setdefault(name, {}).update(check.limits)
            elif isinstance(check, partial) and check.func.__name__ in _BOUNDS:
                words = _BOUNDS[check.func.__name__]
                found.setdefault(name, {}).update(zip(words, check.args, strict=True))
    for base, body in _class_bodies(kind):
        for method in body:
            if isinstance(method, ast.FunctionDef):
                for name, limit in _limits_in(method, vars(inspect.getmodule(base))):
                    found.setdefault(name, {}).update(limit)
    return found


def _limits_in(
    method: ast.FunctionDef, constants: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, float]]]:
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
        if check in _LIMITS:
            limit = _LIMITS[check]
        elif check in _BOUNDS:
            numbers = (_number_of(one, constants) for one in node.args)
            limit = dict(zip(_BOUNDS[check], numbers, strict=True))
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


def _number_of(node: ast.expr, constants: Mapping[str, Any]) -> float:
    """Return a limit that is written as a number, as a constant or as one of a module."""
    match node:
        case ast.Name(id=name):
            return float(constants[name])
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return float(getattr(constants[module], name))
        case ast.IfExp(body=one, orelse=other):  # it depends on another setting: the wider limit
            return min(_number_of(one, constants), _number_of(other, constants))
        case _:
            return float(ast.literal_eval(node))


def _own_fields(node: ast.AST) -> Iterator[str]:
    """Yield the fields whose values an expression holds: ``self.x``, or names for ``getattr``."""
    reads_by_name = any(isinstance(one, ast.Name) and one.id == "getattr" for one in ast.walk(node))
    for one in ast.walk(node):
        match one:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield name
            case ast.Constant(value=str(name)) if reads_by_name:
                yield name


def _class_bodies(kind: type[Any]) -> Iterator[tuple[type[Any], list[ast.stmt]]]:
    """Yield a dataclass and those it inherits from, bases first, with their statements."""
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            (definition,) = ast.parse(inspect.getsource(base)).body
            assert isinstance(definition, ast.ClassDef), "source of a class"
            yield base, definition.body
