"""Writes a model of a run as a Hugging Face folder, which transformers and inference engines load.

    python tools/export.py runs/tiny exported/tiny
    python tools/export.py runs/tiny/checkpoints/step-000080 exported/tiny80 --dtype bf16
    torchrun --nproc-per-node 2 tools/export.py runs/tiny exported/tiny layout.ep=2
    python tools/export.py runs/mine exported/mine-adapter --adapter

It exports the newest intact checkpoint of a run directory, the named checkpoint, or a cached base model, written under
any layout. One process on a CPU reads the whole model; if that does not fit, start more processes with a layout
(layout.*). The folder has config.json, the weights, generation_config.json, the tokenizer with its chat template, and
README.md, the model card. It gets its name when it is complete: after a kill, start the command again.

For a run with adapters (lora.rank above 0) the folder has the merged weights; with --adapter it has only the adapters,
in the format of the library peft: adapter_config.json and adapter_model.safetensors.

Main memory: the model, and two files of up to 4 GiB.

Exit code: 0 the folder is written, 1 the disk failed, 2 invalid input, nothing was written.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

# An export runs on the CPU, as it computes nothing and main memory is larger. Set before torch can look for GPUs.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from grpo_mega import platform
from grpo_mega.config.limits import OneOf, limits_of
from grpo_mega.config.schema import ModelConfig
from grpo_mega.config.typed import as_meant
from grpo_mega.convert.command import parser_of, run
from grpo_mega.errors import InputError

ROLES = ("policy", "average", "reference", "critic")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command's options."""
    parser = parser_of(__doc__, "RUN|CHECKPOINT", ROLES, "policy")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what to write; it must not exist")
    parser.add_argument("layout", nargs="*", metavar="layout.X=N", help="how processes share the model (single)")
    dtypes = limits_of(ModelConfig)["dtype"]
    assert isinstance(dtypes, OneOf)
    parser.add_argument("--dtype", choices=dtypes.choices, help="of the weights (as they were trained)")
    parser.add_argument("--adapter", action="store_true", help="the adapters alone, for the library peft")
    return parser.parse_intermixed_args(as_meant(arguments))


def main(arguments: list[str]) -> int:
    """Runs the command on every rank; returns its exit code."""
    options = parse(arguments)
    command = shlex.join(["python", "tools/export.py", *arguments])
    again = f"Nothing is left of {options.folder}: fix that, and run the same command again"
    return run(lambda here: export(options, command, here), again)


def export(options: argparse.Namespace, command: str, here: platform.Platform) -> str:
    """Writes the folder; returns a message for the user.

    Raises:
        InputError: The model cannot be exported.
        FileNotFoundError: The source does not exist, or the tokenizer's folder.
        RuntimeError: The disk failed.
    """
    import torch.distributed as dist

    from grpo_mega.convert.card import NO_TOKENIZER, Facts
    from grpo_mega.convert.export import write_adapter, write_folder
    from grpo_mega.convert.source import configuration, find, read
    from grpo_mega.data import build_tokenizer
    from grpo_mega.data.tokenizer import vocabulary
    from grpo_mega.models.policy import Policy
    from grpo_mega.models.topology import join_layout
    from grpo_mega.observe.summary import versions
    from grpo_mega.platform.collectives import from_main_rank
    from grpo_mega.weights.directory import EXISTS
    from grpo_mega.weights.hf_config import family_of

    role, folder = options.model, options.folder
    if role == "critic":
        what = "its head gives one number for each token, which no language model of transformers has"
        raise InputError("--model critic", what, "choose policy, average or reference")
    # The main rank decides for all, so that either all ranks raise the error or none.
    if from_main_rank(folder.exists):
        raise InputError(str(folder), "exists", EXISTS)
    source = find(options.source)
    config = configuration(source, options.layout, dist.get_world_size(), options.config)
    if options.adapter and not config.lora.rank:
        raise InputError("--adapter", "the run trained all weights (lora.rank=0) and has no adapters", "leave it out")
    if options.adapter and options.dtype:
        raise InputError("--dtype", "adapters are written in the dtype of their training", "leave it out")
    architecture = family_of(config.model).architecture
    tokenizer = build_tokenizer(config.data)
    topology = join_layout(config.layout, seed=0)
    vocab_size = vocabulary(config.model, tokenizer)
    policy = Policy(config.model, config.layout, vocab_size, topology, here, optimizer=None, lora=config.lora)
    read(source, policy, role)
    if options.adapter:
        write_adapter(folder, policy, config.run.init_from)
        return f"{folder}: adapters of rank {config.lora.rank}, from {source.path}; the model is {config.run.init_from}"
    # The model card tells where the weights come from.
    facts = Facts(
        role=role,
        stage=source.stage,
        steps=source.steps,
        architecture=architecture,
        parameters=policy.parameters(),
        dtype=options.dtype or config.model.dtype,
        versions=source.state.get("versions") or versions(),
        command=command,
        run=source.run if source.stage is None else None,
    )
    write_folder(folder, policy, config, tokenizer, facts)
    none = f"\nno tokenizer is written: {NO_TOKENIZER}" if config.data.tokenizer == "chars" else ""
    return f"{folder}: {architecture}, {facts.parameters:,} parameters in {facts.dtype}, from {source.path}{none}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
