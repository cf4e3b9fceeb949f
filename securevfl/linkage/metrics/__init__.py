"""Metrics: how far two keys are apart. Each has a file here and a line in :mod:`.table`."""
