"""The ledger of a table: its chain of lines, limits, countersignatures, and what it adds up to."""
