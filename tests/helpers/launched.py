"""Parties that a launcher runs on this machine, found by where they print to."""

from pathlib import Path


def processes_of(out: Path) -> dict[str, int]:
    """Return the running party processes of a run folder, by party."""
    found = {}
    parties = out.resolve() / "parties"
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            log = (process / "fd" / "1").readlink()
        except OSError:
            continue
        if log.parent.parent == parties:
            found[log.parent.name] = int(process.name)
    return found
