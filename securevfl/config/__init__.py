"""The federation file: what it may say, and which of its parts go together."""
