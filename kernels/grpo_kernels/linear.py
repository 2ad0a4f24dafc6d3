"""Log-probs and losses from hidden states and the output layer's weight, in chunks of rows.

Only the logits of one chunk exist at a time, never [tokens, vocabulary]. Arguments of all functions here:

    hidden           [n, H] hidden states of the rows with a loss only; float32, bfloat16 or float16. They are rounded
                     to the weight's dtype: Megatron hands out a bf16 model's hidden states as float32.
    output_weight    [V, H] float32 or bfloat16 output layer, this rank's vocabulary shard if `group` is given. Rows
                     after the real vocabulary are padding: never read, gradient 0.
    ids              [n] int64, GLOBAL token ids.
    temperature      what the logits are divided by.
    chunk            rows per chunk, rounded up to whole blocks of 2048 on a GPU, of 64 on a CPU; None: one block on a
                     GPU, 2 MiB of logits or a block on a CPU. No bit of a result depends on it.
    logits_dtype     of the logits inside a chunk. Products are summed in float32, which float32 logits keep; bfloat16
                     rounds them: less memory traffic, and log-probs that are off by 0.02.
    vocab_size, group, backend
                     as for `fused_logprob`.
    hidden_grad      with a group, a rank's part of the vocabulary gives a part of the gradient of `hidden`:
                     "all_reduce"      every rank holds all of `hidden`, and gets the sum over the ranks;
                     "reduce_scatter"  sequence parallelism: `hidden` is this rank's [n / ranks, H] rows; those of all
                                       ranks, in rank order, are gathered here (`ids` has all n), and each rank gets its
                                       rows of the sum;
                     "partial"         every rank holds all of `hidden` and gets its own part; what made `hidden` sums
                                       the parts in its backward pass, as Megatron's copy to, and gather for, a tensor
                                       parallel region do.

All ranks of the group call the same function with the same ids and options, and get the same losses and log-probs, bit
for bit. With n = 0 the results are empty or 0, but still connected to the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_kernels import checks, passes
from grpo_kernels.chunked import Gradients, OutputLayer, Settings, output_layer
from grpo_kernels.dispatch import fits_one_launch
from grpo_kernels.metrics import Metrics, metrics
from grpo_kernels.options import LossOptions
from grpo_kernels.passes import Derivatives, PerToken, Work
from grpo_kernels.rows import logprob_and_entropy
from grpo_kernels.token_loss import RowLosses, Tokens, token_losses

TokenLoss = Callable[[Tensor, Tensor, slice], tuple[Tensor, PerToken]]
"""(log-probs [r], entropies [r], slice of the n rows) -> (weighted loss of each [r], further outputs [r])."""


def linear_logprob(
    hidden: Tensor, output_weight: Tensor, ids: Tensor, **settings: Unpack[Settings]
) -> tuple[Tensor, Tensor]:
    """[n] log-probs and [n] entropies of the tokens, float32, both differentiable; arguments: see the module.

    The forward pass saves four floats per row, nothing under `no_grad`; the backward pass recomputes the logits.

    Raises:
        ValueError, TypeError: An argument is bad; names it.
    """
    return _LinearLogProb.apply(hidden, output_weight, ids, output_layer(hidden, output_weight, ids, **settings))


def linear_token_loss(
    hidden: Tensor,
    output_weight: Tensor,
    ids: Tensor,
    token_loss: TokenLoss,
    *,
    main_grad: Tensor | None = None,
    grad_scale: float = 1.0,
    **settings: Unpack[Settings],
) -> tuple[Tensor, PerToken]:
    """Sum of any loss of log-probs and entropies, with gradients computed in the forward pass.

    Each chunk's logits are computed once: three matrix products in all (6 n V H operations), instead of four with
    recomputation in the backward pass. They are read twice, before and after `token_loss`. For other arguments see the
    module.

    Args:
        token_loss: Called for one chunk of rows after the other, in order (once with no row when n is 0). Each loss it
            returns must depend only on that token's log-prob and entropy; autograd differentiates it in these.
        main_grad: [V, H] float32 accumulator (Megatron's) that the weight's gradient is added to in the forward pass;
            autograd then gets none for the weight. None: autograd gets it.
        grad_scale: With `main_grad`, the factor by which the loss will be multiplied before `backward`; another factor
            is an error there.

    Returns:
        The scalar float32 loss, whose `backward` runs once; and the further outputs of `token_loss`, each [n],
        detached.

    Raises:
        ValueError, TypeError: An argument is bad; names it.
    """
    layer = output_layer(hidden, output_weight, ids, **settings)
    checks.require_main_grad(main_grad, output_weight, grad_scale)
    work = Work.of(layer, hidden, output_weight, ids, main_grad, grad_scale)
    with torch.no_grad():
        losses, extras = passes.two_launches(work, partial(_differentiated, token_loss))
        loss = losses.sum()
    return work.attached(loss, hidden, output_weight, main_grad), extras


def linear_grpo_loss(
    hidden: Tensor,
    output_weight: Tensor,
    ids: Tensor,
    old_logprob: Tensor | None,
    ref_logprob: Tensor | None,
    advantages: Tensor,
    token_weight: Tensor,
    *,
    options: LossOptions,
    rollout_logprob: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sampled: Tensor | None = None,
    sequence_group: dist.ProcessGroup | None = None,
    main_grad: Tensor | None = None,
    grad_scale: float = 1.0,
    **settings: Unpack[Settings],
) -> tuple[Tensor, Metrics]:
    """GRPO loss (`fused_grpo_loss`) from hidden states, with gradients computed in the forward pass.

    One launch computes a chunk's losses and writes its gradient over its logits, or to new memory if their dtype is
    wider than the weight's. With a sharded vocabulary there are two, between which ranks exchange the rows' statistics.
    If a token's gradient needs its whole sequence (`options.per_sequence`), the second launches follow the first ones
    of all chunks, on recomputed logits. For the vectors and `options` see `fused_grpo_loss`, for `main_grad` and
    `grad_scale` `linear_token_loss`, for the others the module.

    Args:
        sequence_group: With `options.per_sequence`, the ranks that each hold some tokens of every sequence (context
            parallelism), or None. Each passes `cu_seqlens` of its own tokens; all of them must call this.

    Returns:
        The scalar float32 loss, whose `backward` runs once, and metrics.

    Raises:
        ValueError, TypeError: An argument is bad; names it.
    """
    layer = output_layer(hidden, output_weight, ids, **settings)
    checks.require_group(sequence_group, "sequence_group")
    vectors = (advantages, token_weight, old_logprob, ref_logprob, rollout_logprob)
    tokens = Tokens(*vectors, cu_seqlens, sequence_group, sampled)
    checks.require_tokens(tokens, options, len(ids), hidden.device)
    checks.require_main_grad(main_grad, output_weight, grad_scale)
    work = Work.of(layer, hidden, output_weight, ids, main_grad, grad_scale)
    with torch.no_grad():
        losses = RowLosses.of(_grpo_outputs(work, tokens, options))
        loss = losses.loss.sum()
    return work.attached(loss, hidden, output_weight, main_grad), metrics(losses, tokens)


def _grpo_outputs(work: Work, tokens: Tokens, options: LossOptions) -> Tensor:
    """[n, 7] `RowLosses` of a linear loss; adds its gradients."""
    # A token's gradient follows from its own row of logits, all of which this rank has.
    if fits_one_launch(work.layer.shard, options):
        operations = work.layer.operations(work.operands, one_launch=True)
        return passes.one_launch(work, operations, tokens, options)
    if not options.per_sequence:
        # Ranks share the vocabulary: they exchange statistics between the two launches of a chunk.
        return passes.two_launches(work, partial(_grpo_derivatives, tokens, options))[1]["outputs"]
    # The gradient needs whole sequences, which chunks may cut: statistics of all chunks come before the first gradient.
    stats = passes.statistics(work)
    logprob, entropy = logprob_and_entropy(stats, work.layer.inv_temperature)
    losses = token_losses(logprob, entropy, tokens, options)
    passes.add_gradients(work, stats, losses.grad_logprob, losses.grad_entropy)
    return losses.outputs(logprob, entropy)


def _grpo_derivatives(
    tokens: Tokens, options: LossOptions, logprob: Tensor, entropy: Tensor, part: slice
) -> Derivatives:
    losses = token_losses(logprob, entropy, tokens.part(part), options)
    return losses.loss, losses.grad_logprob, losses.grad_entropy, {"outputs": losses.outputs(logprob, entropy)}


def _differentiated(token_loss: TokenLoss, logprob: Tensor, entropy: Tensor, part: slice) -> Derivatives:
    """The token loss with its derivatives, by autograd on the [r] vectors."""
    inputs = (logprob.requires_grad_(), entropy.requires_grad_())
    with torch.enable_grad():
        losses, extras = token_loss(*inputs, part)
    if losses.shape != logprob.shape:
        raise ValueError(f"token_loss returned losses of shape {list(losses.shape)} for {len(logprob)} tokens")
    by_logprob, by_entropy = None, None
    if losses.requires_grad:
        by_logprob, by_entropy = torch.autograd.grad(losses, inputs, torch.ones_like(losses), allow_unused=True)
    by_logprob = torch.zeros_like(logprob) if by_logprob is None else by_logprob
    return losses.detach(), by_logprob, by_entropy, {name: value.detach() for name, value in extras.items()}


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, output_weight: Tensor, ids: Tensor, layer: OutputLayer
    ) -> tuple[Tensor, Tensor]:
        work = Work.of(layer, hidden, output_weight, ids)
        stats = passes.statistics(work)
        ctx.save_for_backward(hidden, output_weight, work.ids, stats)
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        return logprob_and_entropy(stats, layer.inv_temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, output_weight, ids, stats = ctx.saved_tensors
        operands = ctx.layer.operands(hidden, output_weight)
        gradients = Gradients.wanted(operands, hidden, output_weight)
        by_logprob = torch.zeros_like(stats[:, 0]) if by_logprob is None else by_logprob
        passes.add_gradients(Work(ctx.layer, operands, ids, gradients, 1.0), stats, by_logprob, by_entropy)
        return ctx.layer.reduced(gradients.hidden), gradients.output_weight, None, None
