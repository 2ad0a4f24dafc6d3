"""What tests/parity runs: models, layouts, and which of them together on how many processes. Megatron is not needed.

A case is MODEL:LAYOUT; MODEL:single is the one process that the model's other cases are compared with.
"""

from dataclasses import replace

from grpo_mega.config.schema import (
    AlgorithmConfig,
    LayoutConfig,
    Llama3RopeConfig,
    LoRAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    PartConfig,
    PartsConfig,
    YarnConfig,
)

DENSE = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, ffn_hidden=128, context=64, init_std=0.1)
MOE = replace(DENSE, moe=MoEConfig(experts=4, top_k=2, ffn_hidden=32, shared_ffn_hidden=32, first_dense=1))
LATENT = dict(attention="mla", kv_heads=4, mla=MLAConfig(16, 16, 8, 8, 8), qk_norm=True)
LATENT_MOE = replace(MOE, **LATENT)
FROZEN = dict(bias_update_rate=0.0, frozen_bias=True)
MLA = replace(LATENT_MOE, yarn=YarnConfig(factor=4, original_context=16, beta_fast=2, beta_slow=0.1))
GEMMA = replace(
    DENSE, layers=4, family="gemma3_text", qk_norm=True, tie_embeddings=True, window=4, full_every=2,
    window_rope_base=100, query_pre_attn_scalar=30,
)  # fmt: skip
GPT_OSS = replace(
    DENSE, layers=4, ffn_hidden=32, family="gpt_oss", qkv_bias=True, window=5, full_every=2, rope_base=100,
    moe=MoEConfig(experts=4, top_k=2, ffn_hidden=32, score="softmax", bias_update_rate=0.0),
    yarn=YarnConfig(factor=4, original_context=16, beta_fast=1.5, beta_slow=0.2, truncate=False),
)  # fmt: skip
DEEPSEEK = replace(LATENT_MOE, layers=4, moe=replace(MOE.moe, groups=2, group_top_k=1))
MODELS = {
    "dense": DENSE,
    "tied": replace(DENSE, tie_embeddings=True, qk_norm=True),
    "biased": replace(DENSE, qkv_bias=True),
    "llama3": replace(DENSE, rope_base=100, llama3_rope=Llama3RopeConfig(4, 16, 0.2, 1.5), tie_embeddings=True),
    "glm": replace(MOE, qkv_bias=True, qk_norm=True, rope_fraction=0.5, mtp_layers=1),
    "window": replace(DENSE, window=5, full_every=2),
    "gemma": GEMMA,
    "gpt_oss": GPT_OSS,
    "latent": replace(DENSE, **LATENT),
    "moe": MOE,
    "mla": MLA,
    "moonlight": replace(LATENT_MOE, mla=replace(LATENT_MOE.mla, q_lora_rank=None)),
    "padded": replace(
        LATENT_MOE,
        qk_norm=False,
        mla=replace(LATENT_MOE.mla, q_lora_rank=None),
        vocab_multiple=64,
        moe=replace(MOE.moe, **FROZEN),
    ),
    "deepseek": DEEPSEEK,
    "kimi_k2": replace(MLA, moe=replace(MOE.moe, experts=12, top_k=4, scaling=2.827, **FROZEN)),
    "mtp": replace(DEEPSEEK, mtp_layers=1, mtp_loss_coef=0.1, moe=replace(DEEPSEEK.moe, aux_loss_coef=0.1)),
    "replayed": replace(MOE, layers=4, mtp_layers=1, mtp_loss_coef=0.1, moe=replace(MOE.moe, aux_loss_coef=0.1)),
    "dense_mtp2": replace(DENSE, mtp_layers=2, mtp_loss_coef=0.5),
    "balanced": replace(MOE, moe=replace(MOE.moe, aux_loss_coef=0.5, z_loss_coef=0.05)),
    "dense_gspo": DENSE,
    "dense_cispo": DENSE,
    "dense_gmpo": DENSE,
    "dense_vespo": DENSE,
    "dense_gspo_token": DENSE,
    "dense_process": DENSE,
    "dense_masked": DENSE,
    "dense_bf16": replace(DENSE, dtype="bf16"),
    "deepseek_bf16": replace(DEEPSEEK, dtype="bf16"),
    "tied_parts": replace(DENSE, tie_embeddings=True),
    "moe_parts": MOE,
    "tied_frozen": replace(DENSE, tie_embeddings=True, qk_norm=True),
    "mtp_frozen": replace(DEEPSEEK, mtp_layers=1, moe=replace(DEEPSEEK.moe, bias_update_rate=0.0, frozen_bias=True)),
    "head_only": DENSE,
    "dense_lora": replace(DENSE, tie_embeddings=True, qkv_bias=True),
    "moe_lora": replace(MOE, moe=replace(MOE.moe, **FROZEN, aux_loss_coef=0.1)),
    "mla_lora": replace(MLA, moe=replace(MOE.moe, **FROZEN)),
    "gpt_oss_lora": GPT_OSS,
    "gpt_oss_experts_lora": GPT_OSS,
    "mtp_lora": replace(DEEPSEEK, mtp_layers=1, moe=replace(DEEPSEEK.moe, **FROZEN)),
}
LORA = {name: LoRAConfig(rank=4, alpha=6.0) for name in MODELS if name.endswith("_lora")}
"""Of the models that have adapters: nothing else of these is trained."""
# peft has no adapters of its experts: those of attention alone can be exported, those of all cannot.
LORA["gpt_oss_lora"].targets = ["attention"]
WITHOUT_PEFT = ("gpt_oss_experts_lora",)
"""Models whose adapters `peft` cannot load."""
FROZEN_PARTS = {
    "tied_frozen": ["embedding"],
    "mtp_frozen": ["embedding", "router", "norms"],
    "head_only": ["embedding", "attention", "mlp", "norms"],
}
"""Parts of these models that are not trained."""
PARTS = {
    "tied_parts": PartsConfig(embedding=PartConfig(0.3, 0.0), norms=PartConfig(2.0), mlp=PartConfig(1.0, 0.5)),
    "moe_parts": PartsConfig(
        embedding=PartConfig(0.5, 0.0), head=PartConfig(0.5), router=PartConfig(3.0), experts=PartConfig(2.0, 0.3)
    ),
}
"""How the optimizer treats parts of these models."""
LAYOUTS = {
    "single": LayoutConfig(),
    "small": LayoutConfig(micro_batch_tokens=70),
    "recompute": LayoutConfig(recompute="full", micro_batch_tokens=100),
    "selective": LayoutConfig(recompute="selective"),
    "tp2": LayoutConfig(tp=2),
    "tp2sp": LayoutConfig(tp=2, sp=True),
    "tp2recompute": LayoutConfig(tp=2, sp=True, recompute="full"),
    "tp4": LayoutConfig(tp=4, sp=True),
    "tp2etp2": LayoutConfig(tp=2, sp=True, etp=2),
    "tp4etp4": LayoutConfig(tp=4, sp=True, etp=4),
    "tp2ep2": LayoutConfig(tp=2, sp=True, ep=2),
    "tp2ep2zero": LayoutConfig(tp=2, sp=True, ep=2),
    "tp2ep4": LayoutConfig(tp=2, sp=True, ep=4),
    "tp2pp2": LayoutConfig(tp=2, pp=2, sp=True),
    "tp2vpp2": LayoutConfig(tp=2, pp=2, vpp=2, sp=True),
    "tp2dp2": LayoutConfig(tp=2, sp=True),
    "tp2dp2zero": LayoutConfig(tp=2, sp=True, micro_batch_tokens=100),
    "pp2": LayoutConfig(pp=2),
    "pp2small": LayoutConfig(pp=2, micro_batch_tokens=70),
    "pp2uneven": LayoutConfig(pp=2, last_stage_layers=1),
    "pp2dp2zero": LayoutConfig(pp=2, micro_batch_tokens=100),
    "pp4": LayoutConfig(pp=4, micro_batch_tokens=100),
    "vpp2": LayoutConfig(pp=2, vpp=2, micro_batch_tokens=150),
    "vpp2recompute": LayoutConfig(pp=2, vpp=2, recompute="full", micro_batch_tokens=100),
    "vpp2zero": LayoutConfig(pp=2, vpp=2, micro_batch_tokens=100),
    "cp2": LayoutConfig(cp=2),
    "cp2small": LayoutConfig(cp=2, micro_batch_tokens=70),
    "cp2one": LayoutConfig(cp=2, micro_batch_tokens=1),
    "cp2zero": LayoutConfig(cp=2),
    "cp2tp2": LayoutConfig(cp=2, tp=2, sp=True),
    "cp2pp2": LayoutConfig(cp=2, pp=2),
    "cp2ep2": LayoutConfig(cp=2, ep=2),
    "cp4": LayoutConfig(cp=4),
    "cp4ep4": LayoutConfig(cp=4, ep=4),
    "flash": LayoutConfig(attention="torch", micro_batch_tokens=100),
    "flashselective": LayoutConfig(attention="torch", recompute="selective"),
    "pp2flash": LayoutConfig(pp=2, attention="torch", recompute="full", micro_batch_tokens=100),
    "cp2flash": LayoutConfig(cp=2, attention="torch", micro_batch_tokens=150),
    "cp2tp2flash": LayoutConfig(cp=2, tp=2, sp=True, attention="torch"),
    "cp4flash": LayoutConfig(cp=4, attention="torch"),
    "dp2": LayoutConfig(micro_batch_tokens=100),
    "dp2zero": LayoutConfig(micro_batch_tokens=100),
    "ep2": LayoutConfig(ep=2),
    "ep2zero": LayoutConfig(ep=2, micro_batch_tokens=100),
    "ep2pp2": LayoutConfig(ep=2, pp=2),
    "ep2dp4": LayoutConfig(ep=2),
    "ep4zero": LayoutConfig(ep=4),
}
# A large epsilon keeps Adam's first steps smooth: with a small one they hang on the sign of gradients near 0.
OPTIMIZER = OptimizerConfig(lr=0.01, eps=0.01, weight_decay=0.1, clip_grad=0.5)
OBJECTIVE = AlgorithmConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0, kl_coef=0.1)
OBJECTIVES = {
    # No sequence's ratio is within 0.003 of a bound: rounding moves none across.
    "dense_gspo": AlgorithmConfig(objective="gspo", clip_low=0.1, clip_high=0.0005, entropy_coef=0.1),
    "dense_gmpo": AlgorithmConfig(objective="gmpo", clip_low=0.2, clip_high=0.3, kl_coef=0.1, kl_unbiased=True),
    # Half the defaults' k and lambda: half the rounding of a sequence's summed log-probs reaches the factor's exponent.
    # With an entropy term of 0.1 the loss would be nearly cancelled, 69 times smaller than the sum of its terms' sizes.
    "dense_vespo": AlgorithmConfig(
        objective="vespo",
        vespo_k_pos=1.0,
        vespo_lambda_pos=1.5,
        vespo_k_neg=1.5,
        vespo_lambda_neg=1.0,
        entropy_coef=0.3,
    ),
    "dense_gspo_token": AlgorithmConfig(objective="gspo_token", clip_low=0.1, clip_high=0.01, supervision="process"),
    "dense_process": AlgorithmConfig(clip_low=0.2, clip_high=0.28, kl_coef=0.1, supervision="process"),
    "dense_masked": AlgorithmConfig(off_policy_mask=0.02, correction="truncate", correction_floor=0.9),
    "dense_cispo": AlgorithmConfig(objective="cispo", kl_coef=0.1, correction="mask", correction_cap=1.1),
}

