"""Trains with and without leaving the device in between, in one process group; started by run_ranks.

Usage: offload_job.py FOLDER NAME... ; every rank prints what it found in each case, as JSON on its last line.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from grpo_mega import platform

HERE = platform.start()

from megatron.core import parallel_state  # noqa: E402
from squared_error import squared_error  # noqa: E402

from grpo_mega.algorithm.objective import negative_log_likelihood  # noqa: E402
from grpo_mega.checkpoint import checkpoint  # noqa: E402
from grpo_mega.colocation.offload import TrainerMemory  # noqa: E402
from grpo_mega.config.schema import LayoutConfig, LoRAConfig, ModelConfig, MoEConfig, OptimizerConfig  # noqa: E402
from grpo_mega.models.megatron.packed import PackedTokens  # noqa: E402
from grpo_mega.models.model import Model  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.reference import ReferencePolicy  # noqa: E402
from grpo_mega.models.scalar import ScalarModel  # noqa: E402
from grpo_mega.models.topology import Topology, join_layout  # noqa: E402
from grpo_mega.rollout.embedded import EmbeddedEngine  # noqa: E402
from grpo_mega.rollout.engine import SamplingParams  # noqa: E402
from grpo_mega.rollout.stream import generate  # noqa: E402
from grpo_mega.types import Batch, Prompt, pack_tokens  # noqa: E402

DENSE = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, ffn_hidden=128, context=32, init_std=0.1)
TIED = replace(DENSE, tie_embeddings=True)
MOE = replace(DENSE, moe=MoEConfig(experts=4, ffn_hidden=32, shared_ffn_hidden=32))
PLAIN = OptimizerConfig(lr=0.01, weight_decay=0.1)
SHARDED = replace(PLAIN, distributed=True, overlap=True)
ALONE, EP2, PP2 = LayoutConfig(), LayoutConfig(ep=2), LayoutConfig(pp=2)
VOCAB = 26
BIG_VOCAB = 50_000
"""Tokens whose embedding takes 12 MiB."""
MIB = 2**20
UPDATES = 3
RESUMED = "ep2 bf16 distributed"


@dataclass(frozen=True)
class Case:
    model: ModelConfig
    layout: LayoutConfig
    optimizer: OptimizerConfig
    lora: LoRAConfig | None = None

    def policy(self, topology: Topology) -> Policy:
        policy = Policy(self.model, self.layout, VOCAB, topology, HERE, self.optimizer, self.lora)
        policy.initialize(seed=3)
        policy.use_optimizer(self.optimizer)
        return policy

    def critic(self, topology: Topology) -> ScalarModel:
        """A second model that is trained, of another size than the policy."""
        model = replace(self.model, kv_heads=4)
        critic = ScalarModel("critic", model, self.layout, VOCAB, topology, HERE, optimizer=self.optimizer)
        critic.initialize(seed=4)
        critic.use_optimizer(self.optimizer)
        return critic

    def judge(self, topology: Topology, vocabulary: int = VOCAB) -> ScalarModel:
        """A model that is never trained."""
        judge = ScalarModel("reward model", self.model, self.layout, vocabulary, topology, HERE, optimizer=None)
        judge.initialize(seed=5)
        return judge

    def models(self, topology: Topology) -> Models:
        policy = self.policy(topology)
        return Models(policy, ReferencePolicy(policy), self.critic(topology), self.judge(topology))


class Models(NamedTuple):
    """The policy first, whose weights engines are sent."""

    policy: Policy
    reference: ReferencePolicy
    critic: ScalarModel
    judge: ScalarModel


CASES = {
    "plain": Case(DENSE, ALONE, PLAIN),
    "distributed": Case(DENSE, ALONE, SHARDED),
    "bf16": Case(replace(DENSE, dtype="bf16"), ALONE, PLAIN),
    "bf16 distributed": Case(replace(DENSE, dtype="bf16"), ALONE, SHARDED),
    "ep2": Case(MOE, EP2, PLAIN),
    "ep2 bf16 distributed": Case(replace(MOE, dtype="bf16"), EP2, SHARDED),
    "pp2 tied": Case(TIED, PP2, PLAIN),
    "adapters": Case(replace(MOE, moe=replace(MOE.moe, bias_update_rate=0.0)), EP2, SHARDED, LoRAConfig(rank=4)),
}


def batch_of(model: Model, seed: int) -> Batch:
    """The model's replica's share of nine random sequences."""
    random = torch.Generator().manual_seed(seed)
    lengths = [7, 20, 2, 11, 5, 5, 16, 3, 9]
    tokens = [torch.randint(VOCAB, (n,), generator=random).tolist() for n in lengths]
    packed = pack_tokens(tokens, [1, 6, 1, 4, 2, 4, 1, 2, 8])
    return model.share(packed.with_(weight=torch.rand(sum(lengths), generator=random) * packed.mask / 50))


def update(policy: Policy, number: int) -> dict[str, float]:
    return policy.update(batch_of(policy, number), negative_log_likelihood, lr=0.01).metrics


def state(*models: Model | ReferencePolicy) -> list[torch.Tensor]:
    """Copies of every number that training goes on from."""
    tensors: list[torch.Tensor] = []
    for model in models:
        if isinstance(model, ReferencePolicy):
            tensors += model.held
            continue
        tensors += [*model.chunks.parameters(), *model.chunks.buffers()]
        for part in getattr(model.optimizer, "chained_optimizers", [model.optimizer] if model.optimizer else []):
            for group in part.optimizer.param_groups:
                for p in group["params"]:
                    tensors += [p, *part.optimizer.state[p].values()]
    return [tensor.detach().clone() for tensor in tensors]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def train(models: Models, between: Callable[[int], None]) -> list[Any]:
    """All that is seen in some updates, with `between` after each of them."""
    policy, reference, critic, judge = models
    seen: list[Any] = []
    for number in range(UPDATES):
        seen.append(torch.tensor([*update(policy, number).values()]))
        batch = batch_of(policy, number)
        seen.append(torch.tensor([*critic.update(batch, squared_error(judge.values(batch)), lr=0.01).metrics.values()]))
        between(number)
        seen += [reference.logprobs(batch_of(policy, 9), 0.9), policy.logprobs(batch_of(policy, 9), 0.9)]
        seen += [critic.values(batch_of(policy, 9)), judge.values(batch_of(policy, 9))]
        if number == 0:
            reference.refresh()
    return seen


def storages() -> dict[int, torch.UntypedStorage]:
    """All storages that tensors of this process have, but for those of uint8: the copies on the host."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    return {s._cdata: s for s in (t.untyped_storage() for t in tensors if t.dtype is not torch.uint8)}


