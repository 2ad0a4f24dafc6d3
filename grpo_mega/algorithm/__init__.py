"""From rewards to the training signal: advantages, token weights, off-policy diagnostics.

Pure functions on tensors; this room imports nothing but torch.
"""
