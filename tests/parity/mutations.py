"""Bugs that tests/parity must notice, each planted while a case runs; test_mutations.py shows that it does.

All are mistakes that trainers have made, in what adds up over ranks and in what each rank takes for its own. Losses
show hardly any of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from pytest import MonkeyPatch  # noqa: PT013  a type


@dataclass(frozen=True)
class Mutation:
    """A bug.

    Attributes:
        plant: Puts it in place until the patch is undone. Megatron may only be imported then.
        cases: Each of these must show it.
    """

    plant: Callable[[MonkeyPatch], None]
    cases: tuple[str, ...]


def latent_norms_not_summed(patch: MonkeyPatch) -> None:
    """Under sequence parallelism each rank keeps its rows' part of the gradient of the latent norms."""

    def forget(policy: Any) -> None:
        policy.chunks.config.qk_layernorm = False  # Megatron sums some norms for their names, whatever their marks
        for name, parameter in policy.chunks.named_parameters():
            if name.endswith(("q_layernorm.weight", "kv_layernorm.weight")):
                parameter.sequence_parallel = False

    _after_building(patch, forget)


def head_norms_not_summed(patch: MonkeyPatch) -> None:
    """Under tensor parallelism each rank keeps its heads' part of the gradient of replicated norms."""
    _after_building(patch, lambda policy: setattr(policy.chunks.config, "qk_layernorm", False))


def rotary_key_not_summed(patch: MonkeyPatch) -> None:
    """The key that all heads share gets the gradient of each rank's own heads: Megatron's defect, not repaired."""
    from grpo_mega.models import body

    patch.setattr(body, "TO_CHUNK", tuple(change for change in body.TO_CHUNK if change.name != "latent_key_gradient"))


def expert_gradients_times_ep(patch: MonkeyPatch) -> None:
    """Gradients of routed experts are too large by the number of ranks that share them out."""

    def scale_after(policy: Any) -> None:
        config = policy.chunks.config
        finalize = config.finalize_model_grads_func

        def finalize_and_scale(model: Any, *arguments: Any, **others: Any) -> None:
            finalize(model, *arguments, **others)
            for parameter in policy.chunks.parameters():
                if not getattr(parameter, "allreduce", True):
                    parameter.main_grad.mul_(config.expert_model_parallel_size)

        config.finalize_model_grads_func = finalize_and_scale

    _after_building(patch, scale_after)


