"""Models in and out: checkpoints become Hugging Face folders, with a model card, and folders become checkpoints."""
