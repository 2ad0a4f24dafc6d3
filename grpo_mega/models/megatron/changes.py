"""All changes to Megatron-Core's models and optimizers, with their reasons; the classes are in other files here.

The tables are in the order of their application: first the specification of a piece of the model, then the built piece,
then its wrapper for data parallelism, and last the optimizer. A module that changes its class keeps its parameters and
their names in checkpoints. tests/models/test_changes.py leaves the changes out one at a time.

Three other modules change libraries: platform/cpu.py what Megatron needs on a CPU or without Transformer Engine,
checkpoint/writers.py a queue, topology.py the timeout of one process group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from grpo_mega.config.schema import LoRAConfig, ModelConfig, StateConfig
from grpo_mega.models.families import Layers, layers_of
from grpo_mega.models.heads import use_logprob_head
from grpo_mega.models.megatron import dispatch
from grpo_mega.models.megatron.adam import GroupStepAdamW, LeanAdamW, is_lean
from grpo_mega.models.megatron.adapted import use_adapters
from grpo_mega.models.megatron.attention import PackedAttention
from grpo_mega.models.megatron.latent import set_latent_norms, sum_latent_key_gradient
from grpo_mega.models.megatron.layers import RMSNorm, scale_embedding, use_gated_mlps, use_post_norms, use_whole_linears
from grpo_mega.models.megatron.mtp import PredictingGPT, use_packed_predictors
from grpo_mega.models.megatron.own_shards import count_padding, keep_shards_apart
from grpo_mega.models.megatron.rotary import make_no_yarn_tables, use_packed_rotary
from grpo_mega.models.megatron.router import use_packed_router
from grpo_mega.models.megatron.scalar import ScalarGPT
from grpo_mega.models.megatron.sinks import mark_expert_biases
from grpo_mega.models.megatron.te_kernels import add_weight_gradients_in_place

Target = TypeVar("Target")


@dataclass(frozen=True)
class Change(Generic[Target]):
    """One change to Megatron.

    Attributes:
        name: Names the change in tests.
        what: What the change replaces, and with what.
        reason: What Megatron does not do, or does wrongly.
        test: The test that fails without the change.
        apply: Makes the change.
    """

    name: str
    what: str
    reason: str
    test: str
    apply: Callable[[Target], None]


@dataclass(frozen=True)
class Specification:
    """The specification of a model to build.

    Attributes:
        model: The model's configuration.
        transformer_engine: Whether its layers come from Transformer Engine.
        scalar: Whether its head gives one number for each token.
        replacements: Megatron's class -> what is built instead of it, wherever the specification names it.
    """

    model: ModelConfig
    transformer_engine: bool
    scalar: bool
    replacements: dict[type, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """A piece of the model that was just built.

    Attributes:
        gpt: The piece.
        model: The model's configuration.
        vocab_size: Tokens of the tokenizer; rows of the output layer beyond them are padding.
        lora: Settings of the adapters; None when all weights are trained.
        transformer_engine: Whether its layers come from Transformer Engine.
    """

    gpt: GPTModel
    model: ModelConfig
    vocab_size: int
    lora: LoRAConfig | None = None
    transformer_engine: bool = False

    @property
    def layers(self) -> Layers:
        """How the layers differ from Llama's."""
        return layers_of(self.model.family)


def apply_changes(changes: tuple[Change[Target], ...], target: Target) -> None:
    """Makes every change of a table to one target."""
    for change in changes:
        change.apply(target)


def _use_packed_attention(specification: Specification) -> None:
    model = specification.model
    names = "rope_base", "rope_fraction", "llama3_rope", "yarn", "window", "full_every", "window_rope_base"
    # Megatron's latent attention rotates by itself, and no model of it has windows.
    rotating = {n: getattr(model, n) for n in names if model.attention == "gqa"}
    packed = ModuleSpec(PackedAttention, rotating | {"sinks": layers_of(model.family).sinks})
    specification.replacements[DotProductAttention] = packed
    if specification.transformer_engine:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        specification.replacements[TEDotProductAttention] = packed


def _use_rms_norm(specification: Specification) -> None:
    specification.replacements[WrappedTorchNorm] = RMSNorm


def _use_predicting_gpt(specification: Specification) -> None:
    if specification.model.mtp_layers:
        specification.replacements[GPTModel] = PredictingGPT


def _use_scalar_gpt(specification: Specification) -> None:
    if specification.scalar:
        specification.replacements[GPTModel] = ScalarGPT


def _use_logprob_head(chunk: Chunk) -> None:
    if not isinstance(chunk.gpt, ScalarGPT):
        use_logprob_head(chunk.gpt, chunk.vocab_size)


