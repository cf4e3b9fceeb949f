"""A party's record of its releases and of the privacy spent: charge, then release.

One file per party (:mod:`federation.ledger_file`). ``open`` lines hold a session's plan, ``charge``
lines one release each, a ``fit`` line the fitting of a frozen encoder; together they are all that
is needed to compute what was spent again.
"""

import math
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Int64

from securevfl.core import checks
from securevfl.core.errors import BudgetExceededError, ConfigError, PrivacyError
from securevfl.core.settings import read_settings
from securevfl.dp.accountant import epsilon_of
from securevfl.dp.events import Release
from securevfl.dp.fitting import fitting_from
from securevfl.dp.privacy import Privacy
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.chained_file import ChainedFile
from securevfl.federation.countersign import COUNTERSIGNED, FORGOTTEN

_VERSION: Final = 2


class _Session:
    """What was planned when the ledger was opened, and what has been released since."""

    def __init__(self, *, plan: ReleasePlan, noise_share_std: float) -> None:
        self.plan = plan
        self.noise_share_std = noise_share_std
        self.fitted = False
        self.rounds = 0
        self.row_releases = 0
        self.passes = 0
        """Most rounds that one row was in."""
        self.updates = 0
        self.last_round = 0

    def book(self, *, round_number: int, rows: int, passes: int, purpose: str) -> None:
        self.rounds += 1
        self.updates += purpose == "train" and self.plan.privacy.encoder == "dp-trained"
        self.row_releases += rows
        self.passes = max(self.passes, passes)
        self.last_round = round_number

    def unprotected(self, *, more_rounds: int = 0) -> bool:
        return self.noise_share_std == 0 and (self.fitted or self.rounds + more_rounds > 0)

    def releases(
        self, *, more_rounds: int = 0, more_rows: int = 0, passes: int = 0
    ) -> list[Release]:
        rounds, rows = self.rounds + more_rounds, self.row_releases + more_rows
        # A release of a fitted encoder has its fitting behind it, whoever booked it.
        fitting = self.plan.fitting_releases() if self.fitted or rounds else []
        if rounds == 0:
            return fitting
        return [
            *fitting,
            self.plan.release(
                self.noise_share_std,
                rounds=rounds,
                row_releases=rows,
                passes=max(self.passes, passes),
            ),
        ]


