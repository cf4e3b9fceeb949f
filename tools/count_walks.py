"""Count what the longest walks through the package pass, and how deep a round is: ``--json`` too.

    python tools/count_walks.py

A small federation is simulated, and the package's frames on the stack are counted where a bottom
model computes for the first time, and where a secondary learns for the first time.

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
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import pandas as pd

import securevfl as sv

ROOT: Final = Path(__file__).resolve().parents[1]
WALKS: Final = {
    "a setting, from the federation file's text to the models": (
        "read_federation", "FeTFamily.build_bottom", "FeTFamily.build_top",
    ),
    "a representation, from bottom model to top model": (
        "SecondaryTransport.receive", "HandlerTable.read", "CrypTenSumTo.bind",
        "Secondary.hear_round", "Secondary.hear_gradient", "RoundExchange.release",
    ),
    "linking, at the primary": ("link_as_primary",),
    "linking, at a secondary": ("link_as_secondary",),
    "the budget, from the file to the first line of the ledger": (
        "plan_run", "PartyFiles.open_ledger", "SecondaryRelease.release",
    ),
    "the figures, from the end of training to the report": (
        "measure_run", "write_figures", "write_report",
    ),
}  # fmt: skip
"""Each walk by the functions that open its parts, in one process or in several."""

BESIDE: Final = ("train_alone",)
"""What runs within a walk and is none of it."""

DEPTHS: Final = {
    "forward: sv.simulate to a bottom model": ("FeTBottom.forward", "FeTBottom.of_distinct"),
    "gradient: sv.simulate to a secondary's learning": ("Secondary.learn",),
}
"""Each depth of a round by the functions that end it."""

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
    depths = {name: stack_at(ends) for name, ends in DEPTHS.items()}
    with tempfile.TemporaryDirectory() as place:
        processes = notes_of_a_run(Path(place))
    walks = {walk: passed(processes, openers) for walk, openers in WALKS.items()}
    calibrations = sorted(process["calls"].get(CALIBRATION, 0) for process in processes)
    if arguments.json:
        sys.stdout.write(
            json.dumps({"depths": depths, "walks": walks, "calibrations": calibrations}, indent=2)
        )
        return
    for name, frames in depths.items():
        places = {frame.partition("::")[0] for frame in frames}
        names = " > ".join(frame.partition("::")[2] for frame in frames)
        sys.stdout.write(f"{name}: {len(frames)} frames in {len(places)} files: {names}\n")
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


def stack_at(ends: Sequence[str]) -> list[str]:
    """Return the package's frames, ``file::function``, that a simulation has at one of some ends.

    The end itself is left out; so are functions that Python makes.
    """
    frames: list[str] = []
    root = f"{ROOT / 'securevfl'}/"

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frames or frame.f_code.co_qualname not in ends:
            return
        stack: list[str] = []
        outer = frame.f_back
        while outer is not None:
            code = outer.f_code
            if code.co_filename.startswith(root) and not code.co_name.startswith("<"):
                stack.append(f"{code.co_filename[len(root) :]}::{code.co_qualname}")
            outer = outer.f_back
        # Models are tried out when they are built.
        if any(call.endswith("::HandlerTable.handle") for call in stack):
            frames.extend(reversed(stack))

    draw = np.random.default_rng(7)
    tables = [
        pd.DataFrame({"x": draw.random(120), "y": draw.random(120), "size": draw.random(120)})
        for _ in range(3)
    ]
    tables[0]["label"] = draw.random(120)
    sys.setprofile(note)
    try:
        sv.simulate(
            primary=tables[0],
            secondaries=tables[1:],
            label="label",
            key=["x", "y"],
            model=sv.models.FeT(neighbours=3, hidden=8, heads=2),
            privacy=sv.dp.Privacy(mechanism="none"),
            training=sv.TrainingSettings(epochs=1),
            base="none",
            with_alone=False,
            progress=False,
        )
    finally:
        sys.setprofile(None)
    return frames


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
