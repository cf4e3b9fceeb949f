"""The files of a run folder: figures, history, federation file, what was measured later."""

import contextlib
import csv
import io
import math
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from securevfl.config.disclosure import channels
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import read_federation
from securevfl.config.sections import PartySettings
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.core.formatting import finite_or_none, toml_text
from securevfl.core.stages import stages
from securevfl.dp.statement import of_labels
from securevfl.federation.rounds.primary import BY_ITSELF, VALIDATION
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.party_files import PartyFiles
from securevfl.ledger.book import label_figures, labels_spent
from securevfl.ledger.ledger import Ledger
from securevfl.models.tasks import Metrics

UNTESTED: Final = (
    "after what was lost the budget does not cover the test rows; the model is kept, and was not "
    "measured on them"
)
"""Why a run has no figures of test rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivacyFigures:
    """What was promised, what was spent, and what no promise covers."""

    mechanism: str
    epsilon: float | None
    """Spent by this run, in all its sessions; None: no bound."""
    epsilon_planned: float | None
    """Epsilon of everything that was planned; None: no bound."""
    epsilon_as_published: float | None
    """Epsilon that the papers' formula would claim; None: no bound."""
    delta: float
    unit: str
    encoder: str
    links_per_record: int | None
    sampling_rate: float
    colluding: int
    accounting: str
    noise_multiplier: float | None
    """Noise on a sum over the sum's sensitivity; None where scores or votes are released."""
    noise_share_std: float
    """Deviation of a secondary's noise; of symbols, the odds of another cell; of Laplace sums, the
    scale over the largest number of a record."""
    cells: int | None
    """Number of cells of a released symbol; None where vectors are released behind noise."""
    fitting_noise_multiplier: float | None
    sensitivity: float | None
    clip_norm: float
    releases: int
    row_releases: int
    secondaries: int
    gradient_noise_multiplier: float | None = None
    """Noise on summed gradients over their sensitivity; this and the next three are None unless
    encoders are dp-trained."""
    gradient_noise_std: float | None = None
    gradient_clip_norm: float | None = None
    updates: int | None = None
    total_epsilon: float | None
    """Spent by all runs on the primary's table, for the same unit and at the same delta; a
    simulation has a ledger of its own. None: no bound."""
    table_runs: int
    """So many runs are in it."""
    statement: str
    """Guarantee that people sign, in words; the next four fields are its parts."""
    against: str | None
    """Who can do no better than the bound; None: no bound."""
    hides: str | None
    """Fact that the attackers of ``against`` try to find out; None: no bound."""
    odds_factor: float | None
    """e^epsilon of the statement; None: no bound, or more than a float holds."""
    warning: str | None
    """Why no decision should rest on the bound; None where one may."""
    as_published_note: str
    channels: Sequence[Mapping[str, str]]
    """Every way in which a party learns something, and what covers it."""
    labels: Mapping[str, Any] | None = None
    """Where secondaries receive the primary's labels: what :func:`labels_figures` returns."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures by name, without those of what the run does not have."""
        return _known_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """What a run came to."""

    federation: str
    task: str
    family: str
    metric: str
    """Name of the metric that training goes by: what ``train``, ``validation``, ``test`` and
    ``alone_test`` are figures of."""
    higher_is_better: bool
    train: float
    validation: float
    test: float | None
    """None where the run is ``untested``, like the next three."""
    alone_test: float | None
    """Test figure of the local baseline, the primary's best model without partners; None where it
    was not asked for, like the next two."""
    alone: Mapping[str, Any] | None
    """The primary alone: which model was ``chosen`` on validation rows; the ``candidates``, each
    with ``validation``, ``test`` and the ``interval`` of ``test``; and all test ``metrics`` of the
    chosen one."""
    gain: Mapping[str, Any] | None
    """The joint model's test figure minus alone's, in the direction in which positive is better:
    ``value``, ``interval`` (paired over test rows), ``metric``, ``outcome`` (``"better"``,
    ``"unclear"`` or ``"worse"``), ``used`` (whose predictions the run's are, ``"joint"`` or
    ``"alone"``), ``partners`` and ``partners_interval`` (what of it is the partners': the joint
    model's figure minus that of the best ``placebo``) and the ``verdict`` in words."""
    placebos: Mapping[str, Metrics]
    """All test metrics of the same training without what partners know: ``own``, the primary's own
    network without partners; ``permuted``, partners' rows permuted, of simulations alone."""
    without_noise: Metrics | None
    """All test metrics of the joint model of the same run without noise, of simulations alone; None
    where there is no noise, or it is in every round."""
    validation_metrics: Metrics
    """Every metric of the task, at the best epoch; like the next. A metric is None where the
    rows' labels do not define it."""
    test_metrics: Metrics
    """Empty where the run is ``untested``, like the next."""
    evaluation: Mapping[str, Any]
    """More of the test rows: intervals, threshold, confusion, calibration; see
    :class:`securevfl.models.tasks.Evaluation`."""
    epochs: int
    best_epoch: int
    seconds: float
    parties: int
    bytes: Mapping[str, Mapping[str, int]]
    """``sent`` and ``received`` by party; empty for a simulation."""
    mode: str
    engine: str
    """Engine that averages rows between processes."""
    privacy: PrivacyFigures
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Figures of each stage that has some; ``metrics.json`` has them under the stage's name."""
    alignment: Mapping[str, Any] | None = None
    """How many rows are linked, at each secondary and at all; None where they are not counted."""
    links: Mapping[str, Mapping[str, Any]] | None = None
    """In a simulation, by secondary: how many rows and records are linked, and how near, with the
    fields of :class:`securevfl.core.progress.LinksCounted`. Between processes each secondary alone
    knows its own; its log has them."""
    linked_rows: Mapping[str, Mapping[str, Any]] | None = None
    """By secondary: how many rows are linked there, as it has said, with the fields of
    :class:`securevfl.core.progress.LinkedRowsCounted`; None where nothing was said."""
    announced_keys: Mapping[str, int] | None = None
    """How many keys each secondary announced in private set intersection, between processes."""
    run: str
    """The run's id, by which ledgers know it."""
    ledger: str
    """The primary's ledger as it was at the end, relative to the run folder."""
    version: str
    base: Mapping[str, Any] | None = None
    """Where there is a base: its ``estimator``, which model of the primary ``alone`` is the best,
    whether ``joint`` or ``alone`` is ``used``, ``lambda``, and by which ``gain`` in loss and
    ``error`` of so many ``rows`` that was decided. What is said of test and validation rows is that
    of the model used."""
    untested: str | None = None
    """Why test rows were not asked for, where that is so."""
    joint_test_metrics: Metrics | None = None
    """Test metrics of the joint model, whichever is used; where there is a base."""
    ended: str | None = None
    """When, in UTC."""
    rows: Mapping[str, int] | None = None
    """Row counts of the primary's table: ``train``, ``validation`` and ``test``."""
    peak_memory_bytes: Mapping[str, int] | None = None
    """By party, as the launcher has seen; None for parties that were not launched."""

    def as_json(self) -> dict[str, Any]:
        """Return what ``metrics.json`` holds."""
        figures = _known_fields(self)
        figures["privacy"] = self.privacy.as_json()
        of_stages = figures.pop("stages")
        return {**figures, **of_stages}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RunFigures":
        """Return the figures that another process has sent.

        Raises:
            TypeError: If they are not those of a run.
        """
        of_stages = {name: content[name] for name in stages() if name in content}
        others = {name: value for name, value in content.items() if name not in of_stages}
        privacy = PrivacyFigures(**content["privacy"])
        return cls(**{**others, "privacy": privacy, "stages": of_stages})


