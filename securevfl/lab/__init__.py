"""Experiments: comparisons, sweeps and audits; no party of a run imports them."""
