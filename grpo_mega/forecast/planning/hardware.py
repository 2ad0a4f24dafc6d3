"""Data sheets of GPUs and links, and the shares of them that others measured: the planner's constants.

This project measured none of them. A share of 1 would be the data sheet. The table of docs/planner.md has the published
source of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mega.config.schema import ClusterConfig

PCIE = 55e9
"""Bytes per second between a GPU and pinned memory of its machine, one way: PCIe 5.0 x16."""


@dataclass(frozen=True)
class GPU:
    """A GPU's data sheet, without sparsity.

    Attributes:
        flops: Operations per second in bf16.
        memory: Bytes per second of its memory.
        nvlink: Bytes per second to GPUs of the same machine, one way.
        network: Bytes per second to other machines, one way, of the GPU's own adapter.
        host: Bytes per second to pinned memory of the machine, one way.
        domain: Number of GPUs that NVLink connects; 0 for those of one machine.
    """

    flops: float
    memory: float
    nvlink: float
    network: float = 50e9
    host: float = PCIE
    domain: int = 0


GPUS = {
    "a100": GPU(flops=312e12, memory=2.04e12, nvlink=300e9, network=25e9, host=PCIE / 2),
    "h800": GPU(flops=989e12, memory=3.35e12, nvlink=200e9),
    "h100": GPU(flops=989e12, memory=3.35e12, nvlink=450e9),
    "h200": GPU(flops=989e12, memory=4.8e12, nvlink=450e9),
    "h20": GPU(flops=148e12, memory=4.0e12, nvlink=450e9),
    "b200": GPU(flops=2250e12, memory=8.0e12, nvlink=900e9),
    "gb200": GPU(flops=2450e12, memory=8.0e12, nvlink=900e9, host=200e9, domain=72),
    "gb300": GPU(flops=2450e12, memory=8.0e12, nvlink=900e9, network=100e9, host=200e9, domain=72),
}
"""`cluster.gpu` -> its data sheet (NVIDIA's); adapters of 400 Gbit/s, of A100 machines 200, of GB300's 800."""


@dataclass(frozen=True)
class Rates:
    """Shares of the data sheet that software reaches, and its overheads.

    The defaults are for this project's stack: Megatron's layers without CUDA graphs, an exchange of experts that
    nothing hides, SGLang.

    Attributes:
        matmul: Share of `GPU.flops` in large products of matrices.
        grouped: The same in those of routed experts.
        attention: The same in attention's scores and values, forward and backward.
        memory: Share of `GPU.memory` in elementwise operations.
        traffic: Bytes that these move in a forward pass per byte that a layer keeps for its backward pass.
        nvlink, network, host: Shares of the links' bytes per second.
        launch: Seconds of one launch on the host, Python included.
        dense_launches, expert_launches: Launches of a layer's forward pass.
        narrowed: Launches with `layout.fp8` over launches without.
        depth: Inputs at which an 8-bit product reaches half its largest speed. Starting and ending a tile of the result
            takes as long in 16 bits, where it weighs half as much.
        wait: Seconds that a layer of experts waits while the host reads how many tokens each expert has.
        hidden: Share of the experts' exchange that computation hides.
        once: Whether a token crosses to each machine once (DeepEP, HybridEP), not once per expert there, regardless of
            `layout.dispatch`.
        imbalance: Tokens of the busiest rank's experts over the average.
        update: Seconds of an update besides its passes: norm of the gradient, metrics, the first launch.
        decode_memory: Share of `GPU.memory` that decoding reaches.
        decode_matmul: Share of `GPU.flops` that prompts and large batches reach in an engine.
        decode_host: Seconds of an engine's step on the host: scheduling, launching graphs, sampling.
        reduce_inside, reduce_across: Seconds of a small all-reduce within a machine, and across.
        deepep: Seconds of a layer's exchange of tokens by DeepEP's kernels of low latency.
        deepep_network: Bytes per second that they reach.
        accepted: Tokens of a step of an engine that drafts with a prediction module.
        draft: Seconds that drafting and checking add to a step.
        push: Bytes per second at which weights pass through a GPU on their way to engines.
        push_apart: The same to engines on GPUs of their own, over the network.
        push_fixed: Seconds of a push of weights besides its bytes.
        turn: Seconds of a step outside of phases: engines wake and sleep, memory is mapped, rewards, records.
    """

    matmul: float = 0.62
    grouped: float = 0.45
    attention: float = 0.45
    memory: float = 0.75
    traffic: float = 3.0
    nvlink: float = 0.65
    network: float = 0.70
    host: float = 0.45
    launch: float = 15e-6
    dense_launches: int = 30
    expert_launches: int = 85
    narrowed: float = 1.54
    depth: float = 700.0
    wait: float = 0.5e-3
    hidden: float = 0.0
    once: bool = False
    imbalance: float = 1.3
    update: float = 0.1
    decode_memory: float = 0.70
    decode_matmul: float = 0.40
    decode_host: float = 6.4e-3
    reduce_inside: float = 15e-6
    reduce_across: float = 60e-6
    deepep: float = 40e-6
    deepep_network: float = 45e9
    accepted: float = 1.8
    draft: float = 4e-3
    push: float = 20e9
    push_apart: float = 90e9
    push_fixed: float = 2.0
    turn: float = 12.0


RATES = Rates()


@dataclass(frozen=True)
class Machines:
    """The GPUs of a run.

    Attributes:
        gpu: Data sheet of each.
        gpus: Number of GPUs.
        domain: Number of GPUs that NVLink connects.
        rates: What software reaches.
    """

    gpu: GPU
    gpus: int
    domain: int
    rates: Rates = RATES

    def link(self, ranks: int) -> float:
        """Bytes per second and GPU that collectives reach among so many consecutive ranks."""
        if ranks <= self.domain:
            return self.gpu.nvlink * self.rates.nvlink
        return self.gpu.network * self.rates.network


def machines_of(cluster: ClusterConfig, gpus: int, rates: Rates = RATES) -> Machines | None:
    """The GPUs of a planned run; None if `cluster.gpu` names none."""
    if cluster.gpu is None:
        return None
    gpu = GPUS[cluster.gpu]
    return Machines(gpu, gpus, gpu.domain or cluster.gpus_per_node, rates)
