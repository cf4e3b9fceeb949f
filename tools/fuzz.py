"""Give every decoder of wire and file inputs that nobody would write, and say what breaks.

    python tools/fuzz.py                                  # all targets, 100,000 inputs each
    python tools/fuzz.py frames messages --inputs 1000000
    python tools/fuzz.py frames --engine atheris          # guided by coverage, once it is installed
    python tools/fuzz.py --again found/frames-1           # one input that broke something

Targets are those of ``tests/helpers/fuzzing``; ``tests/property/fuzz`` runs each of them briefly.
Each runs in a process of its own, which may not take more than 4 GiB beyond what it begins with: a
crash of native code ends that process alone, and one that is stuck for a minute is ended. What
broke lies in the folder ``found``, one input for each kind of break and place; figures, a line a
target, are appended to the record.
"""

import argparse
import json
import mmap
import os
import resource
import struct
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

NAMES: Final = (
    *("frames", "messages", "federation", "source", "ledger", "counts"),
    *("state", "links", "model"),
    *("text-tables", "columnar-tables", "http"),
)
_HEAD: Final = struct.Struct("<QQQ")
_PLACE: Final = 1 << 18
_STUCK_S: Final = 60
_MORE_BYTES: Final = 4 << 30


class Track:
    """What a process is at: how many inputs it had, how many were taken, and the last one."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_HEAD.size + _PLACE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def begin(self, count: int, taken: int, data: bytes) -> None:
        """Note an input before it is read."""
        _HEAD.pack_into(self._map, 0, count, taken, len(data))
        self._map[_HEAD.size : _HEAD.size + len(data)] = data

    def now(self) -> tuple[int, int, bytes]:
        """Return what is noted."""
        count, taken, length = _HEAD.unpack_from(self._map)
        return count, taken, self._map[_HEAD.size : _HEAD.size + length]


class Finder:
    """Reads inputs of one target and keeps the first that breaks at each place."""

    def __init__(self, name: str, found: Path) -> None:
        from helpers.fuzzing.target import forget_peak
        from helpers.fuzzing.targets import TARGETS

        self.target = TARGETS[name]
        self._found = found
        self._track = Track(found / f"{name}.track")
        self._count, self._taken, _ = self._track.now()
        self._places = {path.read_text() for path in found.glob(f"{name}-*.txt")}
        for data in self.target.seeds():
            self.target.check(data)
        forget_peak()
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + _MORE_BYTES, size + _MORE_BYTES))

    def read(self, data: bytes) -> None:
        """Read one input."""
        self._count += 1
        self._track.begin(self._count, self._taken, data)
        try:
            self._taken += self.target.check(data)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            self._keep(data, error)

    def _keep(self, data: bytes, error: Exception) -> None:
        places = [
            f"{one.filename}:{one.lineno}" for one in traceback.extract_tb(error.__traceback__)
        ]
        own = [place for place in places if "/securevfl/" in place] or places
        text = f"{type(error).__name__} at {own[-1].removeprefix(f'{ROOT}/')}"
        if text not in self._places:
            self._places.add(text)
            _keep(self._found, self.target.name, data, text)


def _keep(found: Path, name: str, data: bytes, text: str) -> None:
    number = 1 + len(list(found.glob(f"{name}-*.txt")))
    (found / f"{name}-{number}").write_bytes(data)
    (found / f"{name}-{number}.txt").write_text(text)
    sys.stderr.write(f"{name}: {text}: found/{name}-{number}\n")


def _at_random(finder: Finder, *, seed: int, count: int) -> None:
    from helpers.fuzzing.engine import inputs

    for data in inputs(finder.target, seed=seed, count=count):
        finder.read(data[:_PLACE])


def _by_coverage(name: str, found: Path, *, seed: int, count: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["securevfl"]):
        finder = Finder(name, found)
    from helpers.fuzzing.engine import mutated

    corpus = found / f"{name}.corpus"
    corpus.mkdir(exist_ok=True)
    for number, data in enumerate(finder.target.seeds()):
        (corpus / f"seed-{number}").write_bytes(data)

    def altered(data: bytes, most: int, number: int) -> bytes:
        return mutated(finder.target, bytes(data), Random(number))[:most]  # noqa: S311

    options = [
        f"-runs={count}",
        f"-seed={seed}",
        "-max_len=65536",
        "-rss_limit_mb=0",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], finder.read, custom_mutator=altered)
    atheris.Fuzz()


def _child(asked: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    (name,) = asked.targets
    if asked.engine == "atheris":
        _by_coverage(name, asked.found, seed=asked.seed, count=asked.inputs)
    else:
        _at_random(Finder(name, asked.found), seed=asked.seed, count=asked.inputs)


def _run(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Run one target to its end; a process that dies or is stuck is a finding, and begun again."""
    found: Path = asked.found
    (found / f"{name}.track").unlink(missing_ok=True)
    track, began, seed = Track(found / f"{name}.track"), time.monotonic(), asked.seed
    until = began + 60 * asked.minutes
    deaths = 0
    while deaths < 10:
        left = asked.inputs - track.now()[0]
        command = [sys.executable, __file__, name, "--child", "--engine", asked.engine]
        command += ["--seed", str(seed), "--inputs", str(left), "--found", str(found)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment) as process:
            why = _watched(process, track, until)
        if why is None:
            break
        _keep(found, name, track.now()[2], why)
        deaths, seed = deaths + 1, seed + 1
    count, taken, _ = track.now()
    return {
        "target": name,
        "engine": asked.engine,
        "seed": asked.seed,
        "inputs": count,
        "taken": taken,
        "seconds": round(time.monotonic() - began),
        "found": len(list(found.glob(f"{name}-*.txt"))),
    }


