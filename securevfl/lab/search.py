"""Search for settings by Optuna: by validation rows alone, never by test rows."""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from securevfl.core.errors import ConfigError, PrivacyError, SecureVflError, require_extra
from securevfl.lab.one_run import LeftOut, Run
from securevfl.lab.run_figures import mean
from securevfl.lab.study import Study, StudyOptions
from securevfl.lab.sweep import Plan, Point, Sweep, complete, reasons
from securevfl.lab.sweep_settings import Range, Setting, text_of

_DIGITS: Final = 4
_LOG: Final = "search.log"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One point that was tried."""

    number: int
    """From 0 on."""

    point: Point
    """Its settings."""

    validation: float | None
    """Mean over seeds of the metric on validation rows; None if it failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """What a search has found."""

    trials: tuple[Trial, ...]
    """In their order."""

    best: Trial
    """Whose validation metric is best."""

    results: list[dict[str, Any]]
    """Results of every run: of the primary alone, and of each point that has all of its runs."""

    left_out: Mapping[str, LeftOut]
    """Settings or methods without figures, by name."""


def search(
    sweep: Sweep,
    options: StudyOptions,
    *,
    trials: int,
) -> SearchResult:
    """Try settings that Optuna suggests, until there are so many trials.

    The ends of every range, and every value, are checked before anything is trained. Trials are
    kept in the folder's ``search.log``: what is there is not tried again, and one that was cut off
    goes on. What is suggested follows from the file's seed and from how many trials there are at a
    time. A trial whose settings do not go together, or that fails, counts, and the others go on.

    Args:
        sweep: What is tried; each setting has one range, or values.
        options: How runs are trained and reported.
        trials: How many in all, those of earlier calls among them.

    Raises:
        ConfigError: If Optuna is missing, a setting is impossible, or the folder's trials are of
            other settings or ranges.
        DataError: If a table is not what it should be.
        SecureVflError: If no trial has a figure.

    Reveals:
        Everything is inside one organisation: a search protects nobody's table.
    """
    require_extra("optuna", use="search")
    if trials < 1:
        raise ConfigError(f"search: must be at least 1, got {trials}")
    if not sweep.settings:
        raise ConfigError("search: name a setting to search, such as model.hidden=16..256")
    for setting in sweep.settings:
        setting.require_searchable()
    plan = Plan(sweep, options)
    first = {setting.name: setting.ends()[0] for setting in sweep.settings}
    for setting in sweep.settings:
        for value in setting.ends():
            plan.tasks(Point(settings={**first, setting.name: value}))
    with plan.study() as study:
        trying = _Search(sweep, plan, study, options.leave_out)
        tried = trying.until(trials)
        alone = plan.alone()
        results = complete(alone, study.train(alone), without=study.failed)
        out = {**trying.misfits, **study.failed}
    known = [trial for trial in tried if trial.validation is not None]
    if not known:
        raise SecureVflError(f"no trial has a figure: {reasons(out.values())}")
    sign = 1 if sweep.metrics[0].higher_is_better else -1
    best = max(known, key=lambda trial: sign * (trial.validation or 0.0))
    return SearchResult(
        trials=tuple(tried), best=best, results=results + trying.results, left_out=out
    )


