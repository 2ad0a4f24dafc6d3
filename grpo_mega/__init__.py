"""grpo_mega: GRPO on Megatron-Core, from a toy on a laptop to DeepSeek-V3 671B, on one code path."""

__version__ = "0.1.0"
