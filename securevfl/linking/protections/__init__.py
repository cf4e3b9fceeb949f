"""How keys are hidden while they are compared: a protection is a file, and a line in ``table``."""
