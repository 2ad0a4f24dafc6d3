"""Hugging Face model folders as settings: the vocabulary of their config.json, and the architecture in it."""
