"""A run's report: one HTML page with its plots."""
