"""What a run leaves behind and what people see of it: run directory, metrics, samples, console, logs, plot, summary."""
