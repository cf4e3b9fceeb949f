"""Benchmark of SecretFlow's SPU: processes of a Python that has it, one round at a time."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from securevfl.core.errors import ConfigError, PartyFailedError
from securevfl.core.memory import keeping_freed_memory
from securevfl.lab.bench.variants import Measured
from securevfl.launch.spawn import reserved_port
from securevfl.mpc.codec import RingFormat

_PROGRAM: Final = Path(__file__).with_name("spu_process.py")
_CHECK_S: Final = 60.0
_INSTALLED: Final = "0.9.5"
"""The version that the benchmark was written for."""


def spu_version(python: Path) -> str:
    """Return the version of SPU that an interpreter has.

    Raises:
        ConfigError: If it is no interpreter that can be started, or has none.
    """
    try:
        done = subprocess.run(
            _command(python, "check"),
            capture_output=True,
            text=True,
            timeout=_CHECK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--spu-python {python}: cannot be run as Python ({error})") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise ConfigError(
            f"--spu-python {python}: cannot import SPU ({said:.200}); in an environment of its "
            f"own, not in that of securevfl: PYTHON -m pip install spu=={_INSTALLED}"
        )
    try:
        return str(json.loads(done.stdout.splitlines()[-1])["version"])
    except (IndexError, ValueError, KeyError, TypeError):
        raise ConfigError(f"--spu-python {python}: does not answer as Python does") from None


@contextmanager
def spu_job(
    python: Path | None, parties: int, *, keeps_memory: bool
) -> Iterator[dict[str, Any] | None]:
    """Yield the SPU settings of all parties, None without SPU; ports are held until the end.

    Args:
        python: An interpreter that has SPU, or None.
        parties: Secondaries.
        keeps_memory: Whether its processes keep freed memory, as ours then do.

    Raises:
        ConfigError: See :func:`spu_version`.
    """
    if python is None:
        yield None
        return
    version = spu_version(python)
    ours = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=parties)
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(2 * parties + 1)]
        yield {
            "python": str(python),
            "version": version,
            "parties": parties,
            "keeps_memory": keeps_memory,
            "fraction_bits": ours.precision_bits,
            "ports": ports[: parties + 1],
            "node_ports": ports[parties + 1 :],
        }


class SpuProcess:
    """One process of SPU."""

    def __init__(self, folder: Path, job: Mapping[str, Any], name: str, *arguments: str) -> None:
        """Start it without waiting for it.

        Args:
            folder: The benchmark's, with every party's numbers.
            job: What :func:`spu_job` says.
            name: Of its log.
            arguments: Which of the processes it is.
        """
        self._log = folder / f"spu-{name}.txt"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                _command(Path(job["python"]), arguments[0], str(folder), *arguments[1:]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **(keeping_freed_memory() if job["keeps_memory"] else {})},
            )

    def wait_until_ready(self) -> None:
        """Wait until all that is made once is there.

        Raises:
            PartyFailedError: If it ended; its last lines are in the message.
        """
        self._read()

    def round(self) -> Measured:
        """Run a round.

        Raises:
            PartyFailedError: If it ended; its last lines are in the message.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed() from None
        return Measured(**self._read())

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # SPU's own log comes this way too.
            if line.startswith("{"):
                return json.loads(line)
        raise self._failed()

    def _failed(self) -> PartyFailedError:
        tail = self._log.read_text(errors="replace").strip()[-1000:]
        return PartyFailedError(f"a process of SPU ended: {tail}")


class SpuPeer:
    """One party's processes of SPU."""

    def __init__(self, folder: Path, job: Mapping[str, Any], rank: int) -> None:
        self._party = SpuProcess(folder, job, str(rank), "party", str(rank))
        # What all parties do inside one process is measured by the primary.
        self._one = SpuProcess(folder, job, "one", "one") if rank == 0 else None

    def wait_until_ready(self) -> None:
        """Wait until all that is made once is there.

        Raises:
            PartyFailedError: If a process ended.
        """
        for process in filter(None, (self._party, self._one)):
            process.wait_until_ready()

    def between_processes(self) -> Measured:
        """Take part in a round over SPU's link.

        Raises:
            PartyFailedError: If the process ended.
        """
        return self._party.round()

    def in_one_process(self) -> Measured:
        """Run a round of all parties in one process; only the primary has something to do.

        Raises:
            PartyFailedError: If the process ended.
        """
        if self._one is None:
            return Measured()
        return self._one.round()

    def close(self) -> None:
        """End its processes."""
        for process in filter(None, (self._party, self._one)):
            process.close()


def _command(python: Path, *arguments: str) -> list[str]:
    # Isolated: neither our folders nor our PYTHONPATH reach an interpreter of other versions.
    return [os.fspath(python), "-I", os.fspath(_PROGRAM), *arguments]
