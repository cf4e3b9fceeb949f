"""Every kind of message has a type that says who tells what to whom, and the docs list them all."""

import importlib.util
from pathlib import Path

from securevfl.transport.message import MessageKind, TypedMessage

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
