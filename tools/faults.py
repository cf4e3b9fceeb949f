"""Let every fault fall on every party in every phase of small runs, and say what came of it.

    python tools/faults.py                                      # all; half an hour on two cores
    python tools/faults.py --only hung disk-full --role dealer
    python tools/faults.py --cell killed/secondary/round/wait --json
    python tools/faults.py --page research/faults/README.md  # and write that page's table

A run is a federation of three or five processes over TLS, each in a folder of its own and started
as its operator would start it (``securevfl party``). One fault falls on one of them, just before it
sends a certain message or writes a certain file, and is mended when the others have noticed. Under
``on_loss = "wait"`` the party is then started again, if its process has ended, and the run must end
by itself; what ends all the same, and every run under ``"stop"``, goes on with ``--resume``. In the
end models, predictions and metrics must be those of an undisturbed run, and no ledger below what
left. Whatever is not as it should be is listed, and the folder of that run stays.

Disks are full by file systems of 8 MB (root is needed to mount them), clocks jump by a library that
is compiled (``cc``); without these the faults that need them are left out, and that is said.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# Parties compute in one thread, and this process, which forks them all, has no other.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

_CLOCK: Final = ROOT / "tests" / "helpers" / "faults" / "clock.c"
_COMPILED: Final = "SECUREVFL_FAULTS_CLOCK"


def _with_a_clock() -> None:
    """Begin again with a clock that parties can set, if there is a compiler."""
    compiled = os.environ.pop(_COMPILED, None)
    if compiled is not None:
        # It is loaded, and stays so in all that are forked.
        del os.environ["LD_PRELOAD"]
        Path(compiled).unlink()
        return
    compiler = shutil.which("cc")
    if compiler is None or "LD_PRELOAD" in os.environ:
        return
    handle, library = tempfile.mkstemp(suffix=".so")
    os.close(handle)
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, str(_CLOCK)]
    if subprocess.run(command, capture_output=True).returncode:
        Path(library).unlink()
        return
    preloaded = {**os.environ, "LD_PRELOAD": library, _COMPILED: library}
    os.execve(sys.executable, [sys.executable, *sys.argv], preloaded)  # noqa: S606


if __name__ == "__main__":
    _with_a_clock()  # before all that takes seconds to load

from helpers.faults.cells import Outcome, kind_of, run_cell, undisturbed  # noqa: E402
from helpers.faults.kinds import FAULTS, PHASES, ROLES  # noqa: E402
from helpers.faults.party import clock_can_be_set  # noqa: E402
from helpers.faults.stage import can_mount  # noqa: E402
from helpers.faults.table import findings_of, table_of, write_page  # noqa: E402

_ON_LOSS: Final = ("stop", "wait")
_Cell = tuple[str, str, str, str]


def _left_out() -> dict[str, str]:
    """Return the faults that this machine does not allow, and why."""
    found: dict[str, str] = {}
    if not clock_can_be_set():
        found |= {name: "there is no C compiler" for name, one in FAULTS.items() if one.sets_clock}
    if not can_mount():
        found |= {name: "nothing can be mounted" for name, one in FAULTS.items() if one.mounts}
    return found


def _cells(asked: argparse.Namespace, left_out: dict[str, str]) -> list[_Cell]:
    if asked.cell:
        return [cell for cell in asked.cell if cell[0] not in left_out]
    return [
        (name, role, phase, on_loss)
        for name in asked.only
        if name not in left_out
        for on_loss in asked.on_loss
        for role, phase in FAULTS[name].cells(on_loss=on_loss)
        if role in asked.role and phase in asked.phase
    ]


def _name(one: dict[str, Any]) -> _Cell:
    return one["fault"], one["role"], one["phase"], one["on_loss"]


def _recorded(record: Path, cells: Sequence[_Cell]) -> list[dict[str, Any]]:
    """Return the last figures that a record has of each cell."""
    if not record.exists():
        return []
    lines = record.read_text(encoding="utf-8").splitlines()
    last = {_name(one): one for one in map(json.loads, lines)}
    return [last[cell] for cell in cells if cell in last]


def _run_all(asked: argparse.Namespace, cells: Sequence[_Cell]) -> Iterator[dict[str, Any]]:
    """Run cells in several processes, and yield the figures of each as it ends."""
    if not cells or asked.minutes <= 0:
        return
    kinds = sorted({kind_of(phase) for _, _, phase, _ in cells})
    whole = {kind: undisturbed(kind, asked.folder / f"undisturbed-{kind}") for kind in kinds}
    heard, told = os.pipe()
    until = time.monotonic() + 60 * asked.minutes
    for number in range(asked.jobs):
        if not os.fork():
            code = 1
            try:
                os.close(heard)
                for name, role, phase, on_loss in cells[number :: asked.jobs]:
                    if time.monotonic() > until:
                        break
                    outcome = run_cell(
                        FAULTS[name],
                        role,
                        phase,
                        on_loss=on_loss,
                        whole=whole[kind_of(phase)],
                        folder=asked.folder / f"{name}-{role}-{phase}-{on_loss}",
                    )
                    _tell(told, outcome)
                code = 0
            finally:
                os._exit(code)
    os.close(told)
    with os.fdopen(heard, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(asked.jobs)]
    if any(codes):
        raise SystemExit("a process that let faults fall has broken: see above")


def _tell(pipe: int, outcome: Outcome) -> None:
    line = f"{json.dumps(asdict(outcome))}\n".encode()
    while line:
        line = line[os.write(pipe, line) :]


def _line(one: dict[str, Any]) -> str:
    after = max(one["noticed"].values(), default=None)
    noticed = "nobody disturbed" if after is None else f"noticed after {after:.1f} s"
    codes = " ".join(map(str, one["codes"].values()))
    again = f", resumed {one['resumed']} times" if one["resumed"] else ""
    return (
        f"{one['fault']} {one['role']} {one['phase']} ({one['on_loss']}): {noticed}, codes {codes}"
        f"{again}, {one['repeated']} rounds again, {one['seconds']:.1f} s: "
        f"{'FAILED' if one['findings'] else 'good'}\n"
    )


def _cell(text: str) -> _Cell:
    name, role, phase, on_loss = [*text.split("/"), "", "", ""][:4]
    if (
        text.count("/") != 3
        or name not in FAULTS
        or (role, phase) not in FAULTS[name].cells(on_loss=on_loss)
    ):
        raise argparse.ArgumentTypeError(f"there is no {text}")
    return name, role, phase, on_loss


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--role", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--on-loss", nargs="+", choices=_ON_LOSS, default=list(_ON_LOSS))
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--folder", type=Path, default=Path("faults"), help="of the runs")
    parser.add_argument("--record", type=Path, default=Path("faults.jsonl"), help="file of figures")
    parser.add_argument("--page", type=Path, help="the page whose table is written anew")
    parser.add_argument("--json", action="store_true", help="figures on stdout in place of tables")
    parser.add_argument(
        "--cell", nargs="+", type=_cell, metavar="FAULT/ROLE/PHASE/ON_LOSS", help="these alone"
    )
    parser.add_argument("--minutes", type=float, default=600.0, help="no run begins later")
    parser.add_argument("--resume", action="store_true", help="run what the record lacks")
    parser.add_argument("--list", action="store_true", help="name the faults, and run none")
    asked = parser.parse_args()
    if asked.jobs < 1:
        parser.error("--jobs is 1 or more")
    asked.folder = asked.folder.resolve()
    return asked


def main() -> int:
    """Return 1 if anything is not as it should be."""
    asked = _asked()
    if asked.list:
        sys.stdout.writelines(f"{name}: {fault.what}\n" for name, fault in FAULTS.items())
        return 0
    asked.folder.mkdir(parents=True, exist_ok=True)
    wanted = [cell[0] for cell in asked.cell] if asked.cell else asked.only
    left_out = {name: why for name, why in _left_out().items() if name in wanted}
    cells = _cells(asked, left_out)
    if not cells:
        raise SystemExit("nothing is asked for that makes sense and can be run here")
    found = _recorded(asked.record, cells) if asked.resume else []
    done = {_name(one) for one in found}
    for one in _run_all(asked, [cell for cell in cells if cell not in done]):
        found.append(one)
        with asked.record.open("a", encoding="utf-8") as record:
            record.write(f"{json.dumps(one)}\n")
        sys.stderr.write(_line(one))
        sys.stderr.writelines(f"  {finding}\n" for finding in one["findings"])
        if one["findings"]:
            sys.stderr.write(f"  again: python tools/faults.py --cell {'/'.join(_name(one))}\n")
    missing = [f"{name}: {why}" for name, why in left_out.items()]
    if len(found) < len(cells):
        missing.append(f"{len(cells) - len(found)} of {len(cells)} runs: time was over")
    order = {cell: number for number, cell in enumerate(cells)}
    found.sort(key=lambda one: order[_name(one)])
    findings = list(findings_of(found))
    if asked.page is not None:
        write_page(asked.page, found, left_out=missing)
    if asked.json:
        told = {"findings": findings, "left_out": missing, "cells": found}
        sys.stdout.write(f"{json.dumps(told, indent=2)}\n")
    else:
        sys.stdout.write(table_of(found))
        sys.stdout.writelines(f"not run: {one}\n" for one in missing)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