def _use_adapters(chunk: Chunk) -> None:
    if chunk.lora is not None:
        use_adapters(chunk.gpt, chunk.lora, chunk.transformer_engine)


def _mark_experts(chunk: Chunk) -> None:
    for name, parameter in chunk.gpt.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False


def _forget_routing(chunk: Chunk) -> None:
    def forget(layer: Any, *_: Any) -> None:
        dispatcher = layer.token_dispatcher
        dispatcher.probs = dispatcher.routing_map = dispatcher.reversed_local_input_permutation_mapping = None
        # The dispatcher for DeepEP keeps the routing in its manager.
        if hasattr(dispatcher, "_comm_manager"):
            vars(dispatcher._comm_manager).update(dict.fromkeys(dispatch.KEPT))

    for module in chunk.gpt.modules():
        if hasattr(module, "token_dispatcher"):
            module.register_forward_hook(forget)


def _mark_predictors(chunk: Chunk) -> None:
    for name, parameter in chunk.gpt.named_parameters():
        if name.startswith("mtp."):
            parameter.shared = True


def _keep_balancing_in_fp32(chunk: DistributedDataParallel) -> None:
    for module in chunk.modules():
        for name in ("expert_bias", "local_tokens_per_expert"):
            buffer = getattr(module, name, None)
            if buffer is not None:
                buffer.data = buffer.data.float()


ADAM = GroupStepAdamW if megatron_optimizer.USING_PYTORCH_OPTIMIZER else megatron_optimizer.Adam
"""Adam with its state in float32 on the device: ours if neither Transformer Engine nor Apex is installed."""


def _use_group_step_adamw(_: StateConfig) -> None:
    # Megatron then treats ours like Transformer Engine's, whose state has the same form.
    if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    # Set every time: an optimizer built earlier in this process, of another model, may have left LeanAdamW there.
    megatron_optimizer.Adam = ADAM


def _use_lean_adamw(state: StateConfig) -> None:
    if is_lean(state):
        moments = torch.bfloat16 if state.moments == "bf16" else torch.float32
        megatron_optimizer.Adam = partial(LeanAdamW, moments=moments, on_host=state.on_host)


def _spare_from_decay(optimizer: MegatronOptimizer) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] *= group["wd_mult"]


def _start_moments(optimizer: MegatronOptimizer) -> None:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, LeanAdamW):
            part.optimizer.start()
        # A part without trained parameters has no inner optimizer.
        elif part.optimizer is not None:
            part.init_state_fn(part.optimizer, part.config)


TO_SPECIFICATION: tuple[Change[Specification], ...] = (
    Change(
        "packed_attention",
        "the core attention, Megatron's or Transformer Engine's, is PackedAttention",
        "sequences lie in one row, share prompts, and are generated from a cache; Megatron's own refuses that",
        "tests/models/test_policy.py::test_the_order_of_sequences_changes_nothing",
        _use_packed_attention,
    ),
    Change(
        "rms_norm",
        "torch's norm in Megatron's wrapper is RMSNorm",
        "the wrapper refuses sequence parallelism, and on a CPU its arithmetic is a chain of operations",
        "tests/parity/test_layouts.py::test_as_on_one_process[latent:tp2sp-gradients]",
        _use_rms_norm,
    ),
    Change(
        "predicting_gpt",
        "a GPTModel with prediction modules is a PredictingGPT",
        "Megatron computes their loss from labels that it shifts itself, and lets its gradient change the model",
        "tests/models/test_mtp.py::test_drafts_are_those_of_every_sequence_alone",
        _use_predicting_gpt,
    ),
    Change(
        "scalar_gpt",
        "a GPTModel with one number for each token is a ScalarGPT",
        "Megatron's last stage has an output layer over the vocabulary, whether it is read or not",
        "tests/models/test_scalar.py::test_nothing_as_large_as_the_vocabulary_is_built_or_computed",
        _use_scalar_gpt,
    ),
    Change(
        "no_yarn_tables",
        "layers of latent attention with YaRN make no sines and cosines",
        "Megatron makes two tables of all positions for each layer, and nothing reads them",
        "tests/models/test_changes.py::test_no_layer_has_positions_of_its_own",
        lambda _: make_no_yarn_tables(),
    ),
)
"""Changes of the specification, before a piece of the model is built."""

