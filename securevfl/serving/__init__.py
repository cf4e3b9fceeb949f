"""A kept model behind an HTTP API: rows in, predictions out, within the ledgers."""
