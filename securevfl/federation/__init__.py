"""One round between parties: what is released, what protects it, what is learned from it."""
