"""Methods side by side in the simulator."""
