"""Benchmarks of SplitAvg between processes."""
