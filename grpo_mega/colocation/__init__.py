"""Trainer and engine share devices in turns: whose turn it is, who holds which memory, which weights pass over."""
