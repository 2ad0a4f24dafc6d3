"""Reads the traces of a run: lanes, and who waits for whom."""
