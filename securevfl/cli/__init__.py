"""The command line: what users type, what they see, and how errors reach them."""
