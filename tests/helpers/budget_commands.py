"""Runs commands of ``securevfl budget``, given in JSON; prints how each ended, a line each."""

import json
import sys

from typer.testing import CliRunner

from securevfl.desk.budget_command import app


def main() -> None:
    """Print exit code, output, error class and error text of each command."""
    for arguments in json.loads(sys.argv[1]):
        ended = CliRunner().invoke(app, arguments)
        error = ended.exception
        print(json.dumps([ended.exit_code, ended.stdout, type(error).__name__, str(error)]))  # noqa: T201


if __name__ == "__main__":
    main()
