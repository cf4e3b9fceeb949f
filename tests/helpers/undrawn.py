"""Pictures of reports are drawn only in tests that look at them, as drawing is slow."""

import sys
from collections.abc import Callable
from io import StringIO
from typing import Any
from unittest.mock import patch

_EMPTY = '<?xml version="1.0"?>\n<svg></svg>'
_drawing: Any = None


def draw(*, drawn: bool) -> None:
    """Let matplotlib's figures be drawn in this process from now on, or be saved as empty ones.

    Figures are made all the same, with their axes, lines and texts.
    """
    global _drawing
    if drawn:
        if _drawing is not None:
            _drawing.stop()
            _drawing = None
    elif _drawing is None and "matplotlib.figure" in sys.modules:
        figure = sys.modules["matplotlib.figure"].Figure
        _drawing = patch.object(figure, "savefig", _saved_empty(figure.savefig))
        _drawing.start()


def _saved_empty(save: Callable[..., None]) -> Callable[..., None]:
    """Return what saves a report's picture empty, and others as before."""

    def save_empty(figure: Any, file: Any, **options: Any) -> None:
        if isinstance(file, StringIO):
            file.write(_EMPTY)
        else:
            save(figure, file, **options)

    return save_empty
