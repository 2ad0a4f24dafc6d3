"""AdamW in the forms that Megatron's optimizers accept: torch's own, and one whose state takes less GPU memory.

`LeanAdamW` keeps moments in bf16, or all of the state in host memory between updates. Megatron's two optimizers for
this are not used: Transformer Engine's FusedAdam, which can have bf16 moments, needs a GPU; HybridDeviceOptimizer
updates on the host what it keeps there, with another Adam. Here the state of one parameter after the other is copied to
the device, used there in float32, and copied back. Results are the same as with a state that stays on the device, and
this works on any device.

DeepSeek-V3 has bf16 moments (arXiv 2412.19437, section 3.3.2), with float32 weights and gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw

from grpo_mega.config.schema import StateConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"
BLOCK = 1 << 28
"""Bytes of the usual block of pinned memory. torch pins powers of two (docs/gpu.md), so tensors share blocks."""


class GroupStepAdamW(torch.optim.AdamW):
    """torch's AdamW with the step count in the parameter group, where Transformer Engine's FusedAdam keeps it.

    Megatron's distributed optimizer supports that form only: with torch's per-parameter step it refuses to save, and
    the parameters of a loaded state share one step tensor, which each of them then advances.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, **_: Any):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False)

    def __setstate__(self, state: dict) -> None:
        # Adam's own method, which every load calls, reads the step of each parameter, and between updates there is
        # none.
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
                # A tensor for each parameter, because torch advances it in place.
                state["step"] = done.clone()
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                del self.state[p]["step"]
            group["step"] = int(group.get("step", 0)) + 1
        return loss


def is_lean(state: StateConfig) -> bool:
    """Whether these settings need a `LeanAdamW`."""
    return state != StateConfig()


class LeanAdamW(torch.optim.AdamW):
    """AdamW that keeps float32 weights and moments of its parameters in its state.

    It is the optimizer inside of Megatron's distributed one, in place of Transformer Engine's FusedAdam in Megatron's
    precision-aware mode: gradients are float32, in `decoupled_grad` of parameters that may be bf16, the number of steps
    is in the groups, and checkpoints read and write the state with `get_unscaled_state` and `set_scaled_state`.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        moments: torch.dtype,
        on_host: bool,
        **_: Any,
    ) -> None:
        """Makes an optimizer whose state `start` creates, with `moments` of this dtype, on the host if `on_host`."""
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._moments, self._on_host = moments, on_host
        self._block = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def start(self) -> None:
        """Creates the state of every parameter: its current weights in float32, and moments of zero.

        Called once Megatron has replaced the parameters by this rank's shards. A float32 parameter is its own float32
        weight, and is not moved.
        """
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {name: self._empty(p, self._moments).zero_() for name in MOMENTS}
                self.state[p][MASTER] = p if p.dtype is torch.float32 else self._empty(p, torch.float32).copy_(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter by its `decoupled_grad`."""
        devices = set()
        for group in self.param_groups:
            done = int(group.get("step", 0))
            for p in group["params"]:
                self._update(p, group, done)
                devices.add(p.device)
            group["step"] = done + 1
        for device in devices:
            if self._on_host and device.type == "cuda":
                # Copies to the host are asynchronous, and the next reader of the state must find it complete.
                torch.cuda.synchronize(device)

    def _update(self, p: torch.Tensor, group: dict[str, Any], done: int) -> None:
        kept, on_gpu = self.state[p], p.device.type == "cuda"
        # Converted on the device: a copy that also converts would do it on the host, through memory that is not pinned.
        here = {name: value.to(p.device, non_blocking=True).float() for name, value in kept.items()}
        adamw(
            [here[MASTER]],
            [p.decoupled_grad],  # type: ignore[attr-defined]
            [here["exp_avg"]],
            [here["exp_avg_sq"]],
            [],
            [torch.full((), float(done), device=p.device)],
            foreach=False,
            fused=on_gpu,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name, value in kept.items():
            # A part that is float32 on the device was updated in place: `to` and `float` made no copy of it.
            if here[name] is not value:
                value.copy_(here[name].to(value.dtype), non_blocking=True)
        if here[MASTER] is not p:
            p.copy_(here[MASTER])

    def get_unscaled_state(self, p: torch.Tensor, name: str) -> torch.Tensor:
        """A part of a parameter's state in float32, as a checkpoint has it."""
        return self.state[p][name].float()

    @torch.no_grad()
    def set_scaled_state(self, p: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """Replaces a part of a parameter's state by one from a checkpoint."""
        self.state[p][name].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the settings of the groups; Megatron sets the state itself, part by part."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})

    def _empty(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor for a part of a parameter's state, in the memory where the state is kept."""
        if not self._on_host or p.device.type != "cuda":
            return torch.empty_like(p, dtype=dtype)
        # Parts begin at multiples of 256 bytes: memory can be viewed as another dtype only from a multiple of its size.
        size = -(-p.numel() * dtype.itemsize // 256) * 256
        if size > len(self._block):
            self._block = torch.empty(max(BLOCK, 1 << (size - 1).bit_length()), dtype=torch.uint8, pin_memory=True)
        taken, self._block = self._block[:size], self._block[size:]
        return taken[: p.numel() * dtype.itemsize].view(dtype).view(p.shape)
