"""Tasks whose problems are made up on the spot."""