def _watched(process: "subprocess.Popen[bytes]", track: Track, until: float) -> str | None:
    """Wait for a process; return what became of it, None if it came to its end."""
    last, since = -1, time.monotonic()
    while True:
        try:
            code = process.wait(1)
        except subprocess.TimeoutExpired:
            count, now = track.now()[0], time.monotonic()
            if count != last:
                last, since = count, now
            if now < until and (now - since < _STUCK_S or count == 0):
                continue
            process.kill()
            process.wait()
            return None if now >= until else "stuck in native code"
        return None if code == 0 else f"ended with {code}"


def _again(path: Path) -> None:
    from helpers.fuzzing.targets import TARGETS

    target = TARGETS[path.name.rpartition("-")[0]]
    sys.stdout.write(f"{'taken' if target.check(path.read_bytes()) else 'refused'}\n")


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--inputs", type=int, default=100_000, help="for each target")
    parser.add_argument("--minutes", type=float, default=600.0, help="for each target, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("random", "atheris"), default="random")
    parser.add_argument("--found", type=Path, default=Path("found"), help="folder of what broke")
    parser.add_argument("--record", type=Path, default=Path("fuzz.jsonl"), help="file of figures")
    parser.add_argument("--again", type=Path, help="an input of that folder")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    unknown = set(asked.targets) - set(NAMES)
    if unknown:
        parser.error(f"no such target: {min(unknown)}; there are {', '.join(NAMES)}")
    asked.found.mkdir(exist_ok=True)
    return asked


def _figures(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in asked.targets or NAMES:
        figures = _run(name, asked)
        with asked.record.open("a", encoding="utf-8") as record:
            record.write(f"{json.dumps(figures)}\n")
        yield figures


def main() -> int:
    """Return 1 if anything broke."""
    asked = _asked()
    if asked.again is not None:
        _again(asked.again)
        return 0
    if asked.child:
        _child(asked)
        return 0
    broken = 0
    for figures in _figures(asked):
        broken += figures["found"]
        sys.stdout.write(
            "{target}: {inputs} inputs in {seconds} s, {taken} taken, {found} broke\n".format(
                **figures
            )
        )
        sys.stdout.flush()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
