"""The fork server of tests: that of the package, with all loaded that parties use later."""

import importlib
from unittest.mock import patch

from helpers.forked_programs import or_program

from securevfl.cli import fork_server_program
from securevfl.core.memory import loading
from securevfl.launch.fork_server import fork_children


def main() -> None:
    """Load what parties of tests use; then fork as in a run, or a program."""
    with loading():
        importlib.import_module("helpers.loaded")
    with patch.object(
        fork_server_program, "fork_children", lambda run: fork_children(or_program(run))
    ):
        fork_server_program.main()


if __name__ == "__main__":
    main()
