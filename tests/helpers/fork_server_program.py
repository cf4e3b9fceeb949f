"""The fork server of tests: that of the package, with all loaded that parties use later."""

import importlib

from securevfl.cli import fork_server_program
from securevfl.core.memory import loading


def main() -> None:
    """Load what parties of tests use; then fork as in a run."""
    with loading():
        importlib.import_module("helpers.loaded")
    fork_server_program.main()


if __name__ == "__main__":
    main()
