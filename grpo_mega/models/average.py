"""Exponential moving average of the policy's weights, for evaluations.

It is kept in host memory, in float32, as in DeepSeek-V3 (arXiv 2412.19437, section 3.2.3): no device memory, four bytes
of host memory for each trained parameter of the rank, and a copy of the weights during an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from grpo_mega.models.policy import Policy
from grpo_mega.models.reference import ReferencePolicy
from grpo_mega.models.topology import Topology

HOST = torch.device("cpu")


class AveragedPolicy:
    """Average of a policy's weights over its updates; for a policy with adapters, of the adapters only.

    Buffers, such as the experts' balancing bias, are not averaged: the current ones are used.
    """

    role = "average"

    def __init__(self, policy: Policy, decay: float) -> None:
        """Starts at the policy's current weights; `decay` is the weight of the average in an update."""
        self.policy, self._decay = policy, decay
        policy.gather_parameters()
        self._held = [p.detach().to(HOST, torch.float32, copy=True) for p in self._live]

    @property
    def topology(self) -> Topology:
        """The policy's topology."""
        return self.policy.topology

    @property
    def _live(self) -> list[torch.nn.Parameter]:
        """The policy's trained parameters; looked up each time, because an offloaded policy has none."""
        return [p for p in self.policy.chunks.parameters() if p.requires_grad]

    @torch.no_grad()
    def refresh(self) -> None:
        """Restarts at the policy's current weights."""
        self.policy.gather_parameters()
        for held, live in zip(self._held, self._live, strict=True):
            held.copy_(live)

    @torch.no_grad()
    def follow(self) -> None:
        """Moves towards the policy's weights after an update: average = decay * average + (1 - decay) * weights."""
        self.policy.gather_parameters()
        for held, live in zip(self._held, self._live, strict=True):
            held.lerp_(live.to(HOST, torch.float32), 1 - self._decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the policy's model has the averaged weights; then the policy's again, bit for bit."""
        self.policy.gather_parameters()
        # Kept on the host, because an engine may need the device memory meanwhile.
        own = [p.detach().to(HOST, copy=True) for p in self._live]
        self._write(self._held)
        try:
            yield
        except BaseException:
            # The error ends the run. It may have left the policy offloaded, and failing to write to it must not hide
            # the error.
            with suppress(RuntimeError):
                self._write(own)
            raise
        self._write(own)

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Context in which the parameters of the policy's model are the average itself, to be saved or loaded.

        The model cannot compute meanwhile. Saving and loading are restricted to averaged parameters.
        """
        live = self._live
        stand_ins = [_like(p, held) for p, held in zip(live, self._held, strict=True)]
        with self.policy.chunks.adapters_alone() if self.policy.lora else nullcontext():
            _replace(self.policy.chunks, live, stand_ins)
            try:
                yield
            finally:
                _replace(self.policy.chunks, stand_ins, live)

    @torch.no_grad()
    def _write(self, weights: list[torch.Tensor]) -> None:
        for live, weight in zip(self._live, weights, strict=True):
            live.copy_(weight)


def _like(parameter: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """A parameter with this data and Megatron's attributes of another parameter.

    The `data` of the other parameter cannot be replaced by data of another dtype: autograd would drop the hooks that
    reduce its gradients.
    """
    stand_in = torch.nn.Parameter(data, requires_grad=False)
    vars(stand_in).update(vars(parameter))
    return stand_in


def _replace(model: torch.nn.Module, old: list[torch.nn.Parameter], new: list[torch.nn.Parameter]) -> None:
    """Replaces parameters wherever they occur in the model; tied ones occur twice."""
    replacement = {id(one): other for one, other in zip(old, new, strict=True)}
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if id(parameter) in replacement:
                setattr(module, name, replacement[id(parameter)])


Copy = ReferencePolicy | AveragedPolicy
"""A copy of the policy's weights under another role, stored in checkpoints in addition to the models."""