_EXACT = {
    1: """
        dense:small dense_gspo:small moe:small mla:small balanced:small replayed:small
        moe:recompute moe:selective mtp:recompute gpt_oss:small gpt_oss:selective
        dense:flash mla:flash gemma:flash replayed:flash gpt_oss:flashselective
    """,
    2: """
        dense:tp2 dense:tp2sp dense:pp2 dense:pp2small dense:dp2 dense:cp2 dense:dp2zero dense:cp2zero
        tied:tp2 tied:tp2sp tied:pp2 tied:dp2 tied:cp2
        biased:tp2sp biased:pp2 biased:cp2 biased:dp2zero llama3:tp2sp llama3:cp2 glm:tp2sp glm:cp2 glm:ep2zero
        gpt_oss:tp2sp gpt_oss:tp2ep2 gpt_oss:tp2ep2zero gpt_oss:pp2small gpt_oss:vpp2recompute gpt_oss:ep2zero
        gpt_oss:cp2small gpt_oss:dp2 gpt_oss_lora:tp2ep2
        gpt_oss_experts_lora:tp2ep2 gpt_oss_experts_lora:ep2
        window:cp2 window:pp2small gemma:tp2 gemma:tp2sp gemma:cp2small gemma:vpp2 gemma:cp2zero
        dense_gspo:tp2sp dense_gspo:pp2small dense_gspo:cp2 dense_cispo:cp2small dense_cispo:dp2zero
        dense_gmpo:cp2small dense_vespo:cp2small dense_gspo_token:tp2sp dense_gspo_token:cp2 dense_masked:cp2
        dense_process:cp2small dense_process:pp2small dense_process:tp2sp
        latent:tp2sp latent:pp2 latent:cp2 latent:dp2zero
        moe:tp2sp moe:tp2etp2 moe:pp2 moe:pp2small moe:ep2 moe:dp2 moe:tp2ep2 moe:tp2ep2zero moe:cp2small moe:cp2one
        mla:tp2sp mla:pp2 mla:ep2 mla:cp2 mla:ep2zero moonlight:tp2sp moonlight:cp2 padded:tp2sp
        balanced:tp2sp balanced:pp2small balanced:ep2 balanced:cp2small
        kimi_k2:tp2ep2 kimi_k2:pp2
        deepseek:pp2uneven deepseek:vpp2 deepseek:ep2zero deepseek:tp2recompute deepseek:vpp2recompute
        mtp:tp2sp mtp:vpp2 mtp:ep2zero mtp:vpp2recompute
        replayed:tp2sp replayed:cp2small replayed:ep2zero replayed:vpp2recompute
        dense_mtp2:tp2 dense_mtp2:pp2small dense_mtp2:cp2small
        tied_parts:tp2 tied_parts:pp2 tied_parts:dp2zero moe_parts:tp2ep2zero moe_parts:pp2 moe_parts:ep2
        tied_frozen:tp2sp tied_frozen:pp2 mtp_frozen:tp2sp mtp_frozen:ep2zero mtp_frozen:vpp2recompute
        head_only:pp2 head_only:dp2zero
        dense_lora:tp2 dense_lora:tp2sp dense_lora:pp2 dense_lora:cp2 dense_lora:dp2zero
        moe_lora:ep2 moe_lora:tp2etp2 moe_lora:tp2ep2zero moe_lora:pp2small
        mla_lora:tp2sp mtp_lora:vpp2recompute
        dense:cp2flash moe:cp2flash gemma:cp2flash gpt_oss:cp2flash mla:cp2flash dense_mtp2:cp2flash mtp:pp2flash
    """,
    4: """
        dense:tp2pp2 dense:cp4 dense:cp2tp2 window:tp2pp2 window:cp4 gemma:tp2pp2
        gpt_oss:tp2pp2 gpt_oss:cp2ep2
        biased:tp2pp2 llama3:cp2pp2 tied:tp2pp2 tied:pp2dp2zero tied:cp2pp2
        latent:tp4 latent:tp2pp2 mla:tp4etp4 mla:tp2pp2 mla:cp2tp2 mla:cp2pp2 mla:cp4ep4 padded:tp4
        moe:tp2pp2 moe:tp2dp2 moe:ep2pp2 moe:tp2ep4 moe:ep2dp4 moe:cp2ep2 moe:cp4 balanced:cp2tp2
        deepseek:tp2vpp2 deepseek:tp2dp2zero deepseek:vpp2zero deepseek:pp4 replayed:tp2vpp2
        mtp:tp2vpp2 mtp:cp2tp2 mtp:cp2pp2 mtp:ep4zero
        tied_parts:pp2dp2zero tied_frozen:pp2dp2zero head_only:pp2dp2zero
        dense_lora:tp2pp2 moe_lora:tp2dp2 mla_lora:tp2pp2 mla_lora:tp4etp4
        dense:cp4flash gpt_oss:cp2tp2flash mla:cp2tp2flash
    """,
}
_ROUNDED = {2: "dense_bf16:tp2sp dense_bf16:pp2 deepseek_bf16:tp2sp deepseek_bf16:ep2zero deepseek_bf16:cp2"}
COMPARED = {case: size for table in (_EXACT, _ROUNDED) for size, cases in table.items() for case in cases.split()}
"""Every case that is compared with one process, and its number of processes."""

