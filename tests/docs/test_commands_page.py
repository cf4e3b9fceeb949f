"""The page of commands names every command."""

import re
from pathlib import Path

import typer

from securevfl.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs/commands.md").read_text(encoding="utf-8")


def test_every_command_is_on_the_page_and_no_other() -> None:
    group = typer.main.get_command(app)

    assert set(re.findall(r"`securevfl (\w+)", PAGE)) == set(group.commands)
