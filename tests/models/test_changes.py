"""Every change to Megatron is needed: the test that it names is there, and fails without it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from ranks import REPOSITORY, results, run_ranks
from small_models import MODELS
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_kernels import LossOptions
from grpo_mega.algorithm.objective import grpo_loss
from grpo_mega.config.schema import OptimizerConfig, YarnConfig
from grpo_mega.models.megatron import changes
from grpo_mega.models.megatron.layers import GatedMLP, WholeColumnLinear, WholeRowLinear
from grpo_mega.models.megatron.rotary import PackedYarnEmbedding
from grpo_mega.models.policy import Policy
from grpo_mega.types import Batch

CHANGES = {
    change.name: change
    for table in (
        changes.TO_SPECIFICATION,
        changes.TO_CHUNK,
        changes.TO_PARALLEL_CHUNK,
        changes.BEFORE_OPTIMIZER,
        changes.TO_OPTIMIZER,
    )
    for change in table
}
IN_JOBS = {
    "rms_norm", "latent_key_gradient", "expert_marks", "expert_bias_marks", "padding_counts", "group_step_adamw",
    "gradients_in_place", "own_shards",
}  # fmt: skip
"""Changes whose tests start processes, which would have them all the same; tests/parity/test_mutations.py leaves out
`latent_key_gradient` and `expert_bias_marks`, the others were left out by hand."""
ALONE = [name for name in CHANGES if name not in IN_JOBS]

MakePolicy = Callable[..., Policy]


@pytest.fixture(scope="module")
def statuses() -> dict[str, int]:
    """By change, with what pytest ends when it runs the test that the change names, without the change."""
    job = Path(__file__).with_name("without_changes_job.py")
    return results(run_ranks(job, 1, ALONE, timeout=300))


@pytest.mark.long
@pytest.mark.parametrize("name", ALONE)
def test_the_test_that_a_change_names_fails_without_it(name: str, statuses: dict[str, int]) -> None:
    assert statuses[name] == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("name", CHANGES)
def test_the_test_that_a_change_names_is_there(name: str) -> None:
    file, _, function = CHANGES[name].test.partition("::")
    tree = ast.parse((REPOSITORY / file).read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not function or function.partition("[")[0] in functions


def test_every_change_has_a_name_of_its_own() -> None:
    tables = [value for name, value in vars(changes).items() if name.isupper() and isinstance(value, tuple)]
    assert sum(map(len, tables)) == len(CHANGES)


class Operations(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counted[str(function)] += 1
        return function(*args, **(kwargs or {}))


def saved(module: torch.nn.Module, x: torch.Tensor) -> int:
    """Bytes that a forward pass saves for the backward pass, parameters aside."""
    parameters, seen = {p.data_ptr() for p in module.parameters()}, {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            seen[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


def test_a_gated_mlp_saves_less(make_policy: MakePolicy) -> None:
    """Than Megatron's, by a tensor of inner states at least, for the same gradient."""
    layer = next(m for m in make_policy("dense").chunks.modules() if isinstance(m, MLP))
    x = torch.randn(64, 1, layer.config.hidden_size, requires_grad=True)
    assert type(layer) is GatedMLP
    ours, bytes_of_ours = torch.autograd.grad(layer(x)[0].square().sum(), x), saved(layer, x)
    layer.__class__ = MLP
    theirs, bytes_of_theirs = torch.autograd.grad(layer(x)[0].square().sum(), x), saved(layer, x)
    torch.testing.assert_close(ours, theirs)
    assert bytes_of_theirs - bytes_of_ours >= 64 * layer.config.ffn_hidden_size * 4


def test_a_layer_that_no_rank_shares_is_a_matrix_product_and_nothing_else(make_policy: MakePolicy) -> None:
    layers = [
        m for m in make_policy("dense").chunks.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)
    ]
    whole = [layer for layer in layers if isinstance(layer, WholeColumnLinear | WholeRowLinear)]
    assert len(whole) == len(layers) - 1 == 8  # all but the head
    for layer in whole:
        with Operations() as operations, torch.no_grad():
            layer(torch.ones(5, 1, layer.weight.shape[1]))
        assert operations.counted.total() - operations.counted["aten.view.default"] <= 4, operations.counted
        assert operations.counted["aten.mm.default"] == 1


def test_no_layer_has_positions_of_its_own(make_policy: MakePolicy) -> None:
    """All layers read one table, beside which YaRN's frequencies are small."""
    yarn = YarnConfig(factor=4, original_context=512)
    policy = make_policy("latent", yarn=yarn, rope_base=100)
    embeddings = [module for module in policy.chunks.modules() if isinstance(module, PackedYarnEmbedding)]
    assert len(embeddings) == MODELS["latent"].layers
    assert len({module.table.data_ptr() for module in embeddings}) == 1
    assert all(buffer.numel() < 512 for module in embeddings for buffer in module.buffers())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_experts_are_counted_exactly_in_bf16(dtype: str, make_policy: MakePolicy, batch: Batch) -> None:
    """What is counted between two updates of the balancing bias; bf16 would round every count above 256."""
    policy = make_policy("moe", dtype=dtype)
    buffers = [b for name, b in policy.chunks.named_buffers() if name.endswith(("expert_bias", "tokens_per_expert"))]
    assert buffers
    assert {buffer.dtype for buffer in buffers} == {torch.float32}


def test_an_optimizer_has_moments_before_its_first_update(make_policy: MakePolicy) -> None:
    policy = make_policy("moe")
    policy.use_optimizer(OptimizerConfig(lr=0.1))
    parts = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    states = [
        part.optimizer.state[p] for part in parts for group in part.optimizer.param_groups for p in group["params"]
    ]
    assert len(states) == len([*policy.chunks.parameters()])
    assert all({"exp_avg", "exp_avg_sq"} <= state.keys() for state in states)


def test_no_layer_keeps_the_routing_of_a_micro_batch(make_policy: MakePolicy, batch: Batch) -> None:
    """Its probabilities hang on the graph of a micro-batch, which would stay in memory with them."""
    policy = make_policy("moe")
    dispatchers = [m.token_dispatcher for m in policy.chunks.modules() if hasattr(m, "token_dispatcher")]
    assert dispatchers
    for work in (lambda: policy.logprobs(batch, 1.0), lambda: policy.gradients(batch, grpo_loss(LossOptions(), True))):
        work()
        assert all(one.probs is None and one.routing_map is None for one in dispatchers)
