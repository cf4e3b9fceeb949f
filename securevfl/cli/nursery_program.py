"""The program that loads what every party needs, and forks parties for the launcher."""

from securevfl.core.memory import loading
from securevfl.launch.nursery import fork_children


def main() -> None:
    """Load, then fork; in each child, run the command line that the launcher gives."""
    with loading():
        # What a party with a table loads in any case; the rest each loads for itself.
        from securevfl.cli.main import main as run
    fork_children(run)


if __name__ == "__main__":
    main()
