"""Outputs of a run: run directory, metrics, samples, console, logs, plot, summary."""