TO_CHUNK: tuple[Change[Chunk], ...] = (
    Change(
        "packed_rotary",
        "RotaryEmbedding and YarnRotaryEmbedding of latent attention are the packed ones",
        "Megatron counts positions along the row; here they start again with each sequence, or at its prompt's end",
        "tests/models/test_policy.py::test_computing_a_prompt_once_for_its_group_changes_nothing",
        lambda chunk: use_packed_rotary(chunk.gpt, chunk.model.context),
    ),
    Change(
        "logprob_head",
        "the output layer is a LogProbHead",
        "Megatron makes the logits of all tokens, [tokens, vocabulary], at once",
        "tests/models/test_head.py::test_logits_of_all_tokens_never_exist",
        _use_logprob_head,
    ),
    Change(
        "gated_mlp",
        "dense MLPs and routed experts are GatedMLPs, unless their gate is clamped, which only Megatron's can do",
        "Megatron's activation makes and saves several tensors where one pass each way would do",
        "tests/models/test_changes.py::test_a_gated_mlp_saves_less",
        lambda chunk: None if chunk.layers.clamped else use_gated_mlps(chunk.gpt),
    ),
    Change(
        "whole_linears",
        "column and row parallel layers of a group of one are WholeColumnLinear and WholeRowLinear",
        "Megatron's forward pass prepares for communication, and there is none",
        "tests/models/test_changes.py::test_a_layer_that_no_rank_shares_is_a_matrix_product_and_nothing_else",
        lambda chunk: use_whole_linears(chunk.gpt),
    ),
    # After whole_linears: an adapted layer is no longer of the exact class which that change looks for.
    Change(
        "adapters",
        "linear layers that lora.targets names are layers with adapters",
        "Megatron has no adapters",
        "tests/models/test_adapters.py::test_the_policy_is_the_merged_model",
        _use_adapters,
    ),
    Change(
        "packed_router",
        "routers are PackedRouters",
        "Megatron counts padding, and a row that several sequences share once; and it cannot replay an engine's choice",
        "tests/models/test_policy.py::test_expert_loads_are_of_this_pass_and_count_every_token",
        lambda chunk: use_packed_router(chunk.gpt),
    ),
    # After packed_router: the dispatcher keeps its exchange in the micro-batch that the router knows.
    Change(
        "recalling_dispatcher",
        "dispatchers that use an all-to-all are RecallingDispatchers",
        "Megatron counts the exchanged tokens again when it recomputes a layer: the counts are gathered a second time, "
        "and the host waits for them a second time (docs/gpu.md)",
        "tests/models/test_dispatch.py::test_a_layer_that_is_recomputed_exchanges_the_same_tokens",
        lambda chunk: dispatch.use_recalling_dispatcher(chunk.gpt),
    ),
    Change(
        "packed_predictor",
        "prediction modules are PackedPredictors",
        "Megatron shifts the row by one, across the ends of sequences and of shared prompts",
        "tests/models/test_mtp.py::test_drafts_are_those_of_every_sequence_alone",
        lambda chunk: use_packed_predictors(chunk.gpt),
    ),
    Change(
        "latent_norms",
        "the norms within latent attention have their own epsilon",
        "Megatron gives them the model's; DeepSeek's own code does not",
        "tests/models/test_latent_norms.py::test_other_norms_keep_the_model_s",
        lambda chunk: set_latent_norms(chunk.gpt),
    ),
    Change(
        "latent_key_gradient",
        "a hook gathers the output of latent attention's down-projection, so that the rotary key's gradient is summed",
        "each tensor parallel rank keeps the gradient of its own heads (docs/parity.md, defect 1)",
        "tests/parity/test_mutations.py::test_planted_bug_is_noticed[rotary_key_not_summed@latent:tp2sp]",
        lambda chunk: sum_latent_key_gradient(chunk.gpt),
    ),
    Change(
        "post_norms",
        "in families with post-norms, what attention and feed-forward add to hidden states goes through a norm",
        "Megatron's layers have norms before these only",
        "tests/models/test_layers.py::test_how_large_the_output_of_a_layer_is_does_not_matter",
        lambda chunk: use_post_norms(chunk.gpt) if chunk.layers.post_norms else None,
    ),
    Change(
        "scaled_embedding",
        "of a family that scales them, embeddings are multiplied by sqrt(hidden)",
        "Megatron has no such factor",
        "tests/models/test_layers.py::test_embeddings_are_as_large_as_hidden_states",
        lambda chunk: scale_embedding(chunk.gpt) if chunk.layers.scaled_embedding else None,
    ),
    # After adapters, whose parameters in experts need the marks as well.
    Change(
        "expert_marks",
        "parameters of routed experts are marked allreduce=False, also without expert parallelism",
        "Megatron splits the optimizer by the mark: checkpoints would differ in shape with and without expert "
        "parallelism",
        "tests/train/test_layout_change.py",
        _mark_experts,
    ),
    Change(
        "expert_bias_marks",
        "biases of routed experts have the marks of their weights, not those of a dense layer's bias",
        "Megatron sums their gradients over tensor parallel ranks, although these ranks hold other experts, or have "
        "summed them as replicas; and their norm counts on the first of these alone (docs/parity.md, defect 8)",
        "tests/parity/test_layouts.py::test_as_on_one_process[gpt_oss:tp2ep2-gradients]",
        lambda chunk: mark_expert_biases(chunk.gpt),
    ),
    Change(
        "forgotten_routing",
        "a layer of experts lets go of a micro-batch's routing when its forward pass ends",
        "Megatron's dispatcher keeps it until the next one, and with the probabilities the graph that made them: 2 GB "
        "of DeepSeek-V3's stages (docs/gpu.md)",
        "tests/models/test_changes.py::test_no_layer_keeps_the_routing_of_a_micro_batch",
        _forget_routing,
    ),
    Change(
        "gradients_in_place",
        "Transformer Engine's products add the gradients of their weights to Megatron's float32 buffers",
        "each micro-batch's gradient would be rounded to bf16 and added afterwards; the setting for it is refused by "
        "Megatron's output layer, which wants Apex",
        "tests/forecast/rehearsal/test_rehearse.py::test_weight_gradients_are_added_where_they_are_summed",
        lambda chunk: add_weight_gradients_in_place(chunk.gpt) if chunk.transformer_engine else None,
    ),
    Change(
        "predictor_marks",
        "parameters of prediction modules are marked as shared",
        "Megatron leaves shared parameters out of the gradient norm: those of prediction modules must not change how "
        "far the policy moves; they are clipped by its factor",
        "tests/models/test_mtp.py::test_the_policy_moves_bit_for_bit_as_without_although_gradients_are_clipped",
        _mark_predictors,
    ),
)
"""Changes of a piece of the model, once it is built."""

