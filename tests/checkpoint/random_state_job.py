"""Two ranks that draw, save, spoil and load their generators; each prints what it drew as JSON. Usage: ... FOLDER"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch

from grpo_mega import platform

HERE = platform.start()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

from grpo_mega.checkpoint import integrity, random_state  # noqa: E402
from grpo_mega.config.schema import LayoutConfig  # noqa: E402
from grpo_mega.models.topology import join_layout  # noqa: E402


def draws() -> list[float]:
    """Two numbers from every generator, a Gaussian each where the other half of the pair waits for the next call."""
    found = [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.random(), *torch.rand(2)]
    for name in tensor_parallel.get_cuda_rng_tracker().get_states():
        with tensor_parallel.get_cuda_rng_tracker().fork(name):
            found += [*torch.rand(2)]
    return [float(x) for x in found]


if __name__ == "__main__":
    platform.join_processes(HERE)
    checkpoint = Path(sys.argv[1])
    (checkpoint / random_state.FOLDER).mkdir(parents=True, exist_ok=True)
    seen = {}
    join_layout(LayoutConfig(tp=2), seed=1)
    random_state.reseed(seed=1, step=0)
    seen["begun"] = draws()
    random_state.save(checkpoint)
    integrity.seal(checkpoint)
    seen["went on"] = draws()
    random_state.reseed(seed=2, step=0)
    seen["spoiled"] = draws()
    random_state.load(checkpoint, seed=1, step=5)
    seen["loaded"] = draws()
    parallel_state.destroy_model_parallel()
    join_layout(LayoutConfig(), seed=1)
    for name, step in (("elsewhere", 5), ("elsewhere again", 5), ("elsewhere later", 6)):
        random_state.load(checkpoint, seed=1, step=step)
        seen[name] = draws()
    torch.distributed.destroy_process_group()
    print(json.dumps(seen))