def leaves_and_comes_back(name: str, case: Case, topology: Topology, folder: Path) -> dict[str, Any]:
    """Of models that start alike some train in peace, the others leave the device after every update."""
    in_peace = case.models(topology)
    expected = [*train(in_peace, lambda _: None), *state(*in_peace)]

    # Held, so that none of them goes and leaves its address to a new one: what earlier models left may go at any time.
    earlier = storages()

    def in_new_tensors() -> int:
        return sum(storage.nbytes() for address, storage in storages().items() if address not in earlier)

    models = case.models(topology)
    policy, _, critic, judge = models
    memory = TrainerMemory(models)
    found: dict[str, Any] = {"held": [], "away": [], "leaving": []}

    def leave(number: int) -> None:
        if number == 1 and name == RESUMED:  # its tensors come from a checkpoint
            checkpoint.save(folder / name, [policy], {})
            checkpoint.load(folder / name, [policy])
        found["held"].append(memory.held())
        found["leaving"].append(memory.leaving(keep_weights=True))
        if number == 0:
            found["taken"] = in_new_tensors()
        if number == 2:  # in two stages
            scored = policy.logprobs(batch_of(policy, 1), 1.0)
            memory.offload(keep_weights=True)
            found["staying"] = memory.held()
            found["readable"] = torch.equal(policy.logprobs(batch_of(policy, 1), 1.0), scored)
            found["refused between"] = [
                answer(lambda: update(policy, 1)),
                answer(lambda: memory.offload(keep_weights=True)),
            ]
            found["others refused between"] = [
                answer(lambda: critic.values(batch_of(policy, 1))),
                answer(lambda: judge.values(batch_of(policy, 1))),
            ]
        memory.offload()
        found["away"].append(memory.held())
        if number == 0:
            looks = []
            for _ in range(12):  # gloo's threads may still hold the last messages; what stays for good is in every look
                dist.barrier()
                looks.append(in_new_tensors())
            found["left"] = min(looks)
        if number == 1 and name == RESUMED:
            found["refused"] = uses(models, memory, folder)
        memory.onload()

    seen = train(models, leave)
    return found | {"same": same([*seen, *state(*models)], expected), "compared": len(expected)}


