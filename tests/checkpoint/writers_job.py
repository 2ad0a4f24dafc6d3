"""Two ranks that save; each prints, as JSON, which files it read again for their checksums. Usage: ... FOLDER"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from grpo_mega import platform

HERE = platform.start()

from grpo_mega.checkpoint.checkpoint import Saving  # noqa: E402
from grpo_mega.config.schema import LayoutConfig, ModelConfig, MoEConfig, OptimizerConfig  # noqa: E402
from grpo_mega.models.policy import Policy  # noqa: E402
from grpo_mega.models.reference import ReferencePolicy  # noqa: E402
from grpo_mega.models.topology import join_layout  # noqa: E402

MOE = MoEConfig(experts=4, ffn_hidden=16, shared_ffn_hidden=16)
MODEL = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, context=24, init_std=0.2, moe=MOE)
PR_GET_PDEATHSIG = 2


def opened() -> list[str]:
    """Files that this process, not its forks, opens to be read from now on, in the order of time."""
    names: list[str] = []
    mine = os.getpid()

    def note(event: str, arguments: tuple) -> None:
        if event == "open" and os.getpid() == mine and arguments[1] == "r":
            names.append(str(arguments[0]))

    sys.addaudithook(note)
    return names


def note_ends(folder: Path) -> None:
    """Every fork of this process, and of its forks, says which signal it is to get when its parent ends."""
    folder.mkdir(exist_ok=True)
    library = ctypes.CDLL(None)

    def note() -> None:
        signal = ctypes.c_int()
        library.prctl(PR_GET_PDEATHSIG, ctypes.byref(signal), 0, 0, 0)
        (folder / str(os.getpid())).write_text(str(signal.value))

    os.register_at_fork(after_in_child=note)


if __name__ == "__main__":
    dist.init_process_group(HERE.backend, timeout=timedelta(seconds=300))
    folder = Path(sys.argv[1])
    topology = join_layout(LayoutConfig(ep=2), seed=1)
    policy = Policy(MODEL, LayoutConfig(ep=2), 21, topology, HERE, OptimizerConfig(distributed=True))
    policy.initialize(seed=3)
    policy.use_optimizer(OptimizerConfig(lr=1e-3))
    reference = ReferencePolicy(policy)
    note_ends(folder / "forks")
    read_again = {}
    names = opened()
    for how in ("waiting", "background"):
        saving = Saving(folder / how, [policy, reference], {}, background=how == "background")
        names.clear()
        saving.finish()
        inside = f"{folder}/.{how}.tmp/"
        read_again[how] = [name.removeprefix(inside) for name in names if name.startswith(inside)]
    print(json.dumps(read_again))
