"""Callbacks that follow a run: TensorBoard, MLflow and own ones.

A callback receives every event of a run (:mod:`securevfl.progress`) and how the run ended. One that
fails is named in one warning and gets no further events, so that it never ends a run.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from securevfl.core import progress
from securevfl.core.errors import ConfigError, in_one_line, of_an_extra

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["Callback", "MLflow", "TensorBoard"]

# What an event counts by, which is the horizontal axis and no curve.
_COUNTS: Final = ("epoch", "epochs", "iteration", "iterations", "done", "of")

# Of what a run came to: the words that tell it from others, and the numbers of its promise.
_WORDS: Final = ("federation", "family", "task", "metric", "mode", "run", "version")
_OF_THE_PROMISE: Final = ("epsilon", "epsilon_planned", "delta", "total_epsilon")


class Callback:
    """Receives the events of runs; override the methods you need.

    An exception of a callback becomes one warning, and it gets no further events of that run. To
    end a run from outside, raise in ``observe``.
    """

    def on_event(self, event: progress.ProgressEvent) -> None:
        """Receive a progress event.

        Args:
            event: One of :mod:`securevfl.progress`: figures and words, never a row or a record.
        """

    def on_end(self, figures: Mapping[str, Any] | None) -> None:
        """Receive the end of the run.

        Args:
            figures: What ``metrics.json`` holds; None if the run failed, or this callback did.
        """


class TensorBoard(Callback):
    """Writes curves for TensorBoard: ``tensorboard --logdir FOLDER``.

    Curves are named by event and figure, such as ``epoch/validation``, ``round/loss`` and
    ``epoch/epsilon``; the run's last figures are ``end/test`` and so on; warnings are text.

    Args:
        log_dir: Folder of the run, made when the first event comes; other users may read it as far
            as the umask lets them.
    """

    def __init__(self, log_dir: str | Path) -> None:
        self._folder = str(log_dir)
        self._writer: SummaryWriter | None = None
        self._steps = _Steps()

    def on_event(self, event: progress.ProgressEvent) -> None:
        """Write the event's figures, if it has any."""
        step, figures = self._steps.of(event)
        for name, value in figures.items():
            self._open_writer().add_scalar(name, value, step)
        if isinstance(event, progress.Warned):
            self._open_writer().add_text("warning", event.text, step)

    def on_end(self, figures: Mapping[str, Any] | None) -> None:
        """Write the run's last figures, and close the file."""
        numbers, _ = _last(figures or {})
        for name, value in numbers.items():
            self._open_writer().add_scalar(name, value, 0)
        if self._writer is not None:
            self._writer.close()
        self._writer, self._steps = None, _Steps()

    def _open_writer(self) -> "SummaryWriter":
        if self._writer is None:
            # Slow to import, and for those alone who ask for it.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder)
        return self._writer


class MLflow(Callback):
    """Logs a run to MLflow: curves as TensorBoard's, words as parameters, last figures as metrics.

    Needs ``pip install 'securevfl[mlflow]'``. The active run of the ``mlflow`` module is left
    alone: every federation's run is a new one.

    Args:
        experiment: Name of the experiment, made if there is none.
        run_name: Name of the run; default: one that MLflow makes up.
        tracking_uri: Server, or a database such as ``sqlite:///runs.db``, for which MLflow needs
            ``sqlalchemy`` and ``alembic``; default: what MLflow is set to.

    Raises:
        ConfigError: If MLflow is not installed, or takes no such ``tracking_uri``.

    Reveals:
        To the tracking server: losses, metrics, the budget and names of the run's family and
        metric. They depend on the primary's labels, and no epsilon covers them.
    """

    def __init__(
        self,
        experiment: str = "securevfl",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        mlflow = of_an_extra("mlflow", use="callbacks.MLflow:")
        try:
            self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        except Exception as error:
            raise ConfigError(f"callbacks.MLflow: {in_one_line(error)}") from error
        self._experiment = experiment
        self._run_name = run_name
        self._run: str | None = None
        self._steps = _Steps()

    def on_event(self, event: progress.ProgressEvent) -> None:
        """Log the event's figures, if it has any."""
        step, figures = self._steps.of(event)
        for name, value in figures.items():
            self._client.log_metric(self._begun(), name, value, step=step)

    def on_end(self, figures: Mapping[str, Any] | None) -> None:
        """Log the run's last figures, and end it."""
        run = self._begun()
        numbers, words = _last(figures or {})
        for name, value in numbers.items():
            self._client.log_metric(run, name, value)
        for name, word in words.items():
            self._client.log_param(run, name, word)
        self._client.set_terminated(run, "FAILED" if figures is None else "FINISHED")
        self._run, self._steps = None, _Steps()

    def _begun(self) -> str:
        if self._run is None:
            experiment = self._client.get_experiment_by_name(self._experiment)
            made = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(self._experiment)
            )
            run = self._client.create_run(made, run_name=self._run_name)
            self._run = str(run.info.run_id)
        return self._run


