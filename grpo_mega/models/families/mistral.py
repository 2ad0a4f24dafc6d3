"""Mistral and Ministral: Llama with a sliding window in all layers, or in all but every few."""

from dataclasses import replace

from grpo_mega.models.families.family import GROUPED, SILU, WINDOW, Family

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    fields=GROUPED | WINDOW,
    fixed=SILU,
    same_as="llama",
    window="may",
)
MINISTRAL = replace(MISTRAL, name="ministral", architecture="MinistralForCausalLM", layer_types=True)
