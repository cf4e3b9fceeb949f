"""Break the privacy code in one place at a time, and see whether a test notices.

    python tools/mutation.py --mutants 200 --seed 1 --record mutants.jsonl
    python tools/mutation.py --again mutants.jsonl --record left.jsonl   # those that survived

Cosmic Ray makes the mutants: an operator, a comparison, a number or a condition that is another
one. Of every place at most one is taken, and of all places a seeded sample, in turns from every
module. Annotations, decorators and texts are left alone. What git knows is copied to a folder of
its own, and changed there. The tests run once without a mutant, while it is noted which functions
each of them calls; then, for each mutant, a fork of this process runs those that call the changed
function, the quick ones first.

A mutant is killed if a test fails, or if they take four times as long as before. The tests below
are the fast ones of each package, and of these so many as take a minute: the whole suite may still
notice a survivor.
"""

import argparse
import ast
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Final

import cosmic_ray.commands
import cosmic_ray.plugins
import pytest
from cosmic_ray.mutating import use_mutation
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec

ROOT: Final = Path(__file__).resolve().parents[1]

TESTS: Final = {
    "dp": (
        "tests/unit/dp",
        "tests/property/dp",
        "tests/statistical/dp",
        "tests/statistical/federation",
        "tests/vectors/test_accounting_vectors.py",
    ),
    "mpc": ("tests/unit/mpc", "tests/property/mpc", "tests/statistical/mpc"),
    "ledger": ("tests/unit/federation",),
    "federation": (
        "tests/unit/federation",
        "tests/property/federation",
        "tests/statistical/federation",
        "tests/vectors/test_losses.py",
    ),
}
"""The tests of each package."""

RELEASE_PATH: Final = (
    "build", "cut", "encoder_fitting", "peers", "release", "run_plan", "secondary", "updates",
)  # fmt: skip
"""What a release passes in ``federation``; of the other packages all modules are taken."""

LIBRARIES: Final = (
    "beartype", "cryptography.hazmat.primitives.ciphers", "dp_accounting.pld", "dp_accounting.rdp",
    "jaxtyping", "mpmath", "pandas", "scipy.optimize", "scipy.stats", "torch.func",
)  # fmt: skip
"""Imported before the first fork; nothing of the package itself may be."""

_PATIENCE: Final = 4.0
_LEAST_S: Final = 60.0
_DAY_S: Final = 86400.0
_POLL_S: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one place, and what became of it."""

    module: str
    operator: str
    occurrence: int
    line: int
    outcome: str = ""
    seconds: float = 0.0
    tests: int = 0
    diff: str = ""

    @property
    def name(self) -> str:
        """The module as the tables above name it."""
        return Path(self.module).relative_to("securevfl").with_suffix("").as_posix()


def modules() -> list[Path]:
    """Return the modules of the current folder that are mutated."""
    return [
        path
        for package in TESTS
        for path in sorted(Path("securevfl", package).rglob("*.py"))
        if path.stem != "__init__" and (package != "federation" or path.stem in RELEASE_PATH)
    ]


def untouched(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where a module's annotations, decorators and formatted texts are."""
    kept: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign | ast.arg):
            kept.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            kept += [node.returns, *node.decorator_list]
        elif isinstance(node, ast.ClassDef):
            kept += node.decorator_list
        elif isinstance(node, ast.JoinedStr):
            kept.append(node)
    # From one column before, where the sign of a decorator stands.
    return [
        ((node.lineno, node.col_offset - 1), (node.end_lineno, node.end_col_offset or 0))
        for node in kept
        if node is not None and node.end_lineno is not None
    ]


def all_mutants(seed: int) -> list[Mutant]:
    """Return one mutant of every place, chosen by the seed, in the order of the files."""
    with (
        tempfile.TemporaryDirectory() as folder,
        use_db(Path(folder) / "mutants.sqlite", WorkDB.Mode.create) as work,
    ):
        cosmic_ray.commands.init(modules(), work, {})
        made = [item.mutations[0] for item in work.work_items]
    sources = {module: module.read_text("utf-8") for module in modules()}
    texts = {module: untouched(source) for module, source in sources.items()}
    places: dict[tuple[str, tuple[int, int]], list[MutationSpec]] = {}
    for mutation in made:
        start = (mutation.start_pos[0], mutation.start_pos[1])
        line = sources[mutation.module_path].splitlines()[start[0] - 1]
        # The star between parameters is no operator.
        if not line.startswith("*,", start[1]) and not any(
            first <= start < last for first, last in texts[mutation.module_path]
        ):
            places.setdefault((str(mutation.module_path), start), []).append(mutation)
    draw = random.Random(seed)  # noqa: S311  # which mutants are tried is no secret
    chosen = []
    for place in sorted(places):
        one = draw.choice(sorted(places[place], key=lambda m: (m.operator_name, m.occurrence)))
        chosen.append(
            Mutant(
                module=place[0],
                operator=one.operator_name,
                occurrence=one.occurrence,
                line=place[1][0],
            )
        )
    return chosen


