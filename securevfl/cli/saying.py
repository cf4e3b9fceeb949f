"""Lines for people: wrapped at words on a terminal, whole where another program reads them."""

from rich.console import Console
from rich.text import Text


def say(console: Console, head: str, text: str, *, style: str = "") -> None:
    """Print a line that begins with a word in bold."""
    line = Text.assemble((head, f"bold {style}".strip()), text)
    console.print(line, soft_wrap=not console.is_terminal)
