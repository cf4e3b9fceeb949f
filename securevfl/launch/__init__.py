"""Starting one process per party on this machine, and what became of each."""
