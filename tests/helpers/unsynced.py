"""Files of tests are not synced: no test cuts the power, and what a killed process wrote stays."""

import os


def skip_fsync() -> None:
    """Let ``os.fsync`` do nothing in this process: a run of three parties calls it 50 times."""
    setattr(os, "fsync", _do_nothing)  # noqa: B010


def _do_nothing(_handle: int) -> None:
    pass
