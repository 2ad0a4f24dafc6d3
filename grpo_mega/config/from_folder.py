"""Defaults from a Hugging Face folder in `run.init_from`: the model, its tokenizer and its chat template.

The configuration is composed twice if a folder contributes to it: first without its settings, to find the folder and
the chosen options; then with its settings as hydra defaults, which every file and the command line override, so that
hydra itself decides which value wins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_mega.config.recorded import begun, container, recorded
from grpo_mega.config.schema import DataConfig, RunConfig
from grpo_mega.config.typed import at_home, literal
from grpo_mega.errors import InputError, instead_of
from grpo_mega.models.families.hf_folder import model_settings, on_hub

OPTION = "from_folder"
"""Option of the group model, in `configs/`."""
CHAT = "chat"
"""Value of `data.template` that selects the tokenizer's own chat template."""
CLOCK = "strftime_now"
"""Function by which chat templates (GPT-OSS, Llama 3.2) ask for today's date."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_FOLDER = "${run.init_from}"
_UNSAID = "${..run.init_from}"
"""The same in a spelling that only this file uses: it stays if neither files nor the command line set a tokenizer."""


def register(model: dict[str, Any], data: dict[str, Any]) -> None:
    """Registers these settings as the model option `from_folder`, and as defaults of the data."""
    ConfigStore.instance().store(group="model", name="said_by_folder", node=model)
    ConfigStore.instance().store(name="data_of_folder", node={"data": data})


# Files in `configs/` name both options, so they must exist even for runs without a folder.
register({}, {})


def use_folder(words: Sequence[str]) -> DictConfig | None:
    """Registers the settings of the folder that a command line names; call it where hydra is initialized.

    A resumed run keeps the settings of its config.yaml, even if the folder's config.json has changed.

    Returns:
        What hydra has composed, with its own settings under `hydra`, if no folder contributes to it; None if it must be
        composed again.

    Raises:
        InputError: The model is to be taken from the folder, and `run.init_from` is not a Hugging Face model, or not of
            a supported family; see `model_settings`.
    """
    # The first composition has no settings of the folder, and a tokenizer whose spelling shows, at the end, whether a
    # file or the command line has set another.
    register({}, {"tokenizer": _UNSAID})
    try:
        first = compose("config", [*words], return_hydra_config=True)
        run, chosen = at_home(container(first.run)), first.hydra.runtime.choices.model
        longest = OmegaConf.select(first, "model.context") or first.layout.micro_batch_tokens
        tokenizer = at_home(OmegaConf.select(first, "data.tokenizer"))
        unused = first.base.train
    # An error of the command line is reported when it is composed for use.
    except (HydraException, OmegaConfBaseException, ValueError):
        register({}, {})
        return None
    # Settings of the folder. The empty ones are registered at once: an error below must not leave behind the tokenizer
    # of the first composition, or what the folder of an earlier call says.
    model: dict[str, Any] = {}
    data: dict[str, Any] = {}
    register(model, data)
    origin = run.get("init_from")
    # A base model that is trained from scratch ignores `run.init_from`; a rule refuses both together.
    if origin and not unused:
        folder = Path(origin)
        is_model = (folder / "config.json").is_file()
        if chosen == OPTION and not is_model:
            what = "not a Hugging Face folder (no config.json)"
            if not folder.exists():
                what = f"does not exist{instead_of(folder)}"
            raise InputError(
                f"run.init_from={origin}",
                f"{what}, and no model is chosen",
                f"name a Hugging Face folder, or choose model=NAME or experiment=NAME{on_hub(origin)}",
            )
        # The config.yaml of this run if it has checkpoints and started from the same folder.
        recorded = begun(str(run.get("root")), str(run.get("name")), run.get("fork"))
        before = literal(recorded) if recorded.get("run", {}).get("init_from") == origin else {}
        if chosen == OPTION:
            model = before.get("model") or model_settings(folder, longest)
        if is_model:
            data = _data(folder, before, Path(str(tokenizer)) == folder)
        register(model, data)
    said = OmegaConf.to_container(first.data)
    assert isinstance(said, dict)
    # Without contributions of a folder the first composition is the final one, and nothing is composed twice.
    if model or data or said["tokenizer"] == _UNSAID:
        return None
    return first


def _data(folder: Path, before: dict[str, Any], is_its_tokenizer: bool) -> dict[str, Any]:
    if not is_its_tokenizer or not any((folder / name).is_file() for name in TOKENIZER):
        return {}
    # A run that has begun keeps its template, even if the folder has lost or gained one since.
    if Path(before.get("data", {}).get("tokenizer", "")) == folder:
        return {name: before["data"][name] for name in ("tokenizer", "template")}
    return {"tokenizer": _FOLDER} | ({"template": CHAT} if chat_template(folder) else {})


def chat_template(folder: Path) -> str:
    """The folder's chat template; "" if it has none."""
    for name in ("chat_template.jinja", "chat_template.json"):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8", errors="replace")
    try:
        return str(json.loads((folder / TOKENIZER[1]).read_text(encoding="utf-8")).get("chat_template") or "")
    # A folder without a tokenizer has no template. An unreadable tokenizer is reported when it is loaded.
    except (OSError, ValueError, AttributeError):
        return ""


def date_of_run(data: DataConfig, run: RunConfig) -> str | None:
    """The date that the chat template shows as today's: `data.date`, or the day the run began, or today.

    None if the template asks for no date, and for runs of earlier releases, which recorded none.
    """
    templates = {data.template, *(source.template for source in data.sources.values())}
    if data.date or CHAT not in templates or CLOCK not in chat_template(Path(data.tokenizer)):
        return data.date
    # The day of the beginning, not of a resumption: otherwise prompts would change in the middle of a run.
    before = recorded(run.root, run.name, run.fork)
    return before["data"].get("date") if before.get("data") else datetime.now(UTC).date().isoformat()
