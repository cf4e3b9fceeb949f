"""Count the files and functions that the longest walks through the package pass: ``--json`` too.

    python tools/count_walks.py

A federation of one primary and two secondaries is trained between processes. Each process notes
every function of the package that is entered, and by whom, while a function that opens a walk is
on the stack of the main thread; of a walk that is taken many times, the first is counted. Functions
that Python makes (of comprehensions, lambdas and dataclasses) do not count.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

ROOT: Final = Path(__file__).resolve().parents[1]
WALKS: Final = {
    "a setting, from the federation file's text to the models": (
        "read_federation", "FeTFamily.build_bottom", "FeTFamily.build_top",
    ),
    "a representation, from bottom model to top model": (
        "SecondaryTransport.receive", "HandlerTable.read", "CrypTenSumTo.bind",
        "Secondary.hear_round", "Secondary.hear_gradient", "Exchange.release",
    ),
    "linking, at the primary": ("link_as_primary",),
    "linking, at a secondary": ("link_as_secondary",),
    "the budget, from the file to the first line of the ledger": (
        "plan_run", "PartyFiles.open_ledger", "SecondaryRelease._charge",
    ),
    "the figures, from the end of training to the report": (
        "PrimaryRun.finish", "write_figures", "write_report",
    ),
}  # fmt: skip
"""Each walk by the functions that open its parts, in one process or in several."""

BESIDE: Final = ("train_alone",)
"""What runs within a walk and is none of it."""

CALIBRATION: Final = "ReleasePlan.noise_share_std"

FEDERATION: Final = """\
[federation]
name = "walks"
task = "regression"

[[party]]
name = "primary"
role = "primary"
address = "127.0.0.1:0"
data = "primary.csv"
key = ["x", "y"]
label = "label"

[[party]]
name = "one"
role = "secondary"
data = "one.csv"
key = ["x", "y"]

[[party]]
name = "two"
role = "secondary"
data = "two.csv"
key = ["x", "y"]

[model]
family = "fet"
neighbours = 3
average_positions_every = 0

[training]
epochs = 1

[privacy]
mechanism = "gaussian"
epsilon = 8.0
links_per_record = 2

[linkage]
protection = "none"
"""

NOTES: Final = """\
import atexit, json, os, sys

OPENERS, BESIDE, ROOT, OUT = {openers!r}, {beside!r}, {root!r}, {out!r}
open_, paused, done, entered, calls = {{}}, [], set(), {{}}, {{}}

def note(frame, event, _):
    code = frame.f_code
    name = code.co_qualname
    ours = code.co_filename.startswith(ROOT) and code.co_filename.endswith(".py")
    if not ours or code.co_name.startswith("<"):
        return
    if event == "call":
        calls[name] = calls.get(name, 0) + 1
        if name in BESIDE:
            paused.append(frame)
        if name in OPENERS and name not in done and name not in open_:
            open_[name] = frame
        if open_ and not paused:
            file, back = code.co_filename[len(ROOT):], frame.f_back
            crossed = back is None or back.f_code.co_filename != code.co_filename
            for opener in open_:
                seen = entered.setdefault(opener, {{}}).setdefault(file + "::" + name, [0, 0])
                seen[0] += 1
                seen[1] += crossed
    elif event == "return":
        if paused and paused[-1] is frame:
            paused.pop()
        if open_.get(name) is frame:
            del open_[name]
            done.add(name)

def write():
    sys.setprofile(None)
    with open(os.path.join(OUT, str(os.getpid()) + ".json"), "w") as file:
        json.dump({{"argv": sys.orig_argv, "entered": entered, "calls": calls}}, file)

def begin():
    for kept in (open_, paused, done, entered, calls):
        kept.clear()

def leave(code, leave=os._exit):
    write()
    leave(code)

# A forked party begins its notes anew, and ends without running what atexit holds.
os.register_at_fork(after_in_child=begin)
os._exit = leave
atexit.register(write)
sys.setprofile(note)
"""
"""What every process runs before anything else, as its ``sitecustomize``."""


def main() -> None:
    """Train, and tell what was walked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="write JSON, with every function")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        processes = notes_of_a_run(Path(place))
    walks = {walk: passed(processes, openers) for walk, openers in WALKS.items()}
    calibrations = sorted(process["calls"].get(CALIBRATION, 0) for process in processes)
    if arguments.json:
        sys.stdout.write(json.dumps({"walks": walks, "calibrations": calibrations}, indent=2))
        return
    sys.stdout.write(
        "| walk | files | functions | files that are entered most |\n|---|---|---|---|\n"
    )
    for walk, functions in walks.items():
        files: Counter[str] = Counter()
        for function, times in functions.items():
            files[function.partition("::")[0]] += times
        most = ", ".join(f"{file} {times}" for file, times in files.most_common(3))
        sys.stdout.write(f"| {walk} | {len(files)} | {len(functions)} | {most} |\n")
    sys.stdout.write(f"calibrations by process: {calibrations}\n")


def notes_of_a_run(place: Path) -> list[dict[str, Any]]:
    """Train a small federation in the folder; return what each of its processes noted."""
    draw = np.random.default_rng(7)
    for name in ("primary", "one", "two"):
        columns = {"x": draw.random(120), "y": draw.random(120), f"{name}_size": draw.random(120)}
        if name == "primary":
            columns["label"] = draw.random(120)
        lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
        (place / f"{name}.csv").write_text("\n".join([",".join(columns), *lines]), encoding="utf-8")
    (place / "federation.toml").write_text(FEDERATION, encoding="utf-8")
    out, early = place / "notes", place / "early"
    out.mkdir()
    early.mkdir()
    openers = sorted({opener for openers in WALKS.values() for opener in openers})
    notes = NOTES.format(
        openers=openers, beside=BESIDE, root=f"{ROOT / 'securevfl'}/", out=str(out)
    )
    (early / "sitecustomize.py").write_text(notes, encoding="utf-8")
    subprocess.run(
        [
            *(sys.executable, "-m", "securevfl.cli.main", "train"),
            *("federation.toml", "--out", "run"),
        ],
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{early}{os.pathsep}{ROOT}"},
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=600,
    )
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.iterdir())]


def passed(processes: Iterable[dict[str, Any]], openers: Iterable[str]) -> dict[str, int]:
    """Return every function of a walk, with how often it was entered from another file.

    Where two processes take the same part, as two secondaries do, the first of them counts.
    """
    functions: Counter[str] = Counter()
    for opener in openers:
        taken = [one["entered"][opener] for one in processes if opener in one["entered"]]
        if taken:
            functions.update({name: crossed for name, (_, crossed) in taken[0].items()})
    return dict(functions)


if __name__ == "__main__":
    main()