def uses(models: Models, memory: TrainerMemory, folder: Path) -> dict[str, str]:
    """What each way to use offloaded models is answered with."""
    policy, reference, critic, judge = models
    engine = EmbeddedEngine(policy, str, concurrent_sequences=8)
    sampling = SamplingParams(max_new_tokens=4, stop_ids=(2,))
    packed = PackedTokens.of_sequences(torch.tensor([3]), policy.topology.row_multiple)
    tokens = torch.zeros(len(packed.positions), dtype=torch.int64)
    calls: dict[str, Callable[[], Any]] = {
        "logprobs": lambda: policy.logprobs(batch_of(policy, 1), 1.0),
        "update": lambda: update(policy, 1),
        "hidden_states": lambda: policy.hidden_states(tokens, packed),
        "parameters": policy.parameters,
        "initialize": lambda: policy.initialize(3),
        "use_optimizer": lambda: policy.use_optimizer(PLAIN),
        "reference": lambda: reference.logprobs(batch_of(policy, 1), 1.0),
        "refresh": reference.refresh,
        "new reference": lambda: ReferencePolicy(policy),
        "generate": lambda: generate(engine, [Prompt("p", (3, 4), "", "", "")], 2, sampling, version=1),
        "critic values": lambda: critic.values(batch_of(policy, 1)),
        "critic update": lambda: critic.update(batch_of(policy, 1), squared_error(torch.zeros(78)), lr=0.1),
        "reward model values": lambda: judge.values(batch_of(policy, 1)),
        "save": lambda: checkpoint.save(folder / "refused", [policy, reference], {}),
        "offload": memory.offload,
    }
    return {name: answer(call) for name, call in calls.items()}


def answer(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def device_without_room(topology: Topology) -> dict[str, Any]:
    """Coming back fails half-way, as the engine has the memory, and succeeds later."""
    policy, large = CASES["plain"].policy(topology), CASES["plain"].judge(topology, BIG_VOCAB)
    update(policy, 0)
    memory, expected = TrainerMemory([policy, large]), state(policy, large)
    memory.offload()
    _, no_limit = limits = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 4 * MIB, no_limit))
    engine: list[torch.Tensor] = []  # has also what the C library keeps of memory that was freed
    while answer(lambda: engine.append(torch.empty(2 * MIB, dtype=torch.uint8))) == "accepted":
        pass
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 8 * MIB, no_limit))  # room for the policy
    refused = answer(memory.onload)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    used = answer(lambda: policy.logprobs(batch_of(policy, 0), 1.0))
    partly = sum(p.untyped_storage().nbytes() > 0 for p in memory._away[0].chunks.parameters())
    memory.onload()
    found = {"refused": refused, "used": used, "partly": partly, "same": same(state(policy, large), expected)}
    return found | {"again": answer(memory.onload)}


def memory_of_another_library(topology: Topology) -> dict[str, Any]:
    """A weight that cannot be freed is refused, and the policy goes on as if nobody had asked."""
    twin, policy = (CASES["plain"].policy(topology) for _ in range(2))
    weight = next(iter(policy.chunks.parameters()))
    weight.data = torch.from_numpy(weight.data.numpy().copy())
    memory, held = TrainerMemory([policy]), TrainerMemory([twin]).held()
    refused = answer(memory.offload)
    twice = answer(lambda: TrainerMemory([policy, twin]))
    for trained in (policy, twin):
        update(trained, 0)
    same_still = same(state(policy), state(twin))
    return {
        "refused": refused,
        "twice": twice,
        "same": same_still,
        "kept": memory.held() == held,
        "bytes": weight.nbytes,
    }


OTHERS = {"no room": device_without_room, "fixed": memory_of_another_library}


def main() -> None:
    gc.freeze()  # what imports have made need not be looked through for tensors
    folder, *names = sys.argv[1:]
    platform.join_processes(HERE)
    found: dict[str, Any] = {}
    for layout in (ALONE, EP2, PP2):
        topology = join_layout(layout, seed=0)
        for name in names:
            if name in OTHERS and layout == ALONE:
                found[name] = OTHERS[name](topology)
            elif name in CASES and CASES[name].layout == layout:
                found[name] = leaves_and_comes_back(name, CASES[name], topology, Path(folder))
        parallel_state.destroy_model_parallel()
    print("\n" + json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
