"""Keys of several columns with metrics and weights of their own."""
