"""Top model trained again on the released numbers of a coalition of partners."""

import hashlib
import json
from pathlib import Path
from typing import Final

import numpy as np
import safetensors
import safetensors.torch
import torch

from securevfl.config.sections import OWN
from securevfl.core import files
from securevfl.core.progress import unheard
from securevfl.federation.base import Base, fit_base
from securevfl.federation.build import build_primary
from securevfl.federation.messages import EpochMark
from securevfl.federation.saved_model import SavedModel
from securevfl.models.alone.margins import MarginModel
from securevfl.models.fitted_top import FittedTop
from securevfl.runtime.coalitions import BlockReleases
from securevfl.runtime.paired_estimates import Coalition, CoalitionAnswer
from securevfl.version import __version__

CACHE: Final = "contribution"
"""Subfolder of the primary's folder with the outputs of retrained models, from which an interrupted
measurement continues."""


class Retrained:
    """Answers of top models that are trained again on the released rows of a coalition.

    Seed, rows, settings, base and the choice of the answering model are those of the run. With all
    partners the answer is the run's own.
    """

    def __init__(self, source: BlockReleases, folder: Path) -> None:
        """Fit the base again, if there is one.

        Args:
            source: The run.
            folder: The primary's folder of the run, which keeps the answers.
        """
        self._source = source
        self._kept = _KeptOutputs(folder / CACHE, source.model)
        self._base = None
        part = source.alone.part
        if part.base is not None:
            # A named one is fitted by its name again.
            named = source.config.base.estimator != OWN
            fitted = part.base if isinstance(part.base, MarginModel) else None
            own = None if named or fitted is None else fitted.estimator
            self._base = fit_base(source.config, source.table, source.data, own)

    def __call__(self, coalition: Coalition) -> CoalitionAnswer:
        """Return the answer with these partners alone, trained now or earlier."""
        if not coalition or coalition == self._source.everybody:
            return self._source.answer(coalition)
        answer = self._kept.read(coalition)
        if answer is None:
            answer = self._train(coalition, self._base)
            self._kept.write(coalition, answer)
        return answer

    def _train(self, coalition: Coalition, base: Base | None) -> CoalitionAnswer:
        source = self._source
        top, own = source.top.top, None
        if isinstance(top, FittedTop) and top.model is not None:
            named = source.config.top is not None and source.config.top.name != OWN
            own = None if named else top.model.estimator
        primary = build_primary(
            source.plan,
            source.table,
            source.data,
            source.exchange(coalition),
            observe=unheard,
            estimator=own,
        )
        if base is not None:
            primary.take_base(base.margins)
        primary.train(after_epoch=_nothing)
        primary.restore_best()
        if base is not None:
            decision = primary.decide(source.alone.margins, base_is_alone=base.alone is not None)
            if decision.used == "alone":
                return source.alone.test
        outputs = primary.predict(source.data.split.test, "test")
        return source.alone.answer(outputs, primary.threshold, "joint")


class _KeptOutputs:
    """Answers of retrained models, a file for each coalition; a damaged file is replaced."""

    def __init__(self, folder: Path, model: SavedModel) -> None:
        self._folder = folder
        self._of = [model.run, model.digest, __version__]

    def read(self, coalition: Coalition) -> CoalitionAnswer | None:
        """Return the kept answer of a coalition, or None."""
        try:
            state = safetensors.torch.load(self._path(coalition).read_bytes())
            return CoalitionAnswer(
                outputs=state["outputs"].numpy(),
                threshold=float(state["threshold"]),
                used="joint" if bool(state["joint"]) else "alone",
            )
        except (OSError, KeyError, ValueError, safetensors.SafetensorError):
            return None

    def write(self, coalition: Coalition, answer: CoalitionAnswer) -> None:
        """Keep an answer in a file that only this user can read.

        Raises:
            StorageError: If the disk takes no more.
        """
        state = {
            "outputs": torch.from_numpy(np.ascontiguousarray(answer.outputs)),
            "threshold": torch.tensor(answer.threshold, dtype=torch.float64),
            "joint": torch.tensor(answer.used == "joint"),
        }
        files.write_bytes(self._path(coalition), safetensors.torch.save(state))

    def _path(self, coalition: Coalition) -> Path:
        text = json.dumps([*self._of, sorted(coalition)])
        digest = hashlib.sha256(text.encode()).hexdigest()
        return self._folder / f"{digest[:32]}.safetensors"


def _nothing(_mark: EpochMark) -> None:
    """Keep no checkpoint: a coalition is always trained from the beginning."""