def privacy_figures(plan: RunPlan, ledger: Ledger) -> PrivacyFigures:
    """Return what a run promised and spent.

    Args:
        plan: What was planned; the promise was made for all of it.
        ledger: What was spent: by this run, and by others on the same table.
    """
    config, releases, tau = plan.config, plan.releases, plan.noise_share_std
    privacy = config.privacy
    trained_behind_noise = config.regime.noises_updates
    # Rounds that a resumed run repeats are paid for again. It is infinite without noise alone, of
    # which nothing is promised.
    spent = finite_or_none(ledger.epsilon_spent)
    total = ledger.total if ledger.runs > 1 else None
    statement = releases.statement(tau, spent=spent or 0.0, total_epsilon=total)
    return PrivacyFigures(
        mechanism=privacy.mechanism,
        epsilon=spent,
        total_epsilon=finite_or_none(ledger.total),
        table_runs=ledger.runs,
        epsilon_planned=finite_or_none(releases.epsilon(tau)),
        epsilon_as_published=finite_or_none(releases.epsilon_as_published(tau)),
        delta=privacy.delta,
        unit=privacy.unit,
        encoder=privacy.encoder,
        links_per_record=privacy.links_per_record,
        sampling_rate=privacy.sampling_rate,
        colluding=privacy.colluding,
        accounting=privacy.accounting,
        noise_multiplier=None
        if releases.scores
        else tau * math.sqrt(releases.parties - privacy.colluding) / releases.sensitivity(),
        noise_share_std=tau,
        cells=releases.symbols.cells if releases.symbols else None,
        fitting_noise_multiplier=releases.fitting_multiplier(),
        sensitivity=None if releases.scores else releases.sensitivity(),
        clip_norm=privacy.clip_norm,
        releases=ledger.rounds,
        row_releases=ledger.row_releases,
        secondaries=releases.parties,
        gradient_noise_multiplier=privacy.update_noise_ratio * releases.release_multiplier(tau)
        if trained_behind_noise
        else None,
        gradient_noise_std=releases.gradient_noise_std(tau) if trained_behind_noise else None,
        gradient_clip_norm=privacy.update_clip_norm if trained_behind_noise else None,
        updates=ledger.updates if trained_behind_noise else None,
        statement=statement.text,
        against=statement.against,
        hides=statement.hides,
        odds_factor=statement.odds_factor,
        warning=statement.warning,
        as_published_note=_AS_PUBLISHED_NOTE,
        channels=channels(config),
        labels=labels_figures(ledger),
    )


