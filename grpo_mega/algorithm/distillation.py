"""On-policy distillation as a policy gradient: advantages from the teacher's log-probs of the student's samples.

The reverse KL of a sequence, E_student[sum_t log student(y_t) - log teacher(y_t)], is estimated from the sampled tokens
(k1). Each token is credited only with its own term, not with later ones, as in Thinking Machines, "On-Policy
Distillation" (2025), and in the on-policy phase of Qwen3 (arXiv 2505.09388, section 4.5); the gradient through the
later terms is what MiniLLM (arXiv 2306.08543, section 2.2) calls long-term and estimates as well.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def distillation_advantages(
    student: Tensor, teacher: Tensor, rewarded: Tensor, mask: Tensor, coef: float, reward_coef: float
) -> Tensor:
    """Advantage of every masked-in token: coef * (log teacher - log student) + reward_coef * A.

    Args:
        student: [T] log-probs of the tokens under the policy that sampled them.
        teacher: [T] log-probs of these tokens under the teacher.
        rewarded: [T] A, advantages from rewards.
        mask: [T] bool, sampled tokens.
        coef: Factor of the teacher's term.
        reward_coef: Factor of the rewards' term.

    Returns:
        [T] float32, 0 outside of `mask`.
    """
    advantage = coef * (teacher.double() - student.double()) + reward_coef * rewarded.double()
    return torch.where(mask, advantage, 0.0).float()


def distillation_metrics(
    student: Tensor, teacher: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Means over the masked-in tokens of all ranks of `group`, summed in float64; all must call this.

    Args:
        student: [T] log-probs of the sampled tokens under the policy that sampled them.
        teacher: [T] log-probs of these tokens under the teacher.
        mask: [T] bool, sampled tokens.
        group: Group of ranks with different tokens, for CPU tensors; None for this rank's tokens only.

    Returns:
        "reverse_kl", the estimate k1, log(student / teacher), whose mean over few tokens may be negative; and
        "teacher_logprob". Both 0 where there are no tokens.
    """
    of_student, of_teacher = student[mask].double(), teacher[mask].double()
    count = torch.tensor(float(len(of_teacher)), dtype=torch.float64)
    sums = torch.stack([(of_student - of_teacher).sum(), of_teacher.sum(), count])
    if group is not None:
        dist.all_reduce(sums, group=group)
    reverse_kl, logprob = (sums[:2] / sums[2].clamp(min=1)).tolist()
    return {"reverse_kl": reverse_kl, "teacher_logprob": logprob}
