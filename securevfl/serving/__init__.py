"""HTTP API of a saved model: predictions of rows, within the ledgers."""
