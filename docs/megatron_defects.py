"""Defects of megatron-core that docs/parity.md lists, each in a few lines; start it with torchrun on two ranks."""

# ruff: noqa: E402  Megatron may only be imported once the platform is prepared.

import warnings

import torch
import torch.distributed as dist

from grpo_mega import platform

warnings.simplefilter("ignore")
here = platform.start()
platform.join_processes(here)

from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter

from grpo_mega.config import schema
from grpo_mega.models.megatron.changes import BEFORE_OPTIMIZER, apply_changes

rank = dist.get_rank()
parallel_state.initialize_model_parallel(2)
tensor_parallel.model_parallel_cuda_manual_seed(0)


def say(line: str) -> None:
    """Prints on the first rank."""
    if rank == 0:
        print(line, flush=True)


def config(**more) -> TransformerConfig:
    """A small mixture of experts under TP2 and SP."""
    shape = dict(num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=4, moe_router_topk=2)
    return TransformerConfig(
        **shape, add_bias_linear=False, tensor_model_parallel_size=2, sequence_parallel=True, **more
    )


def router(**more) -> TopKRouter:
    """Its router, with the same weights every time."""
    result = TopKRouter(config(**more), get_default_pg_collection()).to(here.device)
    torch.manual_seed(0)
    torch.nn.init.normal_(result.weight)
    result.set_layer_number(1)
    return result


# 1. The latent key: gathered, then used by this rank's heads alone, with gradients 1 and 2.
x = torch.ones(1, 1, 2, device=here.device, requires_grad=True)
(tensor_parallel.gather_from_tensor_model_parallel_region(x) * (rank + 1)).sum().backward()
say(f"1. gradient {x.grad[0, 0, 0]:.0f}, should be 3")

# 2. The auxiliary loss; 4 of 8 tokens per rank, and per token Megatron divides the sum over ranks by 8.
for per_token in (False, True):
    module = router(
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1.0, calculate_per_token_loss=per_token
    )
    tokens = torch.randn(8, 1, 8, generator=torch.Generator().manual_seed(1)).to(here.device).chunk(2)[rank]
    (module(tokens)[0].sum() * 0).backward()
    dist.all_reduce(module.weight.grad)
    say(f"2. per token {per_token}: |gradient| {module.weight.grad.norm() / (8 if per_token else 1):.6f}")

# 3. No marks without initialisation.
linear = tensor_parallel.ColumnParallelLinear(
    8, 8, config=config(perform_initialization=False), init_method=torch.nn.init.zeros_, bias=False
)
say(f"3. {getattr(linear.weight, 'tensor_model_parallel', 'no mark')}, should be True")

# 4. Weight decay of a vector.
module = torch.nn.LayerNorm(8).to(here.device)
module.config = config()
ddp = DistributedDataParallel(module.config, DistributedDataParallelConfig(), module)
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.1), [ddp])
say(f"4. {[(g['wd_mult'], g['weight_decay']) for g in optimizer.param_groups]}, should be [(0.0, 0.0)]")

# 5. A padding mask with the balancing bias.
module = router(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
try:
    module(torch.randn(8, 1, 8, device=here.device), torch.zeros(8, 1, dtype=torch.bool, device=here.device))
    say("5. no error")
except RuntimeError as error:
    say(f"5. {error}")

# 6. What a checkpoint would hold of two weights of 1 in buckets of their own, the first one padded.
weights = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False, device=here.device) for _ in range(2)))
for weight in weights.parameters():
    torch.nn.init.ones_(weight)
buckets = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=64)
ddp = DistributedDataParallel(config(), buckets, weights)
# A rank of this project writes its own part of the state, so this is Megatron's optimizer, and only the change of
# Adam, for which its own needs Apex or Transformer Engine.
apply_changes(BEFORE_OPTIMIZER, schema.StateConfig())
adam = OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0, use_distributed_optimizer=True)
optimizer = get_megatron_optimizer(adam, [ddp])
optimizer.step()  # makes the moments; the gradients are 0
shards = {name: ShardedTensor.from_rank_offsets(name, weight) for name, weight in weights.named_parameters()}
state = optimizer.sharded_state_dict(shards, metadata={"distrib_optim_sharding_type": "fully_reshardable"})
say(f"6. {[part['param'].data.mean().item() for part in state['param_state'].values()]}, should be [1.0, 1.0]")

# 7. The norm of latent attention's compressed query, without SP: whole on both ranks, and so is its gradient, here 1.
module = torch.nn.ModuleDict({"q_layernorm": torch.nn.RMSNorm(8)}).to(here.device)
latent = dict(num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=2, qk_layernorm=True)
ddp = DistributedDataParallel(MLATransformerConfig(**latent), DistributedDataParallelConfig(), module)
module["q_layernorm"].weight.main_grad.fill_(1)
finalize_model_grads([ddp])
say(f"7. gradient {module['q_layernorm'].weight.main_grad[0]:.0f}, should be 1")

# 8. The bias of an expert that each rank has whole, with the gradient of its own tokens, here 1.
alone = [dist.new_group([other]) for other in range(2)][rank]
expert = tensor_parallel.RowParallelLinear(
    8, 8, config=config(), init_method=torch.nn.init.zeros_, bias=True, input_is_parallel=True, skip_bias_add=True,
    is_expert=True, tp_group=alone,
)  # fmt: skip
ddp = DistributedDataParallel(config(), DistributedDataParallelConfig(), expert)
expert.bias.main_grad.fill_(1)
finalize_model_grads([ddp])
marks = {name: getattr(expert.bias, name, False) for name in ("sequence_parallel", "tensor_model_parallel")}
say(f"8. gradient {expert.bias.main_grad[0]:.0f}, should be 1; {marks}, should be the other way round")
dist.destroy_process_group()
