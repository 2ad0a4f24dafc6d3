"""One set of GPUs for training and generation: what passes between the two."""
