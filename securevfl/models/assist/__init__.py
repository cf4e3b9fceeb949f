"""Assisted boosting: every secondary fits models of its own to what the primary still misses."""
