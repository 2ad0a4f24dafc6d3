"""Stages of a run, one algorithm per file: pre-training of the toy, supervised fine-tuning, GRPO and others."""
