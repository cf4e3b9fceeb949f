"""Assisted boosting: secondaries fit their own models to the primary's residuals."""