def positions_off_by_a_chunk(patch: MonkeyPatch) -> None:
    """A context parallel rank takes the positions of its first chunk for those of its second, and the reverse."""
    from grpo_mega.models.megatron.packed import PackedTokens

    sharded = PackedTokens.sharded

    def misplaced(packed: PackedTokens, rank: int, size: int) -> PackedTokens:
        mine = sharded(packed, rank, size)
        return mine if size == 1 else replace(mine, positions=mine.positions.roll(len(mine.positions) // 2))

    patch.setattr(PackedTokens, "sharded", misplaced)


def expert_biases_summed_twice(patch: MonkeyPatch) -> None:
    """Gradients of experts' biases are summed over tensor parallel ranks: Megatron's defect, not repaired."""
    from grpo_mega.models import body

    patch.setattr(body, "TO_CHUNK", tuple(change for change in body.TO_CHUNK if change.name != "expert_bias_marks"))


def sinks_counted_on_one_rank(patch: MonkeyPatch) -> None:
    """The gradient norm takes the sinks of each tensor parallel rank for copies of the first one's."""

    def forget(policy: Any) -> None:
        for name, parameter in policy.chunks.named_parameters():
            if name.endswith("softmax_offset"):
                parameter.tensor_model_parallel = False

    _after_building(patch, forget)


def no_sinks_in_decoding(patch: MonkeyPatch) -> None:
    """A token that is generated from the cache has no sink."""
    from grpo_mega.models.megatron.attention import PackedAttention

    decode = PackedAttention._decode

    def without(attention: PackedAttention, *arguments: Any) -> Any:
        sinks, attention.softmax_offset = attention.softmax_offset, None
        out = decode(attention, *arguments)
        attention.softmax_offset = sinks
        return out

    patch.setattr(PackedAttention, "_decode", without)


def embedding_tie_not_summed(patch: MonkeyPatch) -> None:
    """The first and the last pipeline stage each train their own copy of a tied embedding."""
    module = import_module("megatron.core.distributed.finalize_model_grads")  # a function has the same name
    patch.setattr(module, "_allreduce_word_embedding_grads", lambda *_, **__: None)


def router_bias_of_local_counts(patch: MonkeyPatch) -> None:
    """The balancing bias follows the tokens that this rank sent to each expert."""

    def updated(tokens: Any, bias: Any, rate: float) -> Any:
        return bias + rate * (tokens.mean(-1, keepdim=True) - tokens).sign()

    module = import_module("megatron.core.distributed.finalize_model_grads")
    patch.setattr(module, "get_updated_expert_bias", updated)


def loss_divided_by_replicas(patch: MonkeyPatch) -> None:
    """The loss of each replica is taken for a mean over its own tokens."""
    from grpo_mega.models.microbatch import MicroBatches

    made = MicroBatches._made

    def scaled(micros: MicroBatches, sequences: list[int]) -> Any:
        micro = made(micros, sequences)
        micro.packed.loss_scale /= micros.topology.dp_size
        return micro

    patch.setattr(MicroBatches, "_made", scaled)


def sequence_ratio_of_own_tokens(patch: MonkeyPatch) -> None:
    """GSPO's ratio is taken over the part of a sequence that a context parallel rank holds."""
    patch.setattr("grpo_mega.models.heads._context_parallel_group", lambda: None)


def scored_at_another_temperature(patch: MonkeyPatch) -> None:
    """Old and reference log-probs are those of temperature 1."""
    from grpo_mega.models.policy import Policy

    logprobs = Policy.logprobs
    patch.setattr(Policy, "logprobs", lambda policy, batch, temperature: logprobs(policy, batch, 1.0))


def trained_at_another_temperature(patch: MonkeyPatch) -> None:
    """The update's log-probs are those of temperature 1."""
    from grpo_mega.models.policy import Policy

    gradients = Policy.gradients
    patch.setattr(Policy, "gradients", lambda policy, batch, loss, temperature: gradients(policy, batch, loss, 1.0))


def adapter_gradients_of_own_tokens(patch: MonkeyPatch) -> None:
    """Under sequence parallelism each rank keeps its tokens' part of the gradient of the factor that all ranks have."""

    def forget(policy: Any) -> None:
        for name, parameter in policy.chunks.named_parameters():
            if ".adapter." in name:
                parameter.sequence_parallel = False

    _after_building(patch, forget)


def adapter_gradients_of_own_rows(patch: MonkeyPatch) -> None:
    """A column parallel layer's A, and an expert's shared factor, get the gradient of each rank's own rows."""
    patch.setattr("grpo_mega.models.adapters.copy_to_tensor_model_parallel_region", lambda x, *_: x)


def adapters_counted_on_every_rank(patch: MonkeyPatch) -> None:
    """The gradient norm counts the factor of an expert's adapter that all ranks have once for each of them."""

    def forget(policy: Any) -> None:
        for name, parameter in policy.chunks.named_parameters():
            if ".adapter." in name and hasattr(parameter, "shared"):
                del parameter.shared
                parameter.tensor_model_parallel = True

    _after_building(patch, forget)


def adapters_of_keys_and_values_swapped(patch: MonkeyPatch) -> None:
    """What is handed out as the key projection has the adapter of the value projection, and the reverse."""
    from grpo_mega.weights import merging

    parts_of = merging.parts_of

    def swapped(*arguments: Any) -> Any:
        parts = parts_of(*arguments)
        other = {1: 2, 2: 1}
        return replace(
            parts, numbers={k: other.get(n, n) if "linear_qkv" in k[0] else n for k, n in parts.numbers.items()}
        )

    patch.setattr("grpo_mega.weights.stream.parts_of", swapped)


def _after_building(patch: MonkeyPatch, spoil: Callable[[Any], Any]) -> None:
    from grpo_mega.models.policy import Policy

    build = Policy.__init__

    def build_and_spoil(policy: Policy, *arguments: Any, **others: Any) -> None:
        build(policy, *arguments, **others)
        spoil(policy)

    patch.setattr(Policy, "__init__", build_and_spoil)


MUTATIONS = {
    mutation.plant.__name__: mutation
    for mutation in (
        Mutation(latent_norms_not_summed, ("latent:tp2sp", "mla:tp2sp", "mtp:tp2sp")),
        Mutation(head_norms_not_summed, ("tied:tp2",)),
        Mutation(rotary_key_not_summed, ("latent:tp2sp", "mla:tp2sp")),
        Mutation(expert_gradients_times_ep, ("moe:ep2", "deepseek:ep2zero")),
        Mutation(positions_off_by_a_chunk, ("dense:cp2", "mla:cp2")),
        Mutation(expert_biases_summed_twice, ("gpt_oss:tp2sp", "gpt_oss:tp2ep2")),
        Mutation(sinks_counted_on_one_rank, ("gpt_oss:tp2ep2",)),
        Mutation(no_sinks_in_decoding, ("gpt_oss:cp2small",)),
        Mutation(embedding_tie_not_summed, ("tied:pp2",)),
        Mutation(router_bias_of_local_counts, ("moe:dp2", "moe:ep2", "moe:tp2sp")),
        Mutation(loss_divided_by_replicas, ("dense:dp2",)),
        Mutation(sequence_ratio_of_own_tokens, ("dense_gspo:cp2",)),
        Mutation(scored_at_another_temperature, ("dense:tp2",)),
        Mutation(trained_at_another_temperature, ("dense:tp2",)),
        Mutation(adapter_gradients_of_own_tokens, ("dense_lora:tp2sp", "mla_lora:tp2sp")),
        Mutation(adapter_gradients_of_own_rows, ("dense_lora:tp2", "moe_lora:tp2etp2")),
        Mutation(adapters_counted_on_every_rank, ("moe_lora:tp2etp2",)),
        Mutation(adapters_of_keys_and_values_swapped, ("dense_lora:tp2",)),
    )
}
"""Name -> mutation; MUTATION@CASE is the case with the bug in it."""
