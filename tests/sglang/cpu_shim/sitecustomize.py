"""Lets SGLang, as published for CUDA, run on a CPU. This folder comes first on PYTHONPATH, and only in tests.

Python imports this file when it starts, so it also reaches the processes that SGLang starts. The substitutions:

- `torchvision`: PyPI's build is for CUDA, and beside a CPU build of torch its compiled part does not load. The Python
  part then asks torch about operators that nobody has declared. They are declared here, without an implementation:
  SGLang imports torchvision for images, of which there are none.
- `sgl_kernel`: PyPI's build holds CUDA kernels only. The two functions that SGLang calls on a CPU without AMX, copies
  of indices both, are written in torch; see `sgl_kernel/__init__.py`.
- `sglang.srt.layers.moe.fused_moe_native`: under expert parallelism, experts of other ranks have the number -1, which
  SGLang's kernels skip and its function for CPUs takes for an index. Such a layer is computed here.
- `torch_memory_saver`: the published one is loaded in front of CUDA's library, which is not there. Releasing and
  resuming memory is done on torch's storages instead; see `torch_memory_saver/__init__.py`.
- Under data parallel attention ranks exchange tokens of different numbers by NCCL, and pad them with a value that the
  attention for CPUs does not name.
- Latent attention computes prompts as SGLang does it behind a cached prefix, from the cache of latent vectors: the
  attention for CPUs reads keys and values from there in any case.
- An engine over two nodes is tested with both on one host, where the ports of the first node are those of the second:
  there it does not wait until they are free.
- The host memory that SGLang collects routed experts in is not pinned: that takes CUDA's library.
"""

import importlib.abc
import importlib.machinery
import os
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators at the moment torchvision is looked for, and finds nothing itself."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            import torch

            sys.meta_path.remove(self)
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _declared.append(library)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Changes modules of SGLang as soon as they are there."""

    def find_spec(self, fullname, path=None, target=None):
        change = _changes.pop(fullname, None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


def _on_one_host(module):
    if os.environ.get("GRPO_MEGA_TEST_NODES_ON_ONE_HOST"):
        module.wait_port_available = lambda *_, **__: True


def _unpinned(module):
    module._cuda_host_register = lambda buffer, *_: None


class _UnpinnedTorch:
    """What a module of releases before 0.5.20, which asks torch itself for pinned memory, takes for torch."""

    def __getattr__(self, name):
        import torch

        return getattr(torch, name)

    def zeros(self, *shape, pin_memory=False, **arguments):
        return self.__getattr__("zeros")(*shape, **arguments)


def _without_pinning(module):
    module.torch = _UnpinnedTorch()


def _with_experts_elsewhere(module):
    forward = module.moe_forward_native

    def moe_forward_native(layer, hidden, chosen, config):
        from torch.nn.functional import linear, silu

        if layer.moe_ep_size == 1:
            return forward(layer, hidden, chosen, config)
        assert config.activation == "silu", config.activation
        total = hidden.new_zeros(hidden.shape)
        for expert in range(layer.num_local_experts):
            rows, places = (chosen.topk_ids == expert).nonzero(as_tuple=True)
            gate, up = linear(hidden[rows], layer.w13_weight[expert]).chunk(2, -1)
            out = linear(silu(gate) * up, layer.w2_weight[expert])
            total.index_add_(0, rows, (out * chosen.topk_weights[rows, places, None]).to(total.dtype))
        return total

    module.moe_forward_native = moe_forward_native


def _with_fill_value(module):
    module.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def _without_nccl(module):
    def lengths(group, rows, sizes):
        return sizes or [rows] * group.world_size

    def reduce_scatterv(self, input_, output=None, sizes=None):
        sizes = lengths(self, len(input_) // self.world_size, sizes)
        own = self.all_reduce(input_.clone()).split(sizes)[self.rank_in_group]
        return own.clone() if output is None else output.copy_(own)

    def all_gatherv(self, input_, sizes=None, output=None):
        if isinstance(input_, list):
            return [self.all_gatherv(one, sizes) for one in input_]
        sizes = lengths(self, len(input_), sizes)
        whole = input_.new_zeros(sum(sizes), *input_.shape[1:])
        whole.split(sizes)[self.rank_in_group].copy_(input_)
        whole = self.all_reduce(whole)
        return whole if output is None else output.copy_(whole)

    module.GroupCoordinator.reduce_scatterv = reduce_scatterv
    module.GroupCoordinator.all_gatherv = all_gatherv


def _latent_attention(module):
    latent = module.AttnForwardMethod.MLA
    module.AttentionBackendRegistry.register("torch_native", lambda *_: latent)


_changes = {
    "sglang.srt.utils.network": _on_one_host,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _latent_attention,
    "sglang.srt.distributed.parallel_state": _without_nccl,
    "sglang.srt.layers.attention.torch_native_backend": _with_fill_value,
    "sglang.srt.mem_cache.pool_host.common": _unpinned,
    "sglang.srt.state_capturer.base": _without_pinning,
    "sglang.srt.layers.moe.routed_experts_capturer": _without_pinning,
    "sglang.srt.layers.moe.fused_moe_native": _with_experts_elsewhere,
}
_declared = []
"""What is declared is forgotten with the library."""
sys.meta_path[:0] = [_BeforeTorchvision(), _AfterImport()]
