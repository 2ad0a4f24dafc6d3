"""From hidden states and the output layer's weight to log-probs and losses, a chunk of rows at a time.

The logits of a chunk exist while it is worked on; [tokens, vocabulary] never does. Common to all functions here:

    hidden           [n, H] hidden states of the rows that count and no others; float32, bfloat16 or float16. They are
                     rounded to the weight's dtype: Megatron hands out a bf16 model's hidden states as float32.
    weight           [V, H] float32 or bfloat16 output layer, this rank's part of the vocabulary when `group` is given.
                     Rows behind the real vocabulary are padding: never read, gradient 0.
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
for bit. With n = 0 the results are empty or 0, and connected to the graph all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_kernels import checks
from grpo_kernels.chunked import Gradients, Head, How, Operands, counted, head
from grpo_kernels.metrics import Metrics, metrics
from grpo_kernels.options import GRPOLoss
from grpo_kernels.premade import PremadeGradients
from grpo_kernels.token_loss import TokenLosses, Tokens, token_losses

PerToken = dict[str, Tensor]
TokenLoss = Callable[[Tensor, Tensor, slice], tuple[Tensor, PerToken]]
"""(log-probs [r], entropies [r], which of the n rows these are) -> (weighted loss of each [r], whatever else [r])."""

Derivatives = tuple[Tensor, Tensor, Tensor | None, PerToken]
"""(losses, their derivatives in the log-probs, in the entropies or None, whatever else), all [r]."""


def linear_logprob(hidden: Tensor, weight: Tensor, ids: Tensor, **how: Unpack[How]) -> tuple[Tensor, Tensor]:
    """[n] log-probs and [n] entropies of the tokens, float32, both differentiable; arguments: see the module.

    The forward pass keeps four floats per row, and nothing under `no_grad`; the backward pass makes the logits again.

    Raises:
        ValueError, TypeError: An argument is bad; names it.
    """
    return _LinearLogProb.apply(hidden, weight, ids, head(hidden, weight, ids, **how))


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    token_loss: TokenLoss,
    *,
    main_grad: Tensor | None = None,
    grad_scale: float = 1.0,
    **how: Unpack[How],
) -> tuple[Tensor, PerToken]:
    """The sum of any loss of log-probs and entropies, with gradients made in the forward pass.

    Each chunk's logits are made once: three matrix products in all (6 n V H operations), where a backward pass that
    makes them again takes four. The arguments not named here: see the module.

    Args:
        token_loss: Called for one chunk of rows after the other, in order (once with no row when n is 0). Each loss it
            returns must come from that token's log-prob and entropy alone; autograd differentiates it in these.
        main_grad: [V, H] float32 accumulator (Megatron's) that the weight's gradient is added to in the forward pass;
            autograd then gets none for the weight. None: autograd gets it.
        grad_scale: With `main_grad`, the number that the loss is going to be multiplied by before `backward`; another
            one is an error there.

    Returns:
        The scalar float32 loss, whose `backward` runs once; and what `token_loss` returned besides, each [n], detached.

    Raises:
        ValueError, TypeError: An argument is bad; names it.
    """
    made = head(hidden, weight, ids, **how)
    if main_grad is not None:
        checks.require_main_grad(main_grad, weight, grad_scale)
    return premade_loss(made, hidden, weight, ids, differentiated(token_loss), main_grad, grad_scale)


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    old_logprob: Tensor | None,
    ref_logprob: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    *,
    options: GRPOLoss,
    rollout_logprob: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_group: dist.ProcessGroup | None = None,
    main_grad: Tensor | None = None,
    grad_scale: float = 1.0,
    **how: Unpack[How],
) -> tuple[Tensor, Metrics]:
    """`fused_grpo_loss` from hidden states, with gradients made in the forward pass.

    Under "gspo" the log-probs are made first, in a pass of their own: a token's gradient needs its whole sequence. For
    the vectors and `options` see `fused_grpo_loss`, for `main_grad` and `grad_scale` `linear_token_loss`, for the
    others the module.

    Args:
        sequence_group: Under "gspo", the ranks that each hold some tokens of every sequence (context parallelism), or
            None. Their `cu_seqlens` count the tokens each has; all of them call this.

    Returns:
        The scalar float32 loss, whose `backward` runs once, and metrics.

    Raises:
        ValueError, TypeError: An argument is bad; names it.
    """
    made = head(hidden, weight, ids, **how)
    checks.require_group(sequence_group, "sequence_group")
    tokens = Tokens(advantages, weights, old_logprob, ref_logprob, rollout_logprob, cu_seqlens, sequence_group)
    checks.require_tokens(tokens, options, len(ids), hidden.device)
    if main_grad is not None:
        checks.require_main_grad(main_grad, weight, grad_scale)
    known: TokenLosses | None = None
    if options.kind == "gspo":
        with torch.no_grad():
            logprob, entropy = _LinearLogProb.apply(hidden, weight, ids, made)
        known = token_losses(logprob, entropy, tokens, options)

    def derivatives(logprob: Tensor, entropy: Tensor, part: slice) -> Derivatives:
        found = token_losses(logprob, entropy, tokens.part(part), options) if known is None else known.part(part)
        logged = {name: getattr(found, name) for name in ("loss", "weight", "log_ratio", "kl", "clipped")}
        return found.loss, found.grad_logprob, found.grad_entropy, logged | {"logprob": logprob, "entropy": entropy}

    loss, logged = premade_loss(made, hidden, weight, ids, derivatives, main_grad, grad_scale)
    return loss, metrics(given=weights, old=old_logprob, **logged)


def premade_loss(
    made: Head,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    derivatives: Callable[[Tensor, Tensor, slice], Derivatives],
    main_grad: Tensor | None,
    grad_scale: float,
) -> tuple[Tensor, PerToken]:
    """`linear_token_loss` of a loss that brings its derivatives along."""
    needed = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.no_grad():
        operands = made.operands(hidden, weight)
        gradients = Gradients.wanted(operands, hidden, weight, main_grad) if needed else None
        scale = 1.0 if main_grad is None else grad_scale
        chunks = [
            _chunk_loss(made, operands, part, ids[part], derivatives, gradients, scale)
            for part in made.chunks(len(ids))
        ]
        loss = torch.cat([losses for losses, _ in chunks]).sum()
        extras = {name: torch.cat([extra[name] for _, extra in chunks]) for name in chunks[0][1]}
        if gradients is None:
            return loss, extras
        ready = (made.reduced(gradients.hidden), None if main_grad is not None else gradients.weight)
    promised = None if main_grad is None else grad_scale
    return PremadeGradients.apply(loss, promised, ready, hidden, weight), extras


def _chunk_loss(
    made: Head,
    operands: Operands,
    part: slice,
    ids: Tensor,
    derivatives: Callable[[Tensor, Tensor, slice], Derivatives],
    gradients: Gradients | None,
    scale: float,
) -> tuple[Tensor, PerToken]:
    """Losses [r] of some rows and what comes with them; their part of the gradients, times `scale`, is added."""
    logits = operands.logits(part, made.logits_dtype)
    stats = made.merged(made.local_stats(logits, ids))
    losses, by_logprob, by_entropy, extras = derivatives(*made.logprob_and_entropy(stats), part)
    if gradients is not None:
        if scale != 1:
            by_logprob, by_entropy = by_logprob * scale, None if by_entropy is None else by_entropy * scale
        grad_logits = made.gradient(operands, logits, ids, stats, by_logprob, by_entropy)
        gradients.add(operands, part, grad_logits, counted(by_logprob, by_entropy))
    return losses, extras


def differentiated(token_loss: TokenLoss) -> Callable[[Tensor, Tensor, slice], Derivatives]:
    """The token loss together with its derivatives, by autograd on the [r] vectors."""

    def with_derivatives(logprob: Tensor, entropy: Tensor, part: slice) -> Derivatives:
        inputs = (logprob.requires_grad_(), entropy.requires_grad_())
        with torch.enable_grad():
            losses, extras = token_loss(*inputs, part)
        if losses.shape != logprob.shape:
            raise ValueError(f"token_loss returned losses of shape {list(losses.shape)} for {len(logprob)} tokens")
        by_logprob, by_entropy = _derivatives(losses, inputs)
        extras = {name: value.detach() for name, value in extras.items()}
        return losses.detach(), torch.zeros_like(logprob) if by_logprob is None else by_logprob, by_entropy, extras

    return with_derivatives


def _derivatives(losses: Tensor, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    if not losses.requires_grad:
        return None, None
    return torch.autograd.grad(losses, inputs, torch.ones_like(losses), allow_unused=True)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, made: Head) -> tuple[Tensor, Tensor]:
        operands = made.operands(hidden, weight)
        parts = [
            made.local_stats(operands.logits(part, made.logits_dtype), ids[part]) for part in made.chunks(len(ids))
        ]
        stats = made.merged(torch.cat(parts))
        ctx.save_for_backward(hidden, weight, ids, stats)
        ctx.made = made
        ctx.set_materialize_grads(False)
        return made.logprob_and_entropy(stats)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, stats = ctx.saved_tensors
        operands = ctx.made.operands(hidden, weight)
        gradients = Gradients.wanted(operands, hidden, weight)
        by_logprob = torch.zeros_like(stats[:, 0]) if by_logprob is None else by_logprob
        for part in ctx.made.chunks(len(ids)):
            logits = operands.logits(part, ctx.made.logits_dtype)
            entropy_part = None if by_entropy is None else by_entropy[part]
            grad = ctx.made.gradient(operands, logits, ids[part], stats[part], by_logprob[part], entropy_part)
            gradients.add(operands, part, grad, counted(by_logprob[part], entropy_part))
        return ctx.made.reduced(gradients.hidden), gradients.weight, None, None
