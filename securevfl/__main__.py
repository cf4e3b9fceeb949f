"""The ``securevfl`` command, also as ``python -m securevfl``."""

import sys

from securevfl.core import interrupts


def main() -> None:
    """Load the command line and run it; an interrupt while it loads ends it in one line too."""
    try:
        with interrupts.watch_signals():
            from securevfl.cli.main import main as run

            run()
    except KeyboardInterrupt:
        sys.stderr.write("securevfl: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
