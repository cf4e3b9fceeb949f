"""What a secondary keeps at the end of an epoch."""

from securevfl.federation.checkpoint import Checkpoints
from securevfl.federation.rounds import EpochMark
from securevfl.federation.secondary import Secondary


class EpochKeeper:
    """Saves a secondary's epochs, and brings the best one back."""

    def __init__(self, secondary: Secondary, checkpoints: Checkpoints) -> None:
        self._secondary = secondary
        self._checkpoints = checkpoints

    def __call__(self, mark: EpochMark) -> None:
        """Save the epoch, keep it as the best one, or go back to the best, as the mark says."""
        if mark.restore_best:
            self._secondary.bottom.load_state_dict(self._checkpoints.load_best(mark.epoch))
            return
        self._checkpoints.save(mark.epoch, self._secondary.state())
        if mark.best:
            self._checkpoints.save_best(mark.epoch, self._secondary.weights())
