r"""Converts a Hugging Face folder into a checkpoint that a run starts from, ahead of the run.

    python tools/import.py models/Qwen3-8B imported/Qwen3-8B
    torchrun --nproc-per-node 8 -m grpo_mega.train model=from_folder run.init_from=imported/Qwen3-8B \
        data.tokenizer=imported/Qwen3-8B

Reads the weights once, tensor by tensor: main memory is half a GiB and twice the largest tensor, for any size of model.
The checkpoint can be read under any layout, each rank its own part. The tokenizer, generation_config.json and
config.json are stored beside the weights. Settings such as model.dtype=fp32 override config.json. The checkpoint gets
its name when it is complete: after a kill, start the command again.

Exit code: 0 the checkpoint is written, 1 the disk failed, 2 the folder cannot be converted, or another process is
writing OUT.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import cast

# The model built here is for the meta device, and planning refuses to start where a GPU is visible.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_mega import platform
from grpo_mega.config.load import explained
from grpo_mega.config.schema import Config, LayoutConfig, ModelConfig
from grpo_mega.config.typed import as_meant
from grpo_mega.errors import InputError
from grpo_mega.models.families.hf_folder import model_settings

WRITTEN, FAILED, BAD_INPUT = 0, 1, 2
MODEL = "model."


def model_of(folder: Path, words: list[str]) -> ModelConfig:
    """The folder's model, with settings such as model.dtype=fp32 that override its config.json.

    Raises:
        InputError: The folder's family is not supported, or a setting is not one of a model.
    """
    if wrong := [word for word in words if not word.startswith(MODEL)]:
        raise InputError(wrong[0], "not a setting of the model", "give only such as model.dtype=fp32")
    try:
        merged = OmegaConf.merge(Config, {"model": model_settings(folder)}, OmegaConf.from_dotlist(words))
    except OmegaConfBaseException as error:
        raise explained(error, words) from error
    return cast(ModelConfig, OmegaConf.to_object(cast(DictConfig, merged).model))


def convert(folder: Path, out: Path, model: ModelConfig) -> None:
    """Writes the checkpoint; see `import_folder` for its errors."""
    import torch

    platform.start_planning()
    here = platform.Platform(torch.device("meta"), "gloo", transformer_engine=False)
    platform.join_processes(here)
    # Megatron may be imported only after the platform is prepared.
    from grpo_mega.convert.ingest import import_folder
    from grpo_mega.models.topology import join_layout, leave_layout

    join_layout(LayoutConfig(), seed=0)
    assert model.vocab_size, "a config.json that was accepted names it"
    import_folder(folder, out, model, model.vocab_size, here)
    leave_layout()


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a Hugging Face folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="the checkpoint to write; it must not exist")
    parser.add_argument("settings", nargs="*", metavar="model.X=VALUE", help="instead of what config.json says")
    options = parser.parse_intermixed_args(as_meant(arguments))
    for library in ("megatron", "torch"):
        warnings.filterwarnings("ignore", module=library)
    try:
        model = model_of(options.folder, options.settings)
        convert(options.folder, options.out, model)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        again = f"Nothing is left of {options.out}: fix that, and run the same command again"
        print(f"error: {error}. {again}", file=sys.stderr)
        return FAILED
    print(f"{options.out}: {model.dtype} weights of {options.folder}")
    return WRITTEN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
