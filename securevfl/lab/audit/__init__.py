"""Audits of the installed privacy mechanisms."""
