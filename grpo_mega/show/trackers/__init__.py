"""Sends the metrics of a run to trackers and to Prometheus."""
