"""``python -m securevfl``: the command line, where no script is on the path."""

from securevfl.cli.main import main

if __name__ == "__main__":
    main()
