"""Shows a run: on the console, as a page (`report/`), in traces, to trackers. The trainer imports none of it."""
