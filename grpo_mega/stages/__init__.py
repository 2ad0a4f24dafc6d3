"""What comes before reinforcement learning: the base model, and supervised cold start."""
