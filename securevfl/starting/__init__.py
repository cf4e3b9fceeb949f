"""Before a first run: a federation file proposed from tables, and all that is wrong with one."""
