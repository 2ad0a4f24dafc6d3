"""Weights in external formats: Hugging Face names, families, fp8 blocks, folders, and the stream to an engine."""