class _Search:
    """Trials in batches of the engine's width; results are reported at the end of each batch."""

    def __init__(
        self, sweep: Sweep, plan: Plan, study: Study, leave_out: Callable[[LeftOut], None]
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna = optuna
        self._sweep, self._plan, self._study, self._leave_out = sweep, plan, study, leave_out
        self._metric = sweep.metrics[0]
        self._trials = self._open_trials()
        self._ranges = {setting.name: _distribution(setting) for setting in sweep.settings}
        self._values = {
            setting.name: {text_of(value): value for value in setting.values()}
            for setting in sweep.settings
            if setting.range is None
        }
        self.results: list[dict[str, Any]] = []
        """Of the trials that have all of their runs."""
        self.misfits: dict[str, LeftOut] = {}
        """Points whose settings do not go together."""

    def until(self, number: int) -> list[Trial]:
        """Go on until there are so many trials, and return all."""
        state = self._optuna.trial.TrialState
        tried: dict[int, Trial] = {}
        kept = self._trials.get_trials(deepcopy=False)
        self._try(
            {
                trial.number: self._point(trial.params)
                for trial in kept
                if trial.state != state.FAIL
            },
            tried,
        )
        for trial in kept:
            if trial.state == state.FAIL:
                point = self._point(trial.params)
                tried[trial.number] = Trial(number=trial.number, point=point, validation=None)
        while len(tried) < number:
            batch = {}
            for _ in range(min(self._study.width, number - len(tried))):
                asked = self._ask()
                batch[asked.number] = self._point(asked.params)
            self._try(batch, tried)
        return [tried[trial_number] for trial_number in sorted(tried)]

    def _try(self, batch: Mapping[int, Point], tried: dict[int, Trial]) -> None:
        """Train a batch of points, and tell Optuna what validation rows say."""
        tasks, state = [], self._optuna.trial.TrialState
        runs: dict[int, list[Run]] = {}
        for number, point in batch.items():
            try:
                own = self._plan.tasks(point)
            except (ConfigError, PrivacyError) as error:
                misfit = LeftOut(name=point.name, status="skipped", reason=str(error))
                self.misfits[point.name] = misfit
                self._leave_out(misfit)
                continue
            runs[number] = [task.run for task in own]
            tasks += own
        # Two trials of a batch may be the same point.
        results = self._study.train({task.run: task for task in tasks}.values())
        for number, point in batch.items():
            own_results = [results[run] for run in runs.get(number, ()) if run in results]
            value = None
            if own_results and len(own_results) == len(self._sweep.seeds):
                value = mean(
                    [result["validation_metrics"][self._metric.name] for result in own_results]
                )
                known = {(result["name"], result["seed"]) for result in self.results}
                self.results += [
                    result
                    for result in own_results
                    if (result["name"], result["seed"]) not in known
                ]
            tried[number] = Trial(number=number, point=point, validation=value)
            if self._trials.trials[number].state.is_finished():
                continue
            if value is None:
                self._trials.tell(number, state=state.FAIL)
            else:
                self._trials.tell(number, value)

    def _ask(self) -> Any:
        # A sampler for each trial: then a search that was cut off goes on as it would have.
        seed = self._sweep.config.federation.seed
        number = len(self._trials.get_trials(deepcopy=False))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            self._trials.sampler = self._optuna.samplers.TPESampler(
                seed=(seed * 1_000_003 + number) % 2**32, constant_liar=True
            )
        return self._trials.ask(self._ranges)

    def _point(self, params: Mapping[str, Any]) -> Point:
        settings = {}
        for setting in self._sweep.settings:
            value, range_ = params[setting.name], setting.range
            if range_ is None:
                value = self._values[setting.name][value]
            elif not range_.whole:
                # Digits that people can read; the ends of the range stay its ends.
                value = min(max(float(f"{value:.{_DIGITS}g}"), range_.low), range_.high)
            settings[setting.name] = value
        return Point(settings=settings)

    def _open_trials(self) -> Any:
        """Return the folder's trials, made if there are none.

        Raises:
            ConfigError: If they are of other settings.
        """
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        storage = JournalStorage(JournalFileBackend(str(self._sweep.folder / _LOG)))
        higher = self._metric.higher_is_better
        trials = self._optuna.create_study(
            storage=storage,
            study_name="search",
            direction="maximize" if higher else "minimize",
            load_if_exists=True,
        )
        made_from = self._digest()
        if trials.user_attrs.setdefault("made_from", made_from) != made_from:
            raise ConfigError(
                f"{self._sweep.folder / _LOG}: its trials are of other settings, ranges, seeds or "
                f"another metric; choose another --out"
            )
        trials.set_user_attr("made_from", made_from)
        return trials

    def _digest(self) -> str:
        sweep = self._sweep
        made_from = [
            sweep.source,
            [repr(setting) for setting in sweep.settings],
            sweep.seeds,
            self._metric.name,
        ]
        text = json.dumps(made_from, sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()


def _distribution(setting: Setting) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    range_: Range | None = setting.range
    if range_ is None:
        return CategoricalDistribution([text_of(value) for value in setting.values()])
    if range_.whole:
        return IntDistribution(int(range_.low), int(range_.high), log=range_.log)
    return FloatDistribution(range_.low, range_.high, log=range_.log)
