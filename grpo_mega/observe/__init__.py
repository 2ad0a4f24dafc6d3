"""What a run writes and shows: run directory, metrics, samples, console, logs, plot, summary."""
