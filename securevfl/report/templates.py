"""Templates of all pages: one look, everything that is filled in escaped."""

from pathlib import Path
from typing import Final

import jinja2

TEMPLATES: Final = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
)
"""Where the report's pages are made from."""
