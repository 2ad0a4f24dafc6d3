"""Models on Megatron-Core: topology, body and head, and their roles: policy, reference, critic, reward model.

Import `grpo_mega.platform` and call its `start()` before importing anything of this room.
"""
