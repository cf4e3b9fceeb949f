"""Attacks on what the parties of a run have recorded, each next to a trivial guess."""
