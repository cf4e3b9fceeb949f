"""Tensors and datasets of torch as tables."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(rows={"torch": "torch_rows:frame_of_rows"})
