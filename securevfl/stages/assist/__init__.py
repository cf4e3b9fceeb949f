"""Assisted boosting: residuals in the place of gradients."""