class CallbackObserver:
    """The callbacks of one run.

    Args:
        callbacks: Callbacks; one that fails gets no further events.
        observe: Receives the same events, and warnings of failed callbacks; its exceptions end the
            run.
    """

    def __init__(self, callbacks: Iterable[Callback], observe: progress.Observer) -> None:
        self._callbacks = list(callbacks)
        self._observe = observe
        self._figures: Mapping[str, Any] | None = None

    def tell(self, event: progress.ProgressEvent) -> None:
        """Pass an event to all callbacks."""
        for callback in tuple(self._callbacks):
            try:
                callback.on_event(event)
            except Exception as error:  # noqa: BLE001 - a callback of somebody else's may raise anything
                self._leave_out(callback, error)
        self._observe(event)

    def keep_figures(self, figures: Mapping[str, Any]) -> None:
        """Keep the run's figures for the callbacks, which get them when the run is left."""
        self._figures = figures

    @contextlib.contextmanager
    def until_the_end(self) -> Iterator["CallbackObserver"]:
        """Report the end of a run to all callbacks, also after an error."""
        try:
            yield self
        finally:
            for callback in tuple(self._callbacks):
                try:
                    callback.on_end(self._figures)
                except Exception as error:  # noqa: BLE001 - as above
                    self._leave_out(callback, error)

    def _leave_out(self, callback: Callback, error: Exception) -> None:
        self._callbacks.remove(callback)
        with contextlib.suppress(Exception):
            callback.on_end(None)
        text = (
            f"callback {type(callback).__name__} failed and is not called again: "
            f"{in_one_line(error)}; the run continues"
        )
        self._observe(progress.Warned(text=text))


class _Steps:
    """Place of an event on the horizontal axis."""

    def __init__(self) -> None:
        self._rounds = 0

    def of(self, event: progress.ProgressEvent) -> tuple[int, dict[str, float]]:
        """Return the event's step and its figures by name; empty if it is no point of a curve."""
        match event:
            case progress.RoundDone():
                self._rounds += 1
                step = self._rounds
            case progress.EpochDone():
                step = event.epoch
            case progress.PretrainingIteration():
                step = event.iteration
            case progress.RowsReleased():
                step = event.done
            case _:
                return self._rounds, {}
        figures = {
            name: value
            for name, value in progress.event_fields(event).items()
            if name not in _COUNTS
        }
        return step, {f"{event.EVENT}/{name}": float(value) for name, value in figures.items()}


def _last(figures: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Return a run's last scalar figures, and its words, by name."""
    promise, gain = figures.get("privacy", {}), figures.get("gain")
    flat = {
        **{name: value for name, value in figures.items() if isinstance(value, int | float)},
        **{name: promise[name] for name in _OF_THE_PROMISE if promise.get(name) is not None},
        **({} if gain is None else {"gain": gain["value"]}),
    }
    numbers = {f"end/{name}": float(value) for name, value in flat.items()}
    words = {name: str(figures[name]) for name in _WORDS if name in figures}
    return numbers, words
