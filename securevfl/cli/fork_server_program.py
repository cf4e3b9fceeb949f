"""Program that loads the parties' common modules, and forks parties for the launcher."""

from securevfl.core.memory import loading
from securevfl.launch.fork_server import fork_children


def main() -> None:
    """Load, then fork; in each child, run the command line that the launcher gives."""
    with loading():
        # What a party with a table loads in any case; the rest each loads for itself. Nothing here
        # is used by name, and tests/architecture/test_loading.py sees that it is loaded.
        import securevfl.desk.command_results
        import securevfl.runtime.primary_party
        import securevfl.runtime.run_tables
        import securevfl.runtime.secondary_party  # noqa: F401
        from securevfl.cli.main import main as run
    fork_children(run)


if __name__ == "__main__":
    main()
