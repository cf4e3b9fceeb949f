"""``python -m securevfl``: the command line, where no script is on the path."""

from securevfl.cli.main import main

main()
