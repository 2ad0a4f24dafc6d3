"""Llama 2 and 3: what the other families differ from."""

from grpo_mega.models.families.family import GROUPED, SILU, Family

LLAMA = Family(name="llama", architecture="LlamaForCausalLM", fields=GROUPED, fixed=SILU | {"mlp_bias": False})