CORE = (
    "dense:small", "dense:pp2small", "dense:cp2zero", "latent:tp2sp", "moe:ep2", "mla:cp2", "deepseek:vpp2",
    "mtp:tp2sp", "replayed:ep2zero", "moe:tp2pp2", "tied_parts:pp2", "mla_lora:tp2sp", "gemma:cp2zero",
    "gpt_oss:tp2ep2", "gpt_oss:cp2flash",
)  # fmt: skip
"""Cases of `make test`: each kind of parallelism, attention and expert layer. `make test-parity` runs the others."""

LONG = (
    "dense:tp2sp", "dense:pp2small", "dense:dp2", "dense:cp2zero", "moe:tp2etp2", "deepseek:ep2zero", "deepseek:vpp2"
)  # fmt: skip
"""Cases that sample long completions in several waves, one of each kind of layout; sampling is most of a case's time.

A token's noise does not depend on how many follow, so the others' completions are the beginning of one process's.
"""


def name_of(case: str) -> str:
    """MODEL of [MUTATION@]MODEL:LAYOUT."""
    return case.rpartition("@")[2].split(":")[0]


def model_of(case: str) -> ModelConfig:
    """The model of [MUTATION@]MODEL:LAYOUT."""
    return MODELS[name_of(case)]


def has_adapters(case: str) -> bool:
    """Whether [MUTATION@]MODEL:LAYOUT trains adapters."""
    return name_of(case) in LORA


def one_process(case: str) -> str:
    """What [MUTATION@]MODEL:LAYOUT is compared with."""
    return f"{name_of(case)}:single"


def processes(case: str) -> int:
    """How many [MUTATION@]MODEL:LAYOUT needs."""
    return COMPARED.get(case.rpartition("@")[2], 1)


def optimizer(model: str, layout: str) -> OptimizerConfig:
    """Distributed where the layout's name says zero; overlapped, too, but for the plainest."""
    zero, parts = layout.endswith("zero"), PARTS.get(model, PartsConfig())
    own = dict(distributed=zero, overlap=zero and layout != "dp2zero", parts=parts, frozen=FROZEN_PARTS.get(model, []))
    return replace(OPTIMIZER, **own)


def expert_layers(model: ModelConfig) -> int:
    """Layers with experts, those of prediction modules included."""
    return model.layers - model.moe.first_dense + model.mtp_layers if model.moe.experts else 0
