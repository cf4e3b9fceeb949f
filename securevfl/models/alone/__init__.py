"""What the primary can do without partners."""
