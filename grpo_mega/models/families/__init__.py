"""Families of released models, one file each, and their config.json in both directions.

To add one, write its file and name it in `FAMILIES`; CONTRIBUTING.md has the steps. Torch is not imported.
"""

from __future__ import annotations

from grpo_mega.models.families.deepseek import DEEPSEEK_V3
from grpo_mega.models.families.family import LLAMA as LLAMA_LAYERS
from grpo_mega.models.families.family import Family, Layers
from grpo_mega.models.families.gemma3 import GEMMA3
from grpo_mega.models.families.glm4_moe import GLM4_MOE
from grpo_mega.models.families.gpt_oss import GPT_OSS
from grpo_mega.models.families.kimi_k2 import KIMI_K2
from grpo_mega.models.families.llama import LLAMA
from grpo_mega.models.families.mistral import MINISTRAL, MISTRAL
from grpo_mega.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE

FAMILIES = {
    family.name: family
    for family in (LLAMA, QWEN3, QWEN2, MISTRAL, MINISTRAL, QWEN3_MOE, GLM4_MOE, DEEPSEEK_V3, KIMI_K2, GEMMA3, GPT_OSS)
}
"""transformers' `model_type` -> family. Of several that can express a model, the first names it."""
WITH_OWN_LAYERS = [family.name for family in FAMILIES.values() if family.layers != LLAMA_LAYERS]
"""Values of `model.family`: families whose layers no other settings describe."""


def layers_of(family: str | None) -> Layers:
    """How the layers of a model differ from Llama's, by its `model.family`."""
    return FAMILIES[family].layers if family else LLAMA_LAYERS


__all__ = ["FAMILIES", "WITH_OWN_LAYERS", "Family", "Layers", "layers_of"]
