"""The life of a run: its parties in one process, or each in its own."""
