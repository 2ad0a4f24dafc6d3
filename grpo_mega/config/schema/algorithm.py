"""GRPO and its variants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from grpo_mega.config.limits import Interval, OneOf


@dataclass
class AlgorithmConfig:
    """GRPO (DeepSeekMath, equation 3) and its variants."""

    prompts_per_step: Annotated[int, Interval("[1, inf)")] = 32
    """Prompts sampled per step."""
    group_size: Annotated[int, Interval("[1, inf)")] = 8
    """G, samples per prompt; at least 2 where advantages are relative to the group."""
    groups_without_signal: Annotated[str, OneOf("count", "drop", "refill")] = "count"
    """What to do with groups whose rewards are all equal, so that every advantage is 0. (Samples that could not be
    scored are no part of their group; one with fewer than two others is such a group.) count: their sequences and
    tokens count in the denominators of `aggregation`, and the KL term and an entropy bonus act on them (DeepSeekMath,
    equation 3; Dr. GRPO); with neither they have no gradient and are not computed, so they do not take part in experts'
    balance and prediction modules' loss either. drop: as if never sampled, so the step is smaller. refill: dropped, and
    another prompt is drawn for each (dynamic sampling: DAPO, arXiv 2503.14476, section 3.2), so that the step has
    `prompts_per_step` groups with signal."""
    refill_limit: Annotated[int, Interval("[1, inf)")] = 10
    """Under `groups_without_signal=refill` the most prompts that a step draws, in multiples of `prompts_per_step`; a
    step that has fewer groups with signal by then learns from these."""
    advantage_baseline: Annotated[str, OneOf("mean", "leave_one_out", "optimal", "batch", "critic")] = "mean"
    """What is subtracted from a reward. Of the group: mean (GRPO); leave_one_out, the mean of the others (RLOO, arXiv
    2402.14740); optimal, the mean weighted by length (OPO, arXiv 2505.23585). Of all samples of the step: batch
    (REINFORCE++, arXiv 2501.03262), with which groups of equal rewards have advantages, too. critic: what a critic
    expected before each token (PPO with GAE; see `critic`), so that tokens of a completion have different ones."""
    advantage_std: Annotated[str, OneOf("sample", "population", "mean", "batch", "batch_rewards", "none")] = "sample"
    """What the difference is divided by. Of the group: its standard deviation, sample (divides by G - 1 under the root)
    or population; mean, the mean reward, for rewards that are never negative (MaxRL, arXiv 2602.02710). Of all samples
    of the step: batch, the deviation of the differences (REINFORCE++; with a critic that of all tokens, whose mean is
    subtracted: whitening); batch_rewards, that of the rewards (Lite PPO,
    arXiv 2508.08221). none: nothing (Dr. GRPO)."""
    terms_apart: bool = False
    """Compute the advantages of each term of the reward on their own, add them up with the terms' weights, and divide
    the sums by their deviation over the step (GDPO, arXiv 2601.05242)."""
    supervision: Annotated[str, OneOf("outcome", "process")] = "outcome"
    """What is rewarded: outcome, the completion; or process, its steps, where terms of the reward score them
    (DeepSeekMath, section 4.1.3): the rewards of all steps of a group are normalised together, and a token's advantage
    is the sum over the steps that end at it or after it. A term that scores no steps counts as one step, which ends
    with the completion."""
    objective: Annotated[str, OneOf("ppo", "cispo", "sapo", "gspo", "gspo_token", "gmpo", "vespo")] = "ppo"
    """ppo: the token's importance ratio is clipped (GRPO, DAPO); cispo: the clipped ratio is a constant factor of the
    log-prob (MiniMax-M1, arXiv 2506.13585); sapo: a sigmoid of the ratio in place of the clip (arXiv 2511.20347); gspo:
    the sequence's ratio is clipped (arXiv 2507.18071); gspo_token: so that a token's advantage acts on that token alone
    (section 4.3); gmpo: geometric mean of the sequence's clipped ratios (arXiv 2507.20673); vespo: a function of the
    sequence's ratio, the product of its tokens', is a constant factor of the log-prob (arXiv 2602.10693)."""
    clip_low: Annotated[float, Interval("[0, inf]")] = 0.2
    """Ratio is clipped from below at 1 - clip_low; 1 or more for no bound, as ratios are positive (DeepSeek-R1: 10).
    sapo and vespo have no bounds."""
    clip_high: Annotated[float, Interval("[0, inf]")] = 0.2
    """Ratio is clipped from above at 1 + clip_high (DAPO: 0.28, DeepSeek-R1: 10); inf (.inf in a file) for no bound."""
    dual_clip: Annotated[
        float | None,
        Interval("(1, inf)", "smaller bounds would cut the plain policy gradient; null turns dual clipping off"),
    ] = None
    """Upper bound c > 1 on the loss of negative advantages under ppo, gspo and gspo_token (dual-clip PPO); null for
    none."""
    tau_pos: Annotated[float, Interval("(0, inf)")] = 1.0
    """Temperature of sapo's sigmoid for positive advantages; the larger, the faster the gradient of a token falls as
    its ratio leaves 1."""
    tau_neg: Annotated[float, Interval("(0, inf)")] = 1.05
    """The same for negative advantages."""
    vespo_k_pos: Annotated[float, Interval("(0, inf)")] = 2.0
    """k of vespo's factor rho^k exp(lambda (1 - rho)) of positive advantages, where rho is the sequence's ratio: the
    factor is 1 on policy and largest at k / lambda; the larger both are, the faster it falls."""
    vespo_lambda_pos: Annotated[float, Interval("(0, inf)")] = 3.0
    """lambda of the same."""
    vespo_k_neg: Annotated[float, Interval("(0, inf)")] = 3.0
    """k for negative advantages."""
    vespo_lambda_neg: Annotated[float, Interval("(0, inf)")] = 2.0
    """lambda for negative advantages."""
    off_policy_mask: Annotated[float | None, Interval("[0, inf)")] = None
    """Leaves a sequence with a negative advantage out of the policy term when its tokens have become less likely than
    they were to the engine by more than this on average, in nats (DeepSeek-V3.2, arXiv 2512.02556, section 3.1); null
    for none."""
    entropy_coef: Annotated[float, Interval("[-1, 1]")] = 0.0
    """Factor of the entropy of each token's distribution, which is subtracted from the loss."""
    correction: Annotated[str, OneOf("none", "truncate", "mask")] = "none"
    """What to do about the ratio c of the trainer's to the engine's probability of a token: none; truncate: the policy
    term is multiplied by c, or by the bound that c is beyond (truncated importance sampling: IMPALA, arXiv 1802.01561;
    between engine and trainer: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training,
    2025); mask: it is multiplied by c, and a token whose c is beyond a bound has no loss, but counts in the
    denominators (IcePop, arXiv 2510.18855)."""
    correction_floor: Annotated[float, Interval("[0, 1]")] = 0.0
    """Lower bound of the ratio in `correction`; at most 1, the ratio where engine and trainer agree; 0 for none."""
    correction_cap: Annotated[float, Interval("[1, inf)")] = 2.0
    """Upper bound of the ratio in `correction`; at least 1."""
    correction_level: Annotated[str, OneOf("token", "sequence", "sequence_mean")] = "token"
    """What c is the ratio of: token; sequence, its probability, the product over its tokens; sequence_mean, the
    geometric mean over them. Anything but token needs the old policy's log-probs before the update, a forward pass that
    a step with a single update saves otherwise; so do the three settings below."""
    correction_normalized: bool = False
    """Divide the factors by their mean over the samples of the step that are trained."""
    rejection_floor: Annotated[float, Interval("[0, 1]")] = 0.0
    """Sequences whose geometric mean of c is below have no loss, but count in the denominators; at most 1, 0 for no
    bound. Acts with any `correction`, none included."""
    rejection_cap: Annotated[float, Interval("[1, inf]")] = math.inf
    """The same for those above; at least 1, inf (.inf in a file) for no bound."""
    kl_coef: Annotated[float, Interval("[0, inf)")] = 0.0
    """Coefficient of the KL term to the reference policy; 0 keeps no reference."""
    kl_in: Annotated[str, OneOf("loss", "reward")] = "loss"
    """Where the KL term is: loss; or reward, which is lowered by kl_coef times log(policy / reference) of the whole
    completion before advantages are computed (RLOO, REINFORCE++), and with a critic by each token's at that token, with
    the old policy's log-probs: a forward pass that
    a step with a single update saves otherwise."""
    kl_estimator: Annotated[str, OneOf("k1", "k2", "k3")] = "k3"
    """k1, k2 or k3 (Schulman, Approximating KL Divergence); of the loss."""
    kl_unbiased: bool = False
    """Multiply the estimate by the token's importance ratio, through which the gradient goes as well, so that it is
    that of the divergence (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)."""
    aggregation: Annotated[str, OneOf("sequence_mean", "token_mean", "constant")] = "token_mean"
    """sequence_mean (DeepSeekMath), token_mean (DAPO) or constant (Dr. GRPO)."""
    epochs: Annotated[int, Interval("[1, inf)")] = 1
    """Passes over each rollout."""
    mini_batches: Annotated[int, Interval("[1, inf)")] = 1
    """Optimizer updates per pass."""
    reference_refresh: Annotated[int, Interval("[0, inf)")] = 0
    """Steps between copies of the policy to the reference (DeepSeek-R1: 400); 0 for never."""