TO_PARALLEL_CHUNK: tuple[Change[DistributedDataParallel], ...] = (
    Change(
        "padding_counts",
        "padding at the end of a bucket counts as its content",
        "a distributed optimizer with several buckets saves shifted moments (docs/parity.md, defect 6)",
        "tests/models/test_overlap.py",
        count_padding,
    ),
    Change(
        "balancing_in_fp32",
        "the buffers that balance the experts are fp32 again",
        "Float16Module converts them to bf16, which cannot count past 256",
        "tests/models/test_changes.py::test_experts_are_counted_exactly_in_bf16",
        _keep_balancing_in_fp32,
    ),
)
"""Changes of a piece of the model once it is wrapped in Megatron's DistributedDataParallel."""

BEFORE_OPTIMIZER: tuple[Change[StateConfig], ...] = (
    Change(
        "group_step_adamw",
        "where neither Transformer Engine nor Apex is installed, Megatron's Adam is GroupStepAdamW, which its "
        "distributed optimizer handles like Transformer Engine's",
        "the distributed optimizer refuses torch's AdamW, whose step it can neither save nor load",
        "tests/parity/test_layouts.py::test_as_on_one_process[dense:cp2zero-updates]",
        _use_group_step_adamw,
    ),
    Change(
        "lean_adamw",
        "with optimizer.state, Megatron's Adam is LeanAdamW",
        "Transformer Engine's needs a GPU and keeps its state there, and Megatron's HybridDeviceOptimizer computes on "
        "the host what it keeps there, with another Adam",
        "tests/models/test_lean_adam.py::test_on_the_host_every_number_is_that_of_the_usual_optimizer",
        _use_lean_adamw,
    ),
)
"""Changes of Megatron itself before an optimizer is built; they depend on how the optimizer keeps its state."""

TO_OPTIMIZER: tuple[Change[MegatronOptimizer], ...] = (
    Change(
        "spared_from_decay",
        "norms and biases do not decay",
        "Megatron marks them with wd_mult=0, which only its own scheduler applies (docs/parity.md, defect 4)",
        "tests/models/test_optimizer.py::test_weight_decay_spares_norms_and_nothing_else",
        _spare_from_decay,
    ),
    Change(
        "moments_from_the_start",
        "every parameter has moments, of zero, before the first update",
        "a checkpoint from before the first update would lack tensors that loading expects",
        "tests/models/test_changes.py::test_an_optimizer_has_moments_before_its_first_update",
        _start_moments,
    ),
    Change(
        "own_shards",
        "a rank writes and reads its own part of the distributed optimizer's state",
        "Megatron gathers all of it on every replica, in main memory: 12 bytes a parameter, and again to write them",
        "tests/checkpoint/test_own_shards.py::test_a_checkpoint_takes_no_more_memory_than_what_ranks_write",
        keep_shards_apart,
    ),
)
"""Changes of an optimizer, once it is built."""
