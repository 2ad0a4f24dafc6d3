"""torch's AdamW in the form that Megatron's optimizers expect, for machines without Transformer Engine and Apex."""

from __future__ import annotations

from typing import Any

import torch


class GroupStepAdamW(torch.optim.AdamW):
    """torch's AdamW with the step count in the parameter group, where Transformer Engine's FusedAdam keeps it.

    Megatron's distributed optimizer supports that form only: with torch's per-parameter step it refuses to save, and
    the parameters of a loaded state share one step tensor, which each of them then advances.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, **_: Any):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False)

    def __setstate__(self, state: dict) -> None:
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One AdamW update of every group."""
        for group in self.param_groups:
            done = torch.tensor(float(group.get("step", 0)))
            for p in group["params"]:
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] = done.clone()
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                del self.state[p]["step"]
            group["step"] = int(group.get("step", 0)) + 1
        return loss
