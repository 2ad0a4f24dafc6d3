"""Replacements for modules of Megatron-Core: packed attention, rotary, router, norms, prediction modules."""
