"""Local baseline: the primary's best model without partners, and the gain over it."""
