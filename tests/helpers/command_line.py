"""The ``securevfl`` command within the test's own process: its imports are paid for once."""

import re
import sys
from dataclasses import dataclass
from unittest.mock import patch

import pytest

from securevfl.cli.main import main

REPORTED = re.compile(
    r"securevfl: (warning: |links of |(about )?\d+ % of the [\d,]+ rows are linked at )"
    r"|\d+ runs?, kept in .*: tables first$"
)
"""What a run may say beside its complaint."""

PROGRESS = (
    "linking",
    "releasing rows",
    "fitting the primary alone",
    "waiting for parties",
    "epoch ",
    "done ",
    "begun: ",
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line that says what is wrong; everything else on stderr must be expected."""
        lines = self._messages
        warned = [line for line in lines if REPORTED.match(line)]
        said = [line for line in lines if line.startswith("securevfl: ") and line not in warned]
        others = [line for line in lines if line not in warned + said]
        assert all(line.startswith(PROGRESS) for line in others), self.err
        assert len(said) == 1, self.err
        assert lines[-1] == said[0], self.err
        return said[0].removeprefix("securevfl: ")

    @property
    def warnings(self) -> list[str]:
        """What the command warned of."""
        start = "securevfl: warning: "
        return [line.removeprefix(start) for line in self._messages if start in line]

    @property
    def _messages(self) -> list[str]:
        """What stands on stderr; the lines that a message is wrapped into as one."""
        return self.err.replace("\n  ", " ").splitlines()


def securevfl(capfd: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """Run the command; any exception but an exit is the test's failure."""
    capfd.readouterr()
    code: int | str | None = 0
    with patch.object(sys, "argv", ["securevfl", *map(str, arguments)]):
        try:
            main()
        except SystemExit as end:
            code = end.code
    out, err = capfd.readouterr()
    assert isinstance(code, int)
    return Ended(code=code, out=out, err=err)
