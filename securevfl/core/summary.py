"""A few lines in place of a result's whole content, at a prompt and in a notebook."""

import html
from collections.abc import Mapping


class Summarised:
    """A result whose ``repr`` is a heading and a few figures; subclasses say which."""

    __slots__ = ()

    def summary(self) -> tuple[str, Mapping[str, str]]:
        """Return a heading, and figures by name."""
        raise NotImplementedError

    def __repr__(self) -> str:
        heading, figures = self.summary()
        lines = [f"{type(self).__name__}({heading})"]
        return "\n".join([*lines, *(f"  {name}: {text}" for name, text in figures.items())])

    def _repr_html_(self) -> str:
        """Return a small table, as notebooks show it."""
        heading, figures = self.summary()
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
            for name, text in figures.items()
        )
        caption = html.escape(f"{type(self).__name__}: {heading}")
        return f"<table><caption>{caption}</caption>{rows}</table>"
