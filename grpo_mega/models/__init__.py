"""The policy on Megatron-Core: topology, model, log-probs, updates, reference.

Import `grpo_mega.platform` and call `start()` before anything of this room.
"""
