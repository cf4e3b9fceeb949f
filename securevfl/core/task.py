"""What a label may be."""

from typing import Literal

Task = Literal["regression", "binary", "multiclass"]
"""A number, one of two classes, or one of several."""
