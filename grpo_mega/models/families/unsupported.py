"""Known kinds of Hugging Face models that are refused, each with its reason."""

from __future__ import annotations

_PICTURES = "it sees pictures, and its text model is stored within"
_LINEAR = "most of its layers have linear attention"
_GATED_DELTA = (
    "three of four layers have linear attention, which in megatron-core 0.16 refuses packed sequences, generation "
    "and context parallelism"
)
_STATES = "most of its layers are state space models, without attention"
_PLAIN_MLP = "its norms are layer norms, and its feed-forward layers have no gate"
_CODE = "it comes with code of its own, which is not run"
_INDEXED = "its attention chooses the tokens that it sees by an index"
_AFTER = "its norms come after attention and feed-forward layers only"
_SIDE_BY_SIDE = "its layers run attention and feed-forward side by side"
_PAIRS = "its rotary channels are in pairs side by side"
_SCALED = "embeddings, residuals and logits are scaled"
_NO_TEST = "it may compute as one of the supported does, but nothing tests that"
REASONS = {
    "afmoe": "its attention has an output gate",
    "apertus": "its feed-forward layers have no gate",
    "arcee": "its feed-forward layers have no gate",
    "bailing": _CODE,
    "bailing_hybrid": _LINEAR,
    "bamba": _STATES,
    "bloom": _PLAIN_MLP,
    "chatglm": _CODE,
    "codegen": _PLAIN_MLP,
    "cohere": _SIDE_BY_SIDE,
    "cohere2": _SIDE_BY_SIDE,
    "dbrx": "its norms are layer norms, and its projections are stored fused",
    "deepseek_v2": "its router has softmax scores that are not normalised",
    "deepseek_v32": _INDEXED,
    "deepseek_v4": _INDEXED,
    "deepseek_vl": _PICTURES,
    "dots1": _NO_TEST,
    "ernie4_5": _PAIRS,
    "ernie4_5_vl": _PICTURES,
    "exaone": _CODE,
    "exaone4": _AFTER,
    "exaone_moe": _AFTER,
    "falcon": _PLAIN_MLP,
    "falcon_h1": "its layers have state space models beside attention",
    "falcon_mamba": _STATES,
    "flex_olmo": "norms on queries and keys span all heads",
    "gemma": "its layers have norms before attention and feed-forward only",
    "gemma2": "its attention logits and logits are capped",
    "gemma3": _PICTURES,
    "gemma3n": "its layers have embeddings of their own, and some share keys and values",
    "gemma4": "its layers with and without a window have heads of other sizes",
    "glm": f"{_PAIRS}, and gate and up projections are stored fused",
    "glm4": f"{_PAIRS}, and gate and up projections are stored fused",
    "glm4_moe_lite": "its config.json has other words for what DeepSeek-V3 is, which are not read",
    "glm4v": _PICTURES,
    "glm5": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "gpt2": _PLAIN_MLP,
    "gpt_bigcode": _PLAIN_MLP,
    "gpt_neo": _PLAIN_MLP,
    "gpt_neox": _PLAIN_MLP,
    "gptj": _PLAIN_MLP,
    "granite": _SCALED,
    "granitemoe": _SCALED,
    "granitemoehybrid": _SCALED,
    "granitemoeshared": _SCALED,
    "helium": _PAIRS,
    "hunyuan": "norms on queries and keys come after the positions",
    "internlm2": _CODE,
    "internlm3": _NO_TEST,
    "jamba": _STATES,
    "kimi": _CODE,
    "kimi_k25": _PICTURES,
    "kimi_linear": "three of four layers have linear attention",
    "kimi_vl": _PICTURES,
    "lfm2": "many of its layers are convolutions",
    "lfm3": "many of its layers are convolutions",
    "llama4": "its attention is in chunks, without positions in every fourth layer",
    "llava": _PICTURES,
    "longcat": "each of its layers has two attentions, and some of its experts compute nothing",
    "mamba": _STATES,
    "mimo": _CODE,
    "mimo_v2": "it has attention sinks, and values with fewer channels than keys",
    "minicpm": _SCALED,
    "minicpm3": _SCALED,
    "minimax": "seven of eight layers have linear attention",
    "minimax_m2": "norms on queries and keys span all heads, and no shared expert is there",
    "minimax_m3": _PICTURES,
    "ministral3": "its queries are scaled by position",
    "mistral3": _PICTURES,
    "mistral4": "its attention and experts are others",
    "mistral_large": "its attention and experts are others",
    "mixtral": "its experts' weights have other names",
    "mllama": _PICTURES,
    "mpt": _PLAIN_MLP,
    "nemotron": "its feed-forward layers have no gate",
    "nemotron_h": _STATES,
    "olmo": "its norms have no weights",
    "olmo2": f"{_AFTER}, and those of queries and keys span all heads",
    "olmo3": f"{_AFTER}, and those of queries and keys span all heads",
    "olmo_hybrid": _LINEAR,
    "olmoe": "norms on queries and keys span all heads",
    "opt": _PLAIN_MLP,
    "paligemma": _PICTURES,
    "phi": f"{_SIDE_BY_SIDE}, without a gate",
    "phi3": "its projections are stored fused",
    "phi4": _PICTURES,
    "phimoe": "its norms are layer norms, and its router samples",
    "qwen": _CODE,
    "qwen2_audio": "it hears sound, and its text model is stored within",
    "qwen2_moe": "its shared expert has a gate",
    "qwen2_vl": "it sees pictures, and its positions have three axes",
    "qwen2_5_vl": "it sees pictures, and its positions have three axes",
    "qwen2_5_omni": "it sees pictures, and its positions have three axes",
    "qwen3_5": _GATED_DELTA,
    "qwen3_next": _GATED_DELTA,
    "qwen3_omni": "it sees pictures, and its positions have three axes",
    "qwen3_vl": "it sees pictures, and its positions have three axes",
    "qwen4": _LINEAR,
    "recurrent_gemma": "most of its layers are recurrent",
    "rwkv": "it has no attention",
    "seed_oss": _NO_TEST,
    "smollm3": "every fourth layer has no positions",
    "solar_open": _NO_TEST,
    "stablelm": "its norms are layer norms",
    "starcoder2": _PLAIN_MLP,
    "t5gemma": "an encoder comes before it",
    "vaultgemma": "its layers have norms before attention and feed-forward only",
    "zamba": _STATES,
}
"""`model_type`, or its prefix -> reason why such a model is not supported."""


def why_not(kind: str) -> str | None:
    """The reason why a `model_type` is not supported; None when it is not a known one."""
    words = kind.split("_")
    begins = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((REASONS[begin] for begin in begins if begin in REASONS), None)
