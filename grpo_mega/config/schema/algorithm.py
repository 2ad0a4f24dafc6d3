"""GRPO and its variants, and the critic of PPO."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from grpo_mega.config.limits import Interval, OneOf, With

CORRECTED = With("correction", OneOf("truncate", "mask"))
WITH_KL = With("kl_coef", Interval("(0, inf)"))
SAPO = With("objective", OneOf("sapo"))
VESPO = With("objective", OneOf("vespo"))
CLIPPED = With("objective", OneOf("ppo", "cispo", "gspo", "gspo_token", "gmpo"))


@dataclass
class AlgorithmConfig:
    """GRPO (DeepSeekMath, equation 3) and its variants."""

    prompts_per_step: Annotated[int, Interval("[1, inf)")] = 32
    """Prompts sampled per step."""
    group_size: Annotated[int, Interval("[1, inf)")] = 8
    """G, samples per prompt; at least 2 where advantages are relative to the group."""
    groups_without_signal: Annotated[str, OneOf("count", "drop", "refill")] = "count"
    """Groups whose advantages are all 0: equal rewards, or fewer than two samples with a score. count: their sequences
    and tokens count in the denominators of `aggregation`, and are computed for a KL term or an entropy bonus
    (DeepSeekMath, equation 3; Dr. GRPO); without these they are not computed, not even for the balance of experts or
    prediction modules. drop: as if never sampled, so the step is smaller. refill: further prompts are drawn until
    `prompts_per_step` groups have signal (dynamic sampling: DAPO, arXiv 2503.14476, section 3.2)."""
    refill_limit: Annotated[int, Interval("[1, inf)"), With("groups_without_signal", OneOf("refill"))] = 10
    """Most prompts that a step draws to refill, in multiples of `prompts_per_step`; then it learns from the groups it
    has."""
    advantage_baseline: Annotated[str, OneOf("mean", "leave_one_out", "optimal", "batch", "critic")] = "mean"
    """Baseline subtracted from a reward. Of the group: mean (GRPO); leave_one_out, the mean of the others (RLOO, arXiv
    2402.14740); optimal, the mean weighted by length (OPO, arXiv 2505.23585). batch: the mean of the step, with which
    groups of equal rewards have advantages, too (REINFORCE++, arXiv 2501.03262). critic: a critic's value before each
    token (PPO with GAE, see `critic`)."""
    advantage_std: Annotated[str, OneOf("sample", "population", "mean", "batch", "batch_rewards", "none")] = "sample"
    """Divisor of reward minus baseline. Of the group: its standard deviation, sample (G - 1 under the root) or
    population; mean, the mean reward, for rewards that are never negative (MaxRL, arXiv 2602.02710). Of the step:
    batch, the standard deviation of the differences (REINFORCE++; with a critic, over all tokens, whose mean is
    subtracted: whitening); batch_rewards, that of the rewards (Lite PPO, arXiv 2508.08221). none (Dr. GRPO). Except
    with none, rewards within a millionth of the largest count as equal."""
    terms_apart: bool = False
    """Compute advantages for each reward term separately, sum them with the terms' weights, and divide by the sums'
    standard deviation over the step (GDPO, arXiv 2601.05242)."""
    supervision: Annotated[str, OneOf("outcome", "process")] = "outcome"
    """What is rewarded: outcome, the completion; process, its steps (DeepSeekMath, section 4.1.3): the rewards of all
    steps of a group are normalised together, and a token's advantage is the sum over the steps that end at it or after
    it. A term that scores no steps counts as one step, the whole completion."""
    objective: Annotated[str, OneOf("ppo", "cispo", "sapo", "gspo", "gspo_token", "gmpo", "vespo")] = "ppo"
    """ppo: the token's importance ratio is clipped (GRPO, DAPO). cispo: the clipped ratio is a constant factor of the
    log-prob (MiniMax-M1, arXiv 2506.13585). sapo: a sigmoid of the ratio in place of the clip (arXiv 2511.20347). gspo:
    the sequence's ratio is clipped (arXiv 2507.18071). gspo_token: the same, with an advantage for each token (section
    4.3). gmpo: geometric mean of clipped ratios (arXiv 2507.20673). vespo: a function of the product of the tokens'
    ratios is a constant factor of the log-prob (arXiv 2602.10693)."""
    clip_low: Annotated[float, Interval("[0, inf]"), CLIPPED] = 0.2
    """The ratio's lower clip bound is 1 - clip_low; 1 or more for none (DeepSeek-R1: 10)."""
    clip_high: Annotated[float, Interval("[0, inf]"), CLIPPED] = 0.2
    """The ratio's upper clip bound is 1 + clip_high (DAPO: 0.28, DeepSeek-R1: 10); inf (.inf in a file) for none."""
    dual_clip: Annotated[
        float | None,
        Interval("(1, inf)", "smaller bounds would cut the plain policy gradient; null turns dual clipping off"),
        With("objective", OneOf("ppo", "gspo", "gspo_token")),
    ] = None
    """Upper bound on the loss of negative advantages (dual-clip PPO); null for none."""
    tau_pos: Annotated[float, Interval("(0, inf)"), SAPO] = 1.0
    """Temperature of SAPO's sigmoid for positive advantages: how fast a token's gradient falls as its ratio leaves
    1."""
    tau_neg: Annotated[float, Interval("(0, inf)"), SAPO] = 1.05
    """Temperature of SAPO's sigmoid for negative advantages."""
    vespo_k_pos: Annotated[float, Interval("(0, inf)"), VESPO] = 2.0
    """k of VESPO's factor rho^k exp(lambda (1 - rho)) of the sequence's ratio rho, for positive advantages. The factor
    is 1 on policy and largest at k / lambda; larger k and lambda let it fall faster."""
    vespo_lambda_pos: Annotated[float, Interval("(0, inf)"), VESPO] = 3.0
    """lambda of VESPO's factor for positive advantages."""
    vespo_k_neg: Annotated[float, Interval("(0, inf)"), VESPO] = 3.0
    """k of VESPO's factor for negative advantages."""
    vespo_lambda_neg: Annotated[float, Interval("(0, inf)"), VESPO] = 2.0
    """lambda of VESPO's factor for negative advantages."""
    off_policy_mask: Annotated[float | None, Interval("[0, inf)")] = None
    """Leave a sequence with a negative advantage out of the policy term if the mean log-prob of its tokens has fallen
    by more than this since sampling, in nats (DeepSeek-V3.2, arXiv 2512.02556, section 3.1); null for never."""
    entropy_coef: Annotated[float, Interval("[-1, 1]")] = 0.0
    """Coefficient of the entropy bonus: each token's entropy times this is subtracted from the loss."""
    correction: Annotated[str, OneOf("none", "truncate", "mask")] = "none"
    """Correction for c, a token's probability under the old policy over that with which the engine sampled it, possibly
    with earlier weights (`rollout.slice_tokens`, `rollout.ahead`): none; truncate: the policy term is multiplied by c,
    at most the bound (truncated importance sampling: IMPALA, arXiv 1802.01561; Yao et al., Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training, 2025); mask: it is multiplied by c, and a token whose c is beyond a
    bound has no loss, but counts in the denominators (IcePop, arXiv 2510.18855)."""
    correction_floor: Annotated[float, Interval("[0, 1]"), CORRECTED] = 0.0
    """Lower bound of c; 0 for none."""
    correction_cap: Annotated[float, Interval("[1, inf)"), CORRECTED] = 2.0
    """Upper bound of c."""
    correction_level: Annotated[str, OneOf("token", "sequence", "sequence_mean"), CORRECTED] = "token"
    """What has a ratio c: token, sequence (the product over its tokens) or sequence_mean (their geometric mean). The
    last two need the old policy's log-probs before the update, a forward pass that a step with a single update
    otherwise saves; so do correction_normalized, rejection_floor and rejection_cap."""
    correction_normalized: Annotated[bool, CORRECTED] = False
    """Divide the correction factors by their mean over the trained samples of the step."""
    rejection_floor: Annotated[float, Interval("[0, 1]")] = 0.0
    """Sequences whose geometric mean of c is below this have no loss, but count in the denominators; 0 for no bound.
    Applies with any `correction`, including none."""
    rejection_cap: Annotated[float, Interval("[1, inf]")] = math.inf
    """The same for sequences above this; inf (.inf in a file) for no bound."""
    kl_coef: Annotated[float, Interval("[0, inf)")] = 0.0
    """Coefficient of the KL term; with 0 no reference policy is kept."""
    kl_in: Annotated[str, OneOf("loss", "reward"), WITH_KL] = "loss"
    """loss: the KL term is part of the loss. reward: kl_coef times log(policy / reference) is subtracted from the
    reward before advantages are computed, for the whole completion (RLOO, REINFORCE++) or, with a critic, at each
    token. The latter needs the old policy's log-probs, a forward pass that a step with a single update otherwise
    saves."""
    kl_estimator: Annotated[str, OneOf("k1", "k2", "k3")] = "k3"
    """Estimator of the KL term in the loss: k1, k2 or k3 (Schulman, Approximating KL Divergence)."""
    kl_unbiased: Annotated[bool, WITH_KL] = False
    """Multiply the KL estimate by the token's importance ratio, so that its gradient is the divergence's
    (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)."""
    aggregation: Annotated[str, OneOf("sequence_mean", "token_mean", "constant")] = "token_mean"
    """Aggregation of token losses: sequence_mean (DeepSeekMath), token_mean (DAPO) or constant (Dr. GRPO)."""
    epochs: Annotated[int, Interval("[1, inf)")] = 1
    """Passes over each rollout."""
    mini_batches: Annotated[int, Interval("[1, inf)")] = 1
    """Optimizer updates per pass."""
    reference_refresh: Annotated[int, Interval("[0, inf)"), WITH_KL] = 0
    """Steps between copies of the policy to the reference (DeepSeek-R1: 400); 0 for never."""


@dataclass
class CriticConfig:
    """The critic of PPO: a model of the policy's architecture that estimates the future rewards before every token. It
    has the settings of `optimizer`, except for the learning rate."""

    lr: Annotated[float, Interval("(0, inf)")] = 1e-5
    """Peak learning rate; its schedule is the policy's."""
    gamma: Annotated[float, Interval("[0, 1]")] = 1.0
    """Discount of rewards (GAE, arXiv 1506.02438)."""
    lam: Annotated[float, Interval("[0, 1]")] = 0.95
    """lambda of GAE: from 0, the critic's one-step error, to 1, the sum of rewards less the value."""
    clip: Annotated[float | None, Interval("(0, inf)")] = 0.2
    """Clip range of a value around its value before the step's updates; null for none."""
    alone_steps: Annotated[int, Interval("[0, inf)")] = 0
    """First steps that train only the critic (VC-PPO, arXiv 2503.01491, section 3.1), which starts with the policy's
    body and values of 0."""
