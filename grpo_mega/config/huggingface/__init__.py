"""Hugging Face model folders as settings: the words of their config.json, and the architecture that it gives."""
