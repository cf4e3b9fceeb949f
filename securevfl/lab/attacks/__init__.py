"""Attacks on the recorded views of a run's parties, each compared with a trivial guess."""
