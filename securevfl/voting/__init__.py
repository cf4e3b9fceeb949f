"""Votes are fitted: class sums meet labels, in one process or over the star."""