class Ledger:
    """Book every release before it is made, and refuse what the budget does not cover.

    With ``privacy.epsilon`` the budget is that epsilon, for everything the ledger holds: several
    runs on the same data add up. Without it (or with as-published accounting) the budget is the
    plan: a session cannot release more rounds or rows than were planned when its noise was chosen.

    The file stays with its party. It holds settings, round numbers and row counts, never a record,
    a key or a representation.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        party: str,
        plan: ReleasePlan,
        noise_share_std: float,
        durable: bool = True,
    ) -> None:
        """Open a ledger, or go on with the one that lies at ``path``.

        Args:
            path: The file; None keeps the record in memory only (the simulator).
            party: Whose releases these are.
            plan: What this session will release.
            noise_share_std: ``tau``, the noise that this session really adds, as
                :meth:`ReleasePlan.noise_share_std` returned it; 0 for the mechanism ``none``.
            durable: Whether every charge must outlive a crash of the machine; a simulation
                releases nothing to anyone.

        Raises:
            ConfigError: If the file is another party's, in use, or cannot be opened.
            PrivacyError: If the file was altered, or its releases were charged for another unit.
        """
        checks.non_negative(noise_share_std=noise_share_std)
        self.party = party
        self._earlier: list[_Session] = []
        self._own = _Session(plan=plan, noise_share_std=noise_share_std)
        self._uses: Counter[int] = Counter()
        self._file = ChainedFile(path, durable=durable)
        try:
            for number, entry in enumerate(self._file.entries, 1):
                self._replay(entry, where=f"ledger {path}, line {number}")
            self._file.append(
                {
                    "kind": "open",
                    "version": _VERSION,
                    "party": party,
                    "time": datetime.now(UTC).isoformat(timespec="seconds"),
                    "noise_share_std": noise_share_std,
                    "plan": asdict(plan),
                }
            )
        except BaseException:
            self._file.close()
            raise

    @property
    def file(self) -> ChainedFile:
        """The record itself, for those who show to others that it goes on."""
        return self._file

    @property
    def path(self) -> Path | None:
        """Where the record lies."""
        return self._file.path

    @property
    def head(self) -> str:
        """The chain's head; keep it elsewhere to notice a ledger that was cut."""
        return self._file.head

    @property
    def rounds(self) -> int:
        """Releases charged in this session."""
        return self._own.rounds

    @property
    def row_releases(self) -> int:
        """Rows charged in this session, summed over its rounds."""
        return self._own.row_releases

    @property
    def all_rounds(self) -> int:
        """Releases charged in this session and in all earlier ones."""
        return sum(session.rounds for session in [*self._earlier, self._own])

    @property
    def all_row_releases(self) -> int:
        """Rows charged in this session and in all earlier ones, summed over their rounds."""
        return sum(session.row_releases for session in [*self._earlier, self._own])

    @property
    def updates(self) -> int:
        """Noised updates of dp-trained models charged, in this session and in all earlier ones."""
        return sum(session.updates for session in [*self._earlier, self._own])

    @property
    def spent(self) -> float:
        """Epsilon of everything in the ledger, at this plan's delta; rounded up."""
        return self._epsilon()

    @property
    def spent_before(self) -> float:
        """Epsilon of the earlier sessions alone."""
        return _epsilon_of(self._earlier, self._delta)

    @property
    def passes(self) -> int:
        """Most rounds of this session that one row was in."""
        return self._own.passes

    def require_room(self, *, rounds: int, row_releases: int, passes: int) -> None:
        """Refuse a run that could not finish; call it before anything is sent.

        Args:
            rounds: Releases still to be made, >= 0.
            row_releases: Their rows, summed; >= ``rounds``.
            passes: Most of them that one row will be in.

        Raises:
            BudgetExceededError: If the budget does not cover them.
        """
        checks.whole(rounds=rounds, row_releases=row_releases)
        checks.at_least(0, rounds=rounds)
        checks.at_least(rounds, row_releases=row_releases)
        if rounds:
            self._require(
                rounds=rounds,
                rows=row_releases,
                passes=self._own.passes + passes,
                what=f"the run's {rounds} releases",
            )

    def charge(
        self, *, round_number: int, rows: Int64[np.ndarray, " batch"], purpose: str
    ) -> float:
        """Book one release, durably; call it before the release, never after.

        A round that is aborted afterwards stays booked: others may have seen it. A training round
        of a dp-trained encoder is booked with the update that follows from it, made or not.

        Args:
            round_number: Rises within a session, from 1 on; a retry is a new round.
            rows: Ids of the release's rows; the file gets their number, and how often the most
                released of them was released in this session.
            purpose: What for; every purpose is charged alike.

        Returns:
            Epsilon of everything in the ledger, this release included; rounded up.

        Raises:
            BudgetExceededError: If the budget does not cover it. Nothing is booked then, and the
                caller must not release.
            PrivacyError: If the round was charged before, or the ledger is closed.
        """
        checks.whole(round_number=round_number)
        checks.at_least(1, round_number=round_number, rows=len(rows))
        if round_number <= self._own.last_round:
            raise PrivacyError(
                f"round {round_number}: rounds up to {self._own.last_round} are charged already; "
                f"a retry needs a new round number"
            )
        batch = Counter(rows.tolist())
        passes = max(self._uses[row] + count for row, count in batch.items())
        epsilon = self._require(
            rounds=1, rows=len(rows), passes=passes, what=f"round {round_number} ({purpose})"
        )
        self._file.append(
            {
                "kind": "charge",
                "round": round_number,
                "rows": len(rows),
                "passes": passes,
                "purpose": purpose,
                "epsilon": _or_none(epsilon),
            }
        )
        self._own.book(round_number=round_number, rows=len(rows), passes=passes, purpose=purpose)
        self._uses.update(batch)
        return epsilon

    def charge_fitting(self) -> float:
        """Book the fitting of a frozen encoder, durably; call it before its noise is drawn.

        Returns:
            Epsilon of everything in the ledger, the fitting included; rounded up.

        Raises:
            BudgetExceededError: If the budget does not cover it; nothing is booked then.
            PrivacyError: If this session fitted before, or the ledger is closed.
        """
        if self._own.fitted:
            raise PrivacyError("the encoder was fitted before in this session; it is fitted once")
        self._own.fitted = True
        try:
            epsilon = self._require(rounds=0, rows=0, passes=0, what="fitting the encoder")
            multiplier = self._own.plan.fitting_multiplier()
            self._file.append(
                {"kind": "fit", "noise_multiplier": multiplier, "epsilon": _or_none(epsilon)}
            )
        except BaseException:
            self._own.fitted = False
            raise
        return epsilon

    def require_history(self, head: str) -> None:
        """Refuse a ledger whose head was never ``head``.

        Raises:
            PrivacyError: If the ledger was cut, or is another one.
        """
        if not self._file.chain.contains(head):
            raise PrivacyError(
                f"ledger {self.path}: lacks releases that the checkpoint knows of; it was cut or "
                f"exchanged, and what was spent cannot be known. Restore it from a copy"
            )

    def close(self) -> None:
        """Let the file go; later charges raise."""
        self._file.close()

    @property
    def _delta(self) -> float:
        sessions = [*self._earlier, self._own]
        reserved = max(session.plan.reserved_delta for session in sessions)
        return self._own.plan.privacy.delta - reserved

    def _epsilon(self, *, rounds: int = 0, rows: int = 0, passes: int = 0) -> float:
        """Return what is spent, with so many more releases of this session."""
        sessions = [*self._earlier, self._own]
        return _epsilon_of(sessions, self._delta, more_rounds=rounds, more_rows=rows, passes=passes)

    def _require(self, *, rounds: int, rows: int, passes: int, what: str) -> float:
        plan, own = self._own.plan, self._own
        epsilon = self._epsilon(rounds=rounds, rows=rows, passes=passes)
        limit = plan.privacy.epsilon
        if limit is not None and plan.privacy.accounting == "sound":
            if not epsilon <= limit:  # written so that NaN fails
                before = self.spent_before
                earlier = f", {before:.4f} of it by earlier runs in {self.path}" if before else ""
                raise BudgetExceededError(
                    f"{self.party}: {what} would bring epsilon to {epsilon:.4f}, over "
                    f"privacy.epsilon = {limit:g} ({self.spent:.4f} is spent{earlier}); raise "
                    f"privacy.epsilon, lower training.epochs, or add noise"
                )
            return epsilon
        if (
            own.rounds + rounds > plan.rounds
            or own.row_releases + rows > plan.row_releases
            or passes > plan.releases_per_row
        ):
            raise BudgetExceededError(
                f"{self.party}: {what} would pass the plan of {plan.rounds} releases and "
                f"{plan.row_releases} rows, each at most {plan.releases_per_row} times, for which "
                f"the noise was chosen ({own.rounds} releases and {own.row_releases} rows are "
                f"made); plan more epochs at the start"
            )
        return epsilon

    def _replay(self, entry: dict[str, Any], *, where: str) -> None:
        try:
            if entry["kind"] == "open":
                self._replay_open(entry, where=where)
            elif entry["kind"] == "charge" and self._earlier:
                self._earlier[-1].book(
                    round_number=entry["round"],
                    rows=entry["rows"],
                    passes=entry["passes"],
                    purpose=entry["purpose"],
                )
            elif entry["kind"] == "fit" and self._earlier:
                self._earlier[-1].fitted = True
            elif entry["kind"] not in (COUNTERSIGNED, FORGOTTEN):
                raise PrivacyError(f"{where}: is not a line that a ledger starts or goes on with")
        except (KeyError, TypeError) as error:
            raise PrivacyError(f"{where}: is not a ledger's line ({error})") from None

    def _replay_open(self, entry: dict[str, Any], *, where: str) -> None:
        if entry["version"] != _VERSION:
            raise ConfigError(
                f"{where}: was written in version {entry['version']!r} of the format; this "
                f"program reads version {_VERSION}"
            )
        if entry["party"] != self.party:
            raise ConfigError(
                f"{where}: this ledger is the party {entry['party']!r}'s, not {self.party!r}'s; "
                f"every party has its own"
            )
        settings = dict(entry["plan"])
        privacy = read_settings(Privacy, settings.pop("privacy"), where="privacy")
        fitting = fitting_from(settings.pop("fitting"))
        plan = ReleasePlan(privacy=privacy, fitting=fitting, **settings)
        unit = self._own.plan.privacy.unit
        if privacy.unit != unit:
            raise PrivacyError(
                f"{where}: its releases were charged for unit = {privacy.unit!r}, this run asks "
                f"for {unit!r}; the two do not add up. Keep the unit, or use another ledger and "
                f"accept that the two guarantees stand side by side"
            )
        self._earlier.append(_Session(plan=plan, noise_share_std=entry["noise_share_std"]))


def _or_none(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


def _epsilon_of(
    sessions: list[_Session],
    delta: float,
    *,
    more_rounds: int = 0,
    more_rows: int = 0,
    passes: int = 0,
) -> float:
    """Return epsilon of all sessions, the last one with so many more releases."""
    releases: list[Release] = []
    for session in sessions:
        last = session is sessions[-1]
        rounds, rows, most = (more_rounds, more_rows, passes) if last else (0, 0, 0)
        if session.unprotected(more_rounds=rounds):
            return math.inf
        releases += session.releases(more_rounds=rounds, more_rows=rows, passes=most)
    return epsilon_of(releases, delta=delta)
