"""What mkdocs does to a page beside its plugins; ``mkdocs.yml`` names this file."""

import re
from typing import Any

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):(?=<code>)")


def on_page_content(html: str, **_: Any) -> str:
    """Drop the roles of Sphinx that docstrings put before names in code type."""
    return _ROLE.sub("", html)
