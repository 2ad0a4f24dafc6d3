"""Sharded checkpoints through Megatron's dist_checkpointing: weights, optimizer, reference and the run's state."""
