"""Command line of securevfl."""
