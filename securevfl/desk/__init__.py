"""What stands before and after a run, and no party needs while it runs."""
