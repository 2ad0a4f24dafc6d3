"""Loads weights inside SGLang's own processes; each rank of an engine loads its own part.

SGLang calls `load` for updates that name it, as its server argument custom_weight_loader permits. SGLang's own updates,
from a broadcast or a directory, would give every rank all routed experts.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_mega.rollout.sglang.payload import Described

NAME = f"{__name__}.load"
"""Import path by which SGLang finds `load`."""
INDEX = "model.safetensors.index.json"
EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
"""Pattern of a routed expert's number in the names of its weights."""


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Loads weights into a model; called by SGLang in every rank of an engine with the same arguments.

    The name of the only tensor is the source of the weights in JSON: {"group": name of a process group, "tensors": for
    each rank the tensors it is sent}, or {"folder": a model directory, "experts": for each rank [first, one past the
    last] or null}.
    """
    ((message, _),) = named_tensors
    source, rank = json.loads(message), dist.get_rank()
    if "group" in source:
        model.load_weights(sent(source["tensors"][rank], rank, source["group"], next(model.parameters()).device))
    else:
        numbers = source["experts"][rank]
        model.load_weights(stored(Path(source["folder"]), numbers and range(*numbers)))


def sent(tensors: Described, rank: int, group_name: Any, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """Receives the tensors, as one tensor of bytes, that the trainer process of the same `rank` sends, if any."""
    sizes = [math.prod(shape) * getattr(torch, kind).itemsize for _, shape, kind in tensors]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    # A rank whose bucket is empty sends nothing (`transport.Network`), so nothing must be awaited from it.
    if tensors:
        # The group was created by SGLang's own code, which keeps it; torch finds it by the name that it was given.
        dist.recv(flat, src=rank, group=dist.distributed_c10d._resolve_process_group(group_name))
        if device.type == "cuda":
            # NCCL has only enqueued the transfer, and the trainer takes SGLang's answer for its end.
            torch.cuda.current_stream().synchronize()
    parts = flat.split(sizes) if tensors else ()
    return [
        (name, part.view(getattr(torch, kind)).view(shape))
        for (name, shape, kind), part in zip(tensors, parts, strict=True)
    ]


def missing(folder: Path) -> list[str]:
    """Files of a model directory that are not visible on this machine."""
    if not (folder / INDEX).is_file():
        return [INDEX]
    files = {*json.loads((folder / INDEX).read_text())["weight_map"].values()}
    return sorted(file for file in files if not (folder / file).is_file())


def stored(folder: Path, experts: range | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a model directory with an index; of routed experts only `experts`, or all for None."""
    from safetensors import safe_open

    file_of = json.loads((folder / INDEX).read_text())["weight_map"]
    names_in = defaultdict(list)
    for name, file in file_of.items():
        number = EXPERT.search(name)
        if not number or experts is None or int(number[1]) in experts:
            names_in[file].append(name)
    # Each tensor is read only when SGLang asks for it, so that the whole model need not fit into main memory.
    for file, names in sorted(names_in.items()):
        with safe_open(folder / file, "pt") as content:
            for name in names:
                yield name, content.get_tensor(name)
