"""Watch for encoders that give nearly the same answer for every record."""

from securevfl.core.progress import Observer, Warned
from securevfl.pretraining.learner_with_records import IterationFigures


class CollapseWatch:
    """Warns once of each encoder that is collapsed in two iterations running, or at the end."""

    def __init__(self, party: str, observe: Observer) -> None:
        self._party = party
        self._observe = observe
        self._before: frozenset[str] = frozenset()
        self._warned: set[str] = set()

    def __call__(self, figures: IterationFigures, *, last: bool) -> None:
        """Take an iteration's figures."""
        now = frozenset(figures.collapsed)
        sure = now if last else now & self._before
        self._before = now
        for encoder in sorted(sure - self._warned):
            self._warned.add(encoder)
            text = (
                f"{self._party}: the {encoder} encoder has collapsed: it answers nearly the same "
                f"for every record, and fine-tuning gains nothing from it; lower "
                f"pretraining.learning_rate, raise pretraining.batch_size, or use "
                f'algorithm = "moco"'
            )
            self._observe(Warned(text=text))
