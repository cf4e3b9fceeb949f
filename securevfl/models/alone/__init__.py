"""Local baseline: the best model of the primary without partners, and the gain over it."""
