"""The authenticated star between parties: it carries messages and knows nothing of learning."""
