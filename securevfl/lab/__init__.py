"""Experiments: comparisons and audits; no party of a run imports them."""
