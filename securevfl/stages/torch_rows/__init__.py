"""Tensors and datasets of torch as tables."""

from securevfl.core.stages import Stage

STAGE = Stage(rows={"torch": "torch_rows:frame_of_rows"})