def labels_figures(ledger: Ledger) -> dict[str, Any] | None:
    """Return what a run promised of the primary's labels; None where it released none.

    Args:
        ledger: The primary's, with what this run and others on the same table released.

    Returns:
        ``mechanism``; ``epsilon`` against one secondary and ``together`` against all of them, at
        ``delta`` (0 where labels were randomised; None: no bound); ``total_epsilon`` and
        ``total_together`` of all ``runs`` on the table; and the ``statement`` with its
        ``odds_factor`` and ``warning``.
    """
    last = next(
        (session.labels[-1] for session in reversed(ledger.budget_sessions) if session.labels), None
    )
    run, table = labels_spent(ledger.budget_sessions), labels_spent(ledger.sessions)
    if last is None or run is None or table is None:
        return None
    statement = of_labels(
        last.mechanism, run, parties=last.parties, table=table if table.runs > 1 else None
    )
    return {
        "mechanism": last.mechanism,
        **label_figures(ledger.budget_sessions, ledger.sessions),
        "statement": statement.text,
        "odds_factor": statement.odds_factor,
        "warning": statement.warning,
    }


def _known_fields(figures: PrivacyFigures | RunFigures) -> dict[str, Any]:
    """Return fields by name; those that not every run has only where they are known."""
    values = asdict(figures)
    optional = {field.name for field in fields(figures) if field.default is None}
    return {
        name: value for name, value in values.items() if name not in optional or value is not None
    }


_AS_PUBLISHED_NOTE = (
    "The papers count one step of sampled DP-SGD a round, with the noise of the average over the "
    "clip norm as its multiplier. That misses that a row moves by up to twice the clip norm, that "
    "one record is linked to several rows and that trained encoders remember records; on the other "
    "side, that frozen encoders release each row once and that pooled records move a row by less. "
    "So its figure may lie on either side of the sound one."
)


_WRITTEN: Final = (
    *("federation.toml", "metrics.json", "history.csv", "predictions.csv", "report.html"),
    *("links.json", "identities.json", "similarities.svg"),
)
"""Names of a run's files."""

_OF_STUDIES: Final = ("links.json", "comparison.json")

_FINISHED: Final = (
    "metrics.json",
    "comparison.json",
    "parties/*/result.json",
)
"""Files that only a finished run, program or study has."""

_COUNTS = ("epoch", "bytes")
HISTORY_FIELDS = ("epoch", "loss", "train", "validation", "seconds", "epsilon", "bytes")

OWN_FACTS: Final = "party.json"
"""File of a secondary's facts about its own part in a run, in its own folder, for its own page."""


def own_folders(folder: Path) -> list[Path]:
    """Return the folders of secondaries that can have a page of their own.

    Args:
        folder: A party's own, or a run's.
    """
    if (folder / OWN_FACTS).exists():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"parties/*/{OWN_FACTS}"))


