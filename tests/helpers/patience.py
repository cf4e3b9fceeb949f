"""How long tests wait for what has to happen."""

PATIENCE_S = 300.0
"""Longer than anything takes on a machine with a load of 8; who waits for longer waits in vain."""

SOON_S = 60.0
"""How long, on such a machine, what happens at once may take: no deadline has come by then."""
