"""Weights as the world calls them: Hugging Face names, families, fp8 blocks, folders, and the stream to an engine."""