def sample(mutants: Sequence[Mutant], size: int, seed: int) -> list[Mutant]:
    """Return so many mutants, one of every module in turn while it has them."""
    draw = random.Random(seed)  # noqa: S311
    turns: list[tuple[int, Mutant]] = []
    for module in sorted({mutant.module for mutant in mutants}):
        own = [mutant for mutant in mutants if mutant.module == module]
        turns += enumerate(draw.sample(own, len(own)))
    turns.sort(key=lambda turn: turn[0])
    return [mutant for _, mutant in turns[:size]]


class Calls:
    """A plugin of pytest that notes what every test calls, and how long it takes."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, list[str]]] = {}
        self._ours: dict[object, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Look at one test."""
        seen: set[str] = set()

        def look(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call":
                if code not in self._ours:
                    inside = code.co_filename.startswith(str(Path("securevfl").resolve()))
                    path = Path(code.co_filename)
                    self._ours[code] = function(path, code.co_qualname) if inside else ""
                seen.add(self._ours[code])

        began = time.monotonic()
        threading.setprofile(look)
        sys.setprofile(look)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            self.found[item.nodeid] = time.monotonic() - began, sorted(seen)


def function(path: Path, name: str) -> str:
    """Return what a function of a module is called here; functions within it count as it."""
    return f"{path.parent.name}/{path.stem}:{name.partition('.<')[0]}"


def function_at(module: Path, line: int) -> str:
    """Return the function that holds a line; "" where none does."""
    found = ""

    def search(body: Sequence[ast.stmt], prefix: str) -> None:
        nonlocal found
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                if first <= line <= (node.end_lineno or first):
                    if isinstance(node, ast.ClassDef):
                        search(node.body, f"{prefix}{node.name}.")
                    elif line >= node.lineno:
                        found = function(module, prefix + node.name)

    search(ast.parse(module.read_text("utf-8")).body, "")
    return found


def touches(module: Path, called: set[str]) -> bool:
    """Return whether a test calls anything of a module."""
    return any(one.startswith(function(module, "")) for one in called)


def in_a_fork(tests: Sequence[str], limit_s: float, calls: Path | None = None) -> bool:
    """Run tests in a fork of this process; return whether they pass in time."""
    child = os.fork()
    if not child:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.path.insert(0, str(Path.cwd()))
        settings = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        # The libraries below were imported without pytest, which warns of it.
        settings += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code, plugin = 1, Calls()
        try:
            code = int(pytest.main([*settings, *tests], plugins=[plugin] if calls else []))
            if calls:
                calls.write_text(json.dumps(plugin.found), encoding="utf-8")
        finally:
            os._exit(code)
    deadline = time.monotonic() + limit_s
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(_POLL_S)


def what_tests_call(tests: Sequence[str]) -> dict[str, tuple[float, set[str]]]:
    """Run tests without a mutant; return their seconds and what they call."""
    with tempfile.TemporaryDirectory() as folder:
        calls = Path(folder) / "calls.json"
        if not in_a_fork(tests, _DAY_S, calls):
            raise SystemExit("the tests fail without a mutant")
        found = json.loads(calls.read_text("utf-8"))
    return {test: (seconds, set(called)) for test, (seconds, called) in found.items()}


def tried(
    mutants: Sequence[Mutant], chosen: Sequence[str], most_seconds: float
) -> Iterator[Mutant]:
    """Run the tests on each mutant in the current folder; yield it with its outcome.

    Args:
        mutants: What is tried, in this order.
        chosen: The tests; none stands for those of the mutants' packages.
        most_seconds: How long the tests of one mutant may take by what they took before; the quick
            ones are run, and at least one.
    """
    packages = {Path(mutant.module).parent.name for mutant in mutants}
    known = what_tests_call(chosen or sorted({path for own in packages for path in TESTS[own]}))
    for mutant in mutants:
        path = Path(mutant.module)
        changed = function_at(path, mutant.line)
        near = tuple(chosen) or TESTS[path.parent.name]
        tests = sorted(
            (seconds, test)
            for test, (seconds, called) in known.items()
            if test.startswith(near) and (changed in called if changed else touches(path, called))
        )
        totals = itertools.accumulate(seconds for seconds, _ in tests)
        tests = tests[: max(1, sum(total <= most_seconds for total in totals))]
        usual = sum(seconds for seconds, _ in tests)
        operator = cosmic_ray.plugins.get_operator(mutant.operator)()
        began = time.monotonic()
        with use_mutation(path, operator, mutant.occurrence) as (before, after):
            survived = not tests or in_a_fork(
                [test for _, test in tests], max(_LEAST_S, _PATIENCE * usual)
            )
        lines = zip(before.splitlines(), after.splitlines(), strict=True)
        yield replace(
            mutant,
            outcome="survived" if survived else "killed",
            seconds=round(time.monotonic() - began, 1),
            tests=len(tests),
            diff="\n".join(f"-{old}\n+{new}" for old, new in lines if old != new),
        )


def copy_tree(target: Path) -> None:
    """Copy what git knows and what it does not ignore, as it lies in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def table(mutants: Sequence[Mutant]) -> str:
    """Return killed and all mutants of every module, as lines."""
    total = Counter(mutant.name for mutant in mutants)
    killed = Counter(mutant.name for mutant in mutants if mutant.outcome != "survived")
    lines = [f"{name:30} {killed[name]:4} of {total[name]:4}" for name in sorted(total)]
    return "\n".join([*lines, f"{'all':30} {killed.total():4} of {total.total():4}"])


def read(record: Path) -> list[Mutant]:
    """Return the mutants of a record."""
    return [Mutant(**json.loads(line)) for line in record.read_text("utf-8").splitlines()]


def main() -> None:
    """Try a sample of mutants, or again those that survived before."""
    ask = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    ask.add_argument("--mutants", type=int, default=200, help="size of the sample; 0 for all")
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--record", type=Path, default=Path("mutants.jsonl"), help="file to write")
    ask.add_argument("--again", type=Path, help="a record whose survivors are tried once more")
    ask.add_argument("--only", nargs="*", default=[""], help="modules, such as mpc or dp/moments")
    ask.add_argument("--seconds", type=float, default=60.0, help="of tests for one mutant")
    ask.add_argument("--tests", nargs="*", default=[], help="run these, not those of the package")
    options = ask.parse_args()
    record = options.record.resolve()
    earlier = read(options.again) if options.again else []
    os.environ["OMP_NUM_THREADS"] = "1"
    # A mutant may be of the same second and size as the source, and then Python takes old bytecode.
    sys.dont_write_bytecode = True
    for library in LIBRARIES:
        __import__(library)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy_tree(Path(folder))
        os.chdir(folder)
        chosen = [mutant for mutant in earlier if mutant.outcome == "survived"]
        if not options.again:
            only = tuple(options.only)
            found = [one for one in all_mutants(options.seed) if one.name.startswith(only)]
            chosen = sample(found, options.mutants or len(found), options.seed)
            print(f"{len(chosen)} of {len(found)} places", flush=True)  # noqa: T201
        done = [mutant for mutant in earlier if mutant.outcome != "survived"]
        mutants = tried(chosen, options.tests, options.seconds)
        with record.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(mutant)) + "\n" for mutant in done)
            for number, mutant in enumerate(mutants, 1):
                done.append(mutant)
                file.write(json.dumps(asdict(mutant)) + "\n")
                file.flush()
                told = f"{mutant.name}:{mutant.line} {mutant.outcome} {mutant.seconds} s"
                print(f"{number}/{len(chosen)} {told}", flush=True)  # noqa: T201
        os.chdir(ROOT)
    for mutant in done:
        if mutant.outcome == "survived":
            print(f"\n{mutant.module}:{mutant.line}\n{mutant.diff}")  # noqa: T201
    print(f"\n{table(done)}")  # noqa: T201


if __name__ == "__main__":
    main()
