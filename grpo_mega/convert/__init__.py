"""Conversion of models: checkpoints to Hugging Face folders, with a model card, and folders to checkpoints."""
