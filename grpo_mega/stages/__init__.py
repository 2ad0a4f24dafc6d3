"""One algorithm a file, each a `Stage` of a run: pre-training of the toy, supervised fine-tuning, GRPO."""
