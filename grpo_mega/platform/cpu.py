"""Runs unmodified megatron-core 0.16 on a CPU with gloo.

megatron-core calls CUDA in a few dozen lines although most of its arithmetic runs anywhere. Each substitution below
replaces one such call and states the reason; tests/platform leaves out one at a time and shows what breaks. Two of
them fix Megatron without Transformer Engine, also on a GPU; all others are for CPUs only, and `install()` leaves them
out when CUDA is present. Changes to Megatron's models and optimizers that are made on every device are in
`models/megatron/changes.py`; `checkpoint/writers.py` replaces a queue.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Substitution:
    """One replaced piece of torch or megatron-core.

    Attributes:
        name: Name in tests.
        reason: What megatron-core does that a CPU does not support.
        apply: Applies the substitution.
        after_import: Whether it replaces something inside megatron.core, which must be imported first.
        on_gpu_too: Whether a GPU without Transformer Engine needs it as well.
    """

    name: str
    reason: str
    apply: Callable[[], None]
    after_import: bool = False
    on_gpu_too: bool = False


class _NullStream:
    """A CUDA stream or event on a synchronous device; its methods do nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _NullStream:
        return self

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NullStream)

    def __hash__(self) -> int:
        return 0


def _current_device() -> None:
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]


def _factories() -> None:
    def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            # Megatron passes the device by keyword, as a string or as torch.device.
            if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
                kwargs["device"] = CPU
            # Pinning memory requires a CUDA driver.
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return wrapper

    # `with torch.device(...)` recognises factories by identity, and collects them at its first use. It must collect
    # torch's own, which the wrappers call; otherwise it would have no effect on them, and a model for the meta device
    # would be allocated elsewhere.
    _device_constructors()
    for name in ("zeros", "ones", "tensor", "empty", "full", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _tensor_cuda() -> None:
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _tensor_type() -> None:
    original = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = cuda_type  # type: ignore[method-assign,assignment]


def _streams() -> None:
    stream = _NullStream()
    for name in ("synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, _NullStream)
    for name in ("current_stream", "default_stream"):
        setattr(torch.cuda, name, lambda *_, **__: stream)
    torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, *_: None  # type: ignore[method-assign]


def _rng() -> None:
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.random.default_generator.manual_seed(seed)  # type: ignore[assignment]


def _rng_tracker() -> None:
    from megatron.core.tensor_parallel import random as tracked

    tracked._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    tracked._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    @contextlib.contextmanager
    def fork(self: Any, name: str = tracked._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"RNG state {name} was never added; call model_parallel_cuda_manual_seed first")
        # A CPU has a single generator, so the tracked state is swapped in for the body and saved after it.
        outer, outer_name = torch.get_rng_state(), self._current_state_name
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)
            self._current_state_name = outer_name

    tracked.CudaRNGStatesTracker.fork = fork


def _te_gemm() -> None:
    from megatron.core.transformer.moe import moe_utils

    # None makes Megatron's own check fall through to the matrix product of torch.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _splits_to_host() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _have_te() -> None:
    from megatron.core.transformer import attention, multi_latent_attention
    from megatron.core.transformer.moe import shared_experts

    for module in (attention, multi_latent_attention, shared_experts):
        module.HAVE_TE = False


SUBSTITUTIONS = (
    Substitution(
        "current_device",
        "buffers, router weights and p2p messages are allocated with device=torch.cuda.current_device()",
        _current_device,
    ),
    Substitution("factories", 'small tensors are created with a literal device="cuda"', _factories),
    Substitution(
        "tensor_cuda",
        "tied embeddings over pipeline stages call weight.data.cuda() (language_module.py)",
        _tensor_cuda,
    ),
    Substitution(
        "tensor_type",
        "the optimizers sort parameters by p.type() == 'torch.cuda.FloatTensor' and refuse everything else",
        _tensor_type,
    ),
    Substitution("streams", "gradient reduction and token dispatch talk to CUDA streams and events", _streams),
    Substitution("rng", "model_parallel_cuda_manual_seed reads and sets the CUDA generator", _rng),
    Substitution(
        "rng_tracker",
        "fork() and add() use the CUDA generator through private helpers. The one that reads it fails; the one that "
        "sets it waits for CUDA forever: with only the first replaced, tensor parallel ranks silently draw alike",
        _rng_tracker,
        after_import=True,
    ),
    Substitution(
        "te_gemm",
        "0.16.1 reads the undefined name te_general_gemm when Transformer Engine is absent (moe_utils.py)",
        _te_gemm,
        after_import=True,
        on_gpu_too=True,
    ),
    Substitution(
        "splits_to_host",
        "the all-to-all dispatcher turns split sizes into lists only when they come from a GPU",
        _splits_to_host,
        after_import=True,
    ),
    Substitution(
        "have_te",
        "0.16.1 believes Transformer Engine is present and evaluates isinstance(x, None) (multi_latent_attention.py)",
        _have_te,
        after_import=True,
        on_gpu_too=True,
    ),
)


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Context without torch.compile: Megatron decorates functions with it, which alone adds seconds to the import.

    On a CPU the functions run uncompiled. Compiling them would need a C++ compiler, and take longer than they run.
    """
    original = torch.compile
    torch.compile = lambda function=None, **_: function or (lambda marked: marked)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original


def install(without: Collection[str] = (), transformer_engine: bool = False) -> bool:
    """Applies the substitutions, once; with CUDA only those that Megatron needs without Transformer Engine.

    `without` leaves some out, for tests that they are needed.

    Returns:
        Whether anything was replaced: False with CUDA and Transformer Engine, or when it was done before on a CPU.
    """
    cuda = torch.cuda.is_available()
    if (cuda and transformer_engine) or hasattr(torch, "_grpo_mega_cpu"):
        return False
    wanted = [s for s in SUBSTITUTIONS if s.name not in without and (s.on_gpu_too or not cuda)]
    if cuda:
        _apply(wanted, after_import=True)
        return True
    # In two rounds: replacements in torch come before the import, so that megatron.core picks them up; those inside
    # megatron.core need it imported.
    torch._grpo_mega_cpu = True  # type: ignore[attr-defined]
    _apply(wanted, after_import=False)
    with _without_compiler():
        import megatron.core  # noqa: F401
    from megatron.core import jit

    jit.disable_jit_fuser()  # applies to everything imported from here on
    _apply(wanted, after_import=True)
    return True


def _apply(substitutions: list[Substitution], after_import: bool) -> None:
    for substitution in substitutions:
        if substitution.after_import == after_import:
            substitution.apply()
