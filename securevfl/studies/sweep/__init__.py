"""One federation file under many settings: grids, and searches by validation rows."""
