"""The console of a run, on a terminal and off it."""
