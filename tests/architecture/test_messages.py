"""Every kind of message has a type that says who tells what to whom, and the docs list them all."""

import importlib.util
from dataclasses import fields
from pathlib import Path
from typing import get_args

from securevfl.transport.message import Cover, MessageKind, TypedMessage

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def generator():
    spec = importlib.util.spec_from_file_location("make_table", TOOLS / "make_message_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_kind_has_a_type_that_says_what_it_tells() -> None:
    """A code that nobody describes is one that nobody has thought about."""
    types = generator().message_types()
    kinds = {kind for package in MessageKind.__subclasses__() for kind in package}
    assert {one.KIND for one in types} == kinds
    # The docstring that a dataclass makes of its fields says nothing.
    assert [one.__name__ for one in types if (one.__doc__ or "").startswith(one.__name__)] == []
    assert all(one.WAY for one in types)
    assert TypedMessage in types[0].__mro__


def test_codes_belong_to_one_kind_each() -> None:
    """Two packages that took one code would read each other's messages."""
    codes = [kind.value for package in MessageKind.__subclasses__() for kind in package]
    assert len(codes) == len(set(codes))


def test_the_threat_model_lists_every_message() -> None:
    """Run ``python tools/make_message_table.py`` when this fails."""
    script = generator()
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.BEGIN in page
    assert script.written(page) == page


def fields_of(one: type[TypedMessage]) -> set[str]:
    return {field.name for field in fields(one)} | {"lengths"}


def test_something_stands_for_every_field_of_every_message() -> None:
    """A field without an entry is one that nobody has asked what it says of a record."""
    covers = set(get_args(Cover))
    for one in generator().message_types():
        named = [name for names in one.COVERS.values() for name in names.split()]
        assert set(named) == fields_of(one), one.__name__
        assert set(one.COVERS) <= covers
        alone = {
            name for cover in ("no record", "masks") for name in one.COVERS.get(cover, "").split()
        }
        assert all(named.count(name) == 1 for name in alone - {"values"}), one.__name__


def test_every_channel_is_that_of_a_field() -> None:
    """And each name that is no channel says that nothing of a run's records can be in the field."""
    carried = {cover for one in generator().message_types() for cover in one.COVERS}
    assert carried | {"publication of the model"} == set(get_args(Cover))
