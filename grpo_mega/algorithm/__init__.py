"""From rewards to the training signal: advantages, token weights, the objective, off-policy diagnostics.

Pure functions on tensors. This room imports only torch, the kernels that compute losses, and the types of its
arguments.
"""
