"""Runs that are hit where a test says: ``python -m helpers.chaos.at_points FOLDER KIND STRIKES``.

In a process of its own, since it forks all that it starts. ``STRIKES`` is JSON: of each run the
points at which a party is killed, each a party, what it is about to do, and the how-manieth time.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from helpers.chaos.cycles import Drawn, run_cycle, undisturbed
from helpers.chaos.witness import Strike


def main() -> None:
    """Go through each run, which waits for whom it loses, and print what came of it."""
    folder, kind, runs = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    folder.mkdir(parents=True)
    whole = undisturbed(kind, folder / "undisturbed")
    for number, points in enumerate(runs):
        strikes = tuple(
            Strike(victims=(party,), way="SIGKILL", place="", point=(party, what, count))
            for party, what, count in points
        )
        drawn = Drawn(number=number, kind=kind, on_loss="wait", strikes=strikes)
        outcome = run_cycle(drawn, whole, folder / f"run-{number}")
        sys.stdout.write(f"{json.dumps(asdict(outcome))}\n")


if __name__ == "__main__":
    main()
