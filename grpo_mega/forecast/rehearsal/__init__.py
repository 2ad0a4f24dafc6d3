"""Rehearses a rank of a job on a GPU that computes nothing: everything above the driver is real (docs/gpu.md)."""
