"""An exponential moving average of the policy's weights, with which it is evaluated.

It lies in the host's memory, in float32, as DeepSeek-V3's does (arXiv 2412.19437, section 3.2.3): it takes nothing of
the device, and four bytes of the host for each trained parameter that the rank holds, and those of a copy of the
weights during an evaluation.
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
    """The average of the weights that a policy had after its updates; of one with adapters, of these alone.

    Buffers, such as the bias that balances the experts, are not averaged: they are used as they are.
    """

    role = "average"

    def __init__(self, policy: Policy, decay: float) -> None:
        """Begins at the policy's weights as they are now; `decay` is the average's own share after an update."""
        self.policy, self._decay = policy, decay
        policy.gather_parameters()
        self._held = [p.detach().to(HOST, torch.float32, copy=True) for p in self._live]

    @property
    def topology(self) -> Topology:
        """The policy's topology."""
        return self.policy.topology

    @property
    def _live(self) -> list[torch.nn.Parameter]:
        """The policy's parameters that are trained; read each time, because an offloaded policy has none."""
        return [p for p in self.policy.chunks.parameters() if p.requires_grad]

    @torch.no_grad()
    def refresh(self) -> None:
        """Begins again at the policy's weights as they are now."""
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
        """A context in which the policy's model has the average; afterwards it has its own weights, bit for bit."""
        self.policy.gather_parameters()
        own = [p.detach().to(HOST, copy=True) for p in self._live]  # on the host: an engine may need the device
        self._write(self._held)
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # of a policy that an error has left off the device; the run ends with that
                self._write(own)
            raise
        self._write(own)

    @contextmanager
    def saved(self) -> Iterator[None]:
        """A context in which the parameters of the policy's model are the average itself, to be saved or replaced.

        The model cannot compute with it. What it saves and loads is narrowed to what is averaged.
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
    """A parameter with this data and with what Megatron notes about the other one.

    The other one's own `data` cannot be replaced by such of another dtype: autograd would drop the hooks that reduce
    its gradients.
    """
    made = torch.nn.Parameter(data, requires_grad=False)
    vars(made).update(vars(parameter))
    return made


def _replace(model: torch.nn.Module, old: list[torch.nn.Parameter], new: list[torch.nn.Parameter]) -> None:
    """Replaces parameters wherever they stand in the model: tied ones stand in it twice."""
    replacement = {id(one): other for one, other in zip(old, new, strict=True)}
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if id(parameter) in replacement:
                setattr(module, name, replacement[id(parameter)])


Copy = ReferencePolicy | AveragedPolicy
"""A copy of the policy's weights with a role of its own; checkpoints hold it beside the models."""
