"""``securevfl lab audit``: real rounds of the installed code, and tests of their releases."""

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from securevfl.core import files
from securevfl.core.errors import PrivacyError
from securevfl.core.formatting import Summarised
from securevfl.lab.audit.audit_class_means import audit_class_means
from securevfl.lab.audit.audit_one_run import FALSE_ALARM, audit_one_run
from securevfl.lab.audit.audit_statistics import (
    FALSE_FAILURE,
    RELEASES,
    ROUNDS_EVENT,
    Audited,
    AuditSettings,
    AuditTest,
    Release,
)
from securevfl.lab.audit.audit_worlds import AuditStage
from securevfl.launch.process import PartyCommand
from securevfl.launch.spawn import reserved_port, run_party_processes
from securevfl.transport.identity import SHORT_LIVED_DAYS, provision

PARTY_PROGRAM: Final = (sys.executable, "-m", "securevfl.lab.audit.audit_party")
"""Command of each party's process; a folder and the party's name follow."""


@dataclass(frozen=True, kw_only=True, repr=False)
class AuditReport(Summarised):
    """The outcome of an audit."""

    settings: AuditSettings
    """Settings of the audit."""

    tests: Mapping[Audited, Sequence[AuditTest]]
    """Every test's outcome, by the kind of release."""

    rows: int
    """Rows released, over all rounds between processes."""

    refusal: str | None = None
    """Reason for unfinished rounds, if the installed code refused its own output."""

    seconds: float
    """Wall time of the whole audit; starting processes takes most of it."""

    round_seconds: float | None = None
    """Wall time of the rounds alone, between processes."""

    def summary(self) -> tuple[str, dict[str, str]]:
        """Return the number of passed tests, and the refusal if there was one."""
        tests = [outcome for outcomes in self.tests.values() for outcome in outcomes]
        passed = sum(test.verdict == "pass" for test in tests)
        shown = {} if self.refusal is None else {"refused": self.refusal}
        return f"{passed} of {len(tests)} tests passed, {self.rows:,} rows", shown

    @property
    def rounds_finished(self) -> AuditTest:
        """Test that the rounds of every kind were finished without a refusal."""
        done = 0
        if self.refusal is None:
            done = sum(release in self.tests for release in RELEASES)
        return AuditTest(
            name="rounds_finished",
            statistic=float(done),
            threshold=float(len(RELEASES)),
            passes_if="at least",
            power=1.0,
            against="rows that reach the encoding unclipped",
        )

    @property
    def verdict(self) -> Literal["pass", "fail"]:
        """``pass`` if every test passes."""
        return "fail" if self.failed_tests else "pass"

    @property
    def failed_tests(self) -> list[str]:
        """Names of the tests that failed, without repetition."""
        outcomes = [
            self.rounds_finished,
            *(test for tests in self.tests.values() for test in tests),
        ]
        return list(dict.fromkeys(test.name for test in outcomes if test.verdict == "fail"))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain figures and words."""
        tests = [
            {"release": release, **test.as_dict()}
            for release, outcomes in self.tests.items()
            for test in outcomes
        ]
        one_run = len(self.tests.get("one_run", ()))
        return {
            "verdict": self.verdict,
            "tests": [{"release": "all", **self.rounds_finished.as_dict()}, *tests],
            "settings": asdict(self.settings),
            "rows": self.rows,
            "false_failure_per_test": FALSE_FAILURE,
            "false_failure_at_most": FALSE_FAILURE * (len(tests) - one_run) + FALSE_ALARM * one_run,
            "refusal": self.refusal,
            "seconds": round(self.seconds, 3),
            "round_seconds": self.round_seconds and round(self.round_seconds, 3),
        }


def audit(
    settings: AuditSettings | None = None, *, program: Sequence[str] = PARTY_PROGRAM
) -> AuditReport:
    """Run real rounds on made-up rows, and test the noise and the clip of the releases.

    Every party is its own process, with TLS, masks and CrypTen's reveal between them. Class sums
    for class means are made, and labels drawn, by the parties' parts as threads of this process.
    The training whose records are guessed is the simulator's.

    Args:
        settings: Settings of the audit; default: :class:`AuditSettings`.
        program: Command of each party's process.

    Raises:
        ConfigError: If the settings are impossible.
        ProtocolError: If a process is lost.
        SecureVflError: If class sums are refused.

    Reveals:
        Nothing: all rows are made up.
    """
    settings = settings or AuditSettings()
    started = time.monotonic()
    stages = {release: AuditStage(settings, release) for release in RELEASES}
    class_means = audit_class_means(settings)
    one_run = audit_one_run(settings)
    with tempfile.TemporaryDirectory(prefix="securevfl-audit-") as text, reserved_port() as port:
        folder = Path(text)
        job = {
            "settings": asdict(settings),
            "pinned": provision(settings.names, folder, valid_days=SHORT_LIVED_DAYS),
            "port": port,
        }
        files.write_json(folder / "job.json", job)
        commands = [
            PartyCommand(
                name=name,
                arguments=[*program, str(folder), name],
                log_path=folder / name / "output.log",
                environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
            for name in settings.names
        ]
        refusal = None
        seconds: list[float] = []

        def on_event(_name: str, event: Mapping[str, Any]) -> None:
            if event.get("event") == ROUNDS_EVENT:
                seconds.append(float(event["seconds"]))

        try:
            run_party_processes(commands, deadline_s=settings.timeout_s, on_event=on_event)
        except PrivacyError as error:
            refusal = str(error)
        revealed = {
            release: np.load(path, allow_pickle=False)
            for release in RELEASES
            if (path := folder / f"{release}.npy").exists()
        }
    report = report_of(stages, revealed, started=started, refusal=refusal)
    return replace(
        report,
        tests={**report.tests, **class_means, "one_run": one_run},
        round_seconds=seconds[0] if seconds else None,
    )


def report_of(
    stages: Mapping[Release, AuditStage],
    revealed: Mapping[Release, np.ndarray],
    *,
    started: float,
    refusal: str | None,
) -> AuditReport:
    """Return the report on the revealed averages.

    Args:
        stages: Stage of each kind of release.
        revealed: The averages that the primary learned, by the kind of release; shape
            (rounds, rows, ...).
        started: Start of the audit on the monotonic clock.
        refusal: Reason for unfinished rounds, if the installed code refused its own output.
    """
    return AuditReport(
        settings=next(iter(stages.values())).settings,
        tests={release: stages[release].tests(averages) for release, averages in revealed.items()},
        rows=sum(averages.shape[0] * averages.shape[1] for averages in revealed.values()),
        refusal=refusal,
        seconds=time.monotonic() - started,
    )
