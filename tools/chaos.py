"""Kill parties of small runs at random, let the runs go on, and say what was lost.

    python tools/chaos.py                        # 200 cycles
    python tools/chaos.py --cycles 20 --seed 3
    python tools/chaos.py --seed 3 --only 17     # one of them once more
    python tools/chaos.py --kinds frozen-noise dp-trained

A cycle trains a federation of three parties in processes, as ``securevfl train`` does, and hits
whom the seed has drawn: parties, several at once, or the launcher; before a message leaves, before
something is written to the disk, or by the clock; by SIGKILL, SIGTERM or SIGSTOP. Under
``on_loss = "wait"`` the launcher starts again whom a signal has ended; what ends all the same, and
every run under ``"stop"``, goes on with ``--resume``. In the end the model must be, without noise,
the undisturbed run's to the last bit; nothing may have left a party that its ledger lacks; nobody
may still be running, and nothing lie about (``tests/helpers/chaos``).

Figures, a line a cycle, are appended to the record; the folder of a cycle that failed stays.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# Parties compute in one thread, and this process, which forks them all, has no other.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

from helpers.chaos.cycles import Outcome, Undisturbed, draw, kind_of, run_cycle, undisturbed  # noqa: E402
from helpers.chaos.kinds import KINDS  # noqa: E402

_COLUMNS: Final = ("cycles", "hit", "equal", "ledger right", "tested", "failed", "p50 s", "p99 s")


def _outcomes(asked: argparse.Namespace) -> Iterator[Outcome]:
    whole: dict[str, Undisturbed] = {}
    until = time.monotonic() + 60 * asked.minutes
    numbers = range(asked.cycles) if asked.only is None else [asked.only]
    for number in numbers:
        kind = kind_of(asked.seed, number)
        if kind not in asked.kinds:
            continue
        if time.monotonic() > until:
            return
        if kind not in whole:
            whole[kind] = undisturbed(kind, asked.folder / f"undisturbed-{kind}")
        drawn = draw(asked.seed, number, whole[kind])
        yield run_cycle(drawn, whole[kind], asked.folder / f"cycle-{number}")


def _figures(outcome: Outcome, seed: int) -> dict[str, Any]:
    figures = asdict(outcome)
    return {"seed": seed, **figures.pop("drawn"), **figures}


def _line(outcome: Outcome) -> str:
    drawn = outcome.drawn
    strikes = "; then ".join(
        f"{strike.way} of {', '.join(strike.victims)} "
        + (f"{strike.place}: {' '.join(map(str, strike.point))}" if strike.point else strike.place)
        for strike in drawn.strikes
    )
    return (
        f"{drawn.number} {drawn.kind} ({drawn.on_loss}): {strikes}: {len(outcome.launches)} "
        f"launches, {outcome.seconds:.1f} s, {'FAILED' if outcome.faults else 'good'}\n"
    )


def _row(outcomes: Sequence[Outcome]) -> list[str]:
    lost = sorted(outcome.lost_s for outcome in outcomes if outcome.hits)
    compared = [outcome.equal for outcome in outcomes if outcome.equal is not None]
    at = [
        f"{lost[int(share * (len(lost) - 1) + 0.5)]:.1f}" if lost else "" for share in (0.5, 0.99)
    ]
    return [
        str(len(outcomes)),
        str(sum(bool(outcome.hits) for outcome in outcomes)),
        f"{sum(compared)} of {len(compared)}" if compared else "",
        f"{sum(outcome.ledger for outcome in outcomes)} of {len(outcomes)}",
        str(sum(outcome.tested for outcome in outcomes)),
        str(sum(bool(outcome.faults) for outcome in outcomes)),
        *at,
    ]


def _table(title: str, outcomes: Sequence[Outcome], by: Callable[[Outcome], str]) -> str:
    groups: dict[str, list[Outcome]] = {}
    for outcome in sorted(outcomes, key=by):
        groups.setdefault(by(outcome), []).append(outcome)
    rows = [[title, *_COLUMNS], ["---"] * (1 + len(_COLUMNS))]
    rows += [[name, *_row(group)] for name, group in groups.items()]
    rows.append(["all", *_row(outcomes)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="that cycle of the seed, alone")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=sorted(KINDS))
    parser.add_argument("--minutes", type=float, default=600.0, help="no cycle begins later")
    parser.add_argument("--folder", type=Path, default=Path("chaos"), help="of the runs")
    parser.add_argument("--record", type=Path, default=Path("chaos.jsonl"), help="file of figures")
    parser.add_argument("--json", action="store_true", help="figures on stdout in place of tables")
    asked = parser.parse_args()
    if asked.cycles < 1 or (asked.only is not None and asked.only < 0):
        parser.error("--cycles is 1 or more, and --only 0 or more")
    asked.folder = asked.folder.resolve()
    asked.folder.mkdir(parents=True, exist_ok=True)
    return asked


def main() -> int:
    """Return 1 if anything failed."""
    asked = _asked()
    outcomes: list[Outcome] = []
    for outcome in _outcomes(asked):
        outcomes.append(outcome)
        with asked.record.open("a", encoding="utf-8") as record:
            record.write(f"{json.dumps(_figures(outcome, asked.seed))}\n")
        sys.stderr.write(_line(outcome))
        for fault in outcome.faults:
            sys.stderr.write(f"  {fault}\n")
        if outcome.faults:
            again = f"--seed {asked.seed} --only {outcome.drawn.number}"
            sys.stderr.write(f"  again: python tools/chaos.py {again}\n")
    failed = sum(bool(outcome.faults) for outcome in outcomes)
    if asked.json:
        figures = [_figures(outcome, asked.seed) for outcome in outcomes]
        sys.stdout.write(f"{json.dumps({'failed': failed, 'cycles': figures}, indent=2)}\n")
    else:
        sys.stdout.write(_table("kind", outcomes, lambda outcome: outcome.drawn.kind))
        sys.stdout.write("\n")
        sys.stdout.write(
            _table("first killed in", outcomes, lambda outcome: outcome.drawn.strikes[0].place)
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
