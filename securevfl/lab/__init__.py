"""Experiments: comparisons, sweeps, audits and benchmarks; no party of a run imports them."""