def write_history(run_folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Write ``history.csv``: a row an epoch, with each of the validation rows' metrics.

    ``by_itself`` is the joint model's without its base.
    """
    of_validation = (VALIDATION, BY_ITSELF)
    metrics = dict.fromkeys(
        name for row in history for name in row if name.startswith(of_validation)
    )
    names = (*HISTORY_FIELDS, *metrics)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: row.get(name, "") for name in names} for row in history)
    files.write_text(run_folder / "history.csv", buffer.getvalue(), for_others=True)


def read_history(run_folder: Path) -> list[dict[str, Any]]:
    """Read ``history.csv``: one mapping an epoch, without what was not known.

    Raises:
        ConfigError: If the folder has none.
    """
    path = run_folder / "history.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [
                {name: _number(name, text) for name, text in row.items() if text}
                for row in csv.DictReader(file)
            ]
    except OSError:
        raise ConfigError(f"run folder {run_folder}: has no {path.name}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: was cut or changed ({error})") from None


def _number(name: str, text: str) -> float | int:
    return int(text) if name in _COUNTS else float(text)


def write_federation(run_folder: Path, config: FederationConfig) -> None:
    """Write ``federation.toml``: the settings that this run was made with."""
    files.write_text(run_folder / "federation.toml", toml_text(config.source), for_others=True)


def run_folder_for(
    config: FederationConfig,
    out: Path | None,
    *,
    reads: Iterable[Path] = (),
    resume: bool = False,
    may_begin: bool = False,
) -> Path:
    """Return the run folder: the one that was asked for, or a new one under ``runs/``.

    Args:
        config: The federation file.
        out: The folder; None: a new one.
        reads: Files that the command reads.
        resume: Whether the run in the folder goes on.
        may_begin: Whether it begins if there is none.

    Raises:
        ConfigError: If a run should be resumed, and there is none; or as
            :func:`require_own_folder`.
    """
    if resume and out is None:
        raise ConfigError("--resume: needs --out RUN, the folder of the run that should go on")
    if resume and out is not None and not (may_begin or (out / "parties").is_dir()):
        raise ConfigError(f"run folder {out}: holds no run to go on with; run without --resume")
    if out is not None:
        require_own_folder(config, out, reads=reads, resume=resume)
        return out
    return Path("runs") / f"{config.federation.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def require_own_folder(
    config: FederationConfig, folder: Path, *, reads: Iterable[Path] = (), resume: bool = False
) -> None:
    """Refuse a folder with files of another run, or with files that the run reads.

    A party that has begun a run refuses another one itself; of one that failed before it released
    anything, the folder may be used again.

    Args:
        config: The federation file of the run.
        folder: Its folder, which need not exist.
        reads: Files that it reads.
        resume: Whether what is there goes on.

    Raises:
        ConfigError: Naming what is there.
    """
    for name in () if resume else _WRITTEN:
        if (folder / name).exists():
            files.output_path(folder / name, reads)
    own = {party.name for party in config.parties}
    there = [path.name for path in folder.glob("parties/*") if path.name not in own]
    there += [] if resume else [name for name in _FINISHED if any(folder.glob(name))]
    if not there and _federation_in(folder) in (None, config.federation.name):
        return
    what = f"parties/{there[0]}" if there and there[0] not in _FINISHED else (*there, "files")[0]
    raise ConfigError(
        f"run folder {folder}: holds a run already ({what}), and a folder is one run's; choose "
        f"another --out, or go on with --resume"
    )


def _federation_in(folder: Path) -> str | None:
    """Return the name of the federation whose files are in a folder; None if nothing says it."""
    try:
        return str(files.read_toml(folder / "federation.toml")["federation"]["name"])
    except (FileNotFoundError, NotADirectoryError):
        figures = next(filter(Path.exists, (folder / name for name in _OF_STUDIES)), None)
        return None if figures is None else str(files.read_json(figures).get("federation"))
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def federation_of_run(run_folder: Path, federation: Path | None) -> FederationConfig:
    """Read the federation file of a run, or the one that replaces it.

    Args:
        run_folder: Of a run, with its ``federation.toml``.
        federation: Another file, for settings that have changed since; None: the run's own.

    Raises:
        ConfigError: If the folder has no such file, or a setting is wrong.
    """
    path = run_folder / "federation.toml" if federation is None else federation
    if not path.exists():
        raise ConfigError(
            f"run folder {run_folder}: has no federation.toml; is it the folder of a finished run?"
        )
    return read_federation(path)


def write_figures(run_folder: Path, figures: RunFigures) -> None:
    """Write ``metrics.json``: the last of a run's files, since it says that the run is finished."""
    files.write_json(run_folder / "metrics.json", figures.as_json(), for_others=True)


def read_figures(run_folder: Path) -> dict[str, Any]:
    """Read ``metrics.json``.

    Raises:
        ConfigError: If it is not that of a finished run, or lacks figures.
    """
    path = run_folder / "metrics.json"
    if not path.exists():
        raise ConfigError(f"run folder {run_folder}: has no {path.name}; is it a finished run?")
    figures = files.read_json(path)
    needed = {"metric", "test_metrics", "evaluation", "privacy", "alone", "ended", "rows"}
    missing = sorted(needed - set(figures))
    if missing:
        raise ConfigError(
            f"{path}: has no {missing[0]!r}; it is of another version, or no run's figures"
        )
    return figures


CONTRIBUTION: Final = "contribution.json"

AUDIT: Final = "audit.json"
"""File of what attacks on a recorded run found, for the run folder's owner alone."""

MEASURED_FORMAT: Final = 1
"""Format version of the files that this program writes, and the only one that it reads."""


def read_measured(run_folder: Path, name: str, *, run: str) -> dict[str, Any] | None:
    """Read one of these files; None if it is missing, or of another run or version.

    Args:
        run_folder: Where it lies.
        name: Of the file.
        run: The run's id.
    """
    path = run_folder / name
    if not path.exists():
        return None
    content = files.read_json(path)
    if content.get("format") != MEASURED_FORMAT or content.get("run") != run:
        return None
    return content


@contextmanager
def simulated_files(
    config: FederationConfig,
    parties: Iterable[PartySettings],
    run_folder: Path,
    *,
    resume: bool,
) -> Iterator[dict[str, PartyFiles]]:
    """Hold the files of parties that share this process, by name.

    Args:
        config: The federation file.
        parties: Those with tables, the primary first.
        run_folder: Where they lie.
        resume: Whether the run continues with what lies there.
    """
    with ExitStack() as held:
        yield {
            party.name: held.enter_context(
                PartyFiles(
                    run_folder / "parties" / party.name,
                    config,
                    party=party.name,
                    resume=resume,
                    simulated=True,
                )
            )
            for party in parties
        }


class TemporaryFolder:
    """A temporary run folder, removed when no object refers to it, or Python ends.

    ``tempfile.TemporaryDirectory`` warns when it is left to that, and a result in memory always is.
    What a killed program has left is removed when the next folder is made: no process holds its
    lock, which parties that are still at work do too.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_NEW))
        held = None
        if files.LOCKS_ITSELF:
            _remove_left()
            held = os.open(self.path / _HELD, os.O_CREAT | os.O_RDWR, 0o600)
            files.lock(held, self.path / _HELD, shared=False)
            # It has this name from when it is locked.
            self.path = self.path.rename(
                self.path.with_name(f"{_LEFT}{self.path.name.removeprefix(_NEW)}")
            )
        self._removal = weakref.finalize(self, _remove, self.path, os.getpid(), held)

    def remove(self) -> None:
        """Remove it now."""
        self._removal()

    def __getstate__(self) -> dict[str, bytes]:
        """Return what is in it: another process has other folders, and this one may go before."""
        return {
            str(path.relative_to(self.path)): path.read_bytes()
            for path in sorted(self.path.rglob("*"))
            if path.is_file() and path.name != _HELD
        }

    def __setstate__(self, contents: Mapping[str, bytes]) -> None:
        self.__init__()  # type: ignore[misc]
        for name, content in contents.items():
            files.write_bytes(self.path / name, content)


_HELD: Final = ".held"
_NEW: Final = "securevfl-new-"
_LEFT: Final = "securevfl-run-"


def _remove_left() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_LEFT}*"):
        # One that cannot be opened or locked is in use, or another user's.
        with contextlib.suppress(OSError), (folder / _HELD).open("rb") as held:
            files.lock(held.fileno(), folder / _HELD, shared=False)
            if not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)


def _remove(path: Path, owner: int, held: int | None) -> None:
    if os.getpid() == owner:  # and not a process that was forked from it
        shutil.rmtree(path, ignore_errors=True)
        if held is not None:
            os.close(held)
