"""How long the process groups of a run wait; prints seconds and how many groups have them, as JSON.

Usage: timeouts_job.py FOLDER KEY=VALUE... . The run ends when it has made its groups, on a checkpoint that is none.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.distributed import distributed_c10d

from grpo_mega.platform import start

start()  # before megatron.core is imported

from grpo_mega import train  # noqa: E402
from grpo_mega.checkpoint.safe_load import NEEDED  # noqa: E402
from grpo_mega.config.load import compose_config  # noqa: E402
from grpo_mega.platform.manifest import MANIFEST, checksum  # noqa: E402


def seconds() -> Counter:
    """Of every process group that there is: its timeout -> groups."""
    groups = distributed_c10d._world.pg_map
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return Counter(backend.options._timeout.total_seconds() for backend in backends)


if __name__ == "__main__":
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]
    broken = folder / "broken"
    (broken / "weights").mkdir(parents=True, exist_ok=True)
    (broken / "state.json").write_text("{}")
    for name in NEEDED:  # whole to the checks before the groups are made, and unreadable after them
        (broken / "weights" / name).write_text("no weights")
    files = [file for file in broken.rglob("*") if file.is_file() and file.name != MANIFEST]
    listed = {str(file.relative_to(broken)): checksum(file) for file in files}
    (broken / MANIFEST).write_text(json.dumps(listed))
    run = [f"run.root={folder}", f"run.init_from={broken}", "base.train=false", "layout=single"]
    try:
        train.train(compose_config(["experiment=tiny", *run, *overrides]))
    except (ValueError, FileNotFoundError) as error:
        print(json.dumps({"error": str(error), "seconds": seconds()}))
