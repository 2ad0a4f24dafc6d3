"""Writes the experiment file of a run with your own model and problems, after checking both.

    python -m grpo_mega.new my_run --model models/Qwen2.5-0.5B-Instruct --data problems.jsonl
    python -m grpo_mega.new my_run --model FOLDER --data FILE --reward my_rewards:score --cluster h100 --nodes 2
    python -m grpo_mega.new my_run --model FOLDER --data FILE --environment my_file:Bisect

The problems are read with the model's tokenizer, made-up completions are tried against the reward, calls are tried in
the environment, lengths and sizes are derived from the data, and with `--cluster` a layout that fits its GPUs is
searched. Settings that are typed (key=value) are taken as they are. The result is configs/experiment/NAME.yaml, to be
read and edited.

Exit code: 0 written, 2 an input cannot be used.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # plans build models that must not be on a GPU

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_mega import platform
from grpo_mega.config.from_folder import TOKENIZER, chat_template
from grpo_mega.config.load import compose_config, config_dir, groups
from grpo_mega.config.rules.data import no_tokenizer
from grpo_mega.config.schema import ClusterConfig, Config, LayoutConfig, SourceConfig
from grpo_mega.config.schema.layout import DECIDED
from grpo_mega.config.typed import Renamed, as_meant
from grpo_mega.data import Data, build_data
from grpo_mega.data.huggingface import HuggingFaceTokenizer
from grpo_mega.data.model_defaults import CHAT, longest_lengths, prompt_format
from grpo_mega.data.problems import ONLY, load_problems
from grpo_mega.data.records import records
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.environment.calls import form_of
from grpo_mega.environment.trial import described, longest_opening, try_out
from grpo_mega.errors import InputError, instead_of
from grpo_mega.forecast.dry_run.completions import show_rewards
from grpo_mega.forecast.dry_run.prompts import Read
from grpo_mega.forecast.dry_run.refusals import Refusals
from grpo_mega.models.families import layers_of
from grpo_mega.models.families.hf_folder import model_settings, on_hub
from grpo_mega.observe import waiting
from grpo_mega.platform.files import write_atomic
from grpo_mega.reward.countdown import NUMBERS
from grpo_mega.reward.scorable import why_unreachable
from grpo_mega.types import Prompt

WRITTEN, BAD_INPUT = 0, 2
STEPS = 100
HELD_OUT = 0.1
"""Share of a file that is held out for validation, and the same for the test, up to the schema's defaults."""
SCRIPT = """#!/usr/bin/env bash
# {title}
#
#     slurm/{name}.sh --partition=NAME --account=NAME
#
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=2-00:00:00
#SBATCH --signal=B:USR1@{seconds}
#SBATCH --requeue
#SBATCH --open-mode=append
if [[ $0 == */slurm_script ]]; then here=$SLURM_SUBMIT_DIR; else here=$(dirname "$0")/..; fi # Slurm runs a copy
# shellcheck source=slurm/lib/launch.sh
. "${{GRPO_MEGA_CODE:-$here}}/slurm/lib/launch.sh"
launch experiment={name} -- "$@"
"""
"""Template of a Slurm script that submits an experiment, like those of slurm/."""
SECONDS_TO_SAVE = 900
"""Shortest time in seconds that a job has for saving before its end."""
OTHER_SECONDS = 180
"""Seconds of that time for other work than a checkpoint."""
GB_PER_SECOND = 5.0
"""Assumed write speed of the file system; SAVE_GB_PER_SECOND in the scripts."""


@dataclass
class Given:
    """A line of the experiment file: a dotted name, its value, and a reason."""

    name: str
    value: Any
    why: str = ""


@dataclass
class Draft:
    """The experiment file before it is written.

    Attributes:
        name: Name of the experiment.
        options: {group of configs/: chosen option}.
        settings: All other settings, in the order of the file.
        problems: The problems of the file.
        processes: Number of processes of the run on each machine.
    """

    name: str
    options: dict[str, str]
    settings: list[Given]
    problems: list[Prompt]
    processes: int

    def set(self, name: str, value: Any) -> None:
        """Gives a setting a value, in place of its present one."""
        self.settings = [setting for setting in self.settings if setting.name != name]
        self.settings.append(Given(name, value))

    def take(self, words: Sequence[str]) -> None:
        """Replaces derived settings and options by typed ones."""
        for name, _, value in (word.partition("=") for word in words):
            if "." in name:
                plain: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"it={value}"]))
                self.set(name, plain["it"])
            else:
                self.options[name] = value

    def text(self, title: str) -> str:
        """Text of the file."""
        lines = ["# @package _global_", f"# {title}", "defaults:"]
        lines += [f"  - override /{group}: {option}" for group, option in self.options.items()]
        for section in dict.fromkeys(setting.name.partition(".")[0] for setting in self.settings):
            lines += ["", f"{section}:"]
            lines += _nested([(s.name.split(".")[1:], s) for s in self.settings if s.name.startswith(f"{section}.")], 1)
        return "\n".join(lines) + "\n"


def _nested(settings: Sequence[tuple[list[str], Given]], depth: int) -> Iterator[str]:
    """Yields the lines of a section: its fields, then its subsections."""
    for path, setting in settings:
        if len(path) == 1:
            why = f" # {setting.why}" if setting.why else ""
            # OmegaConf would look up what `${` begins.
            value = json.dumps(setting.value, ensure_ascii=False).replace("${", "\\\\${")
            yield f"{'  ' * depth}{path[0]}: {value}{why}"
    for inner in dict.fromkeys(path[0] for path, _ in settings if len(path) > 1):
        yield f"{'  ' * depth}{inner}:"
        yield from _nested([(path[1:], s) for path, s in settings if len(path) > 1 and path[0] == inner], depth + 1)


def draft(options: argparse.Namespace) -> Draft:
    """Derives an experiment from the model, the problems and the machines.

    Raises:
        InputError, FileNotFoundError: An input cannot be used; names it.
    """
    model, data = Path(options.model), Path(options.data)
    check_given(options)
    model_settings(model, 1)  # refuses an unsupported model before reading its tokenizer
    if not any((model / name).is_file() for name in TOKENIZER):
        raise no_tokenizer(model, instead="")
    option, template, question = prompt_format(model, options.reward)
    source = columns(options)
    name = ONLY if source == SourceConfig() else "data_" + re.sub(r"\W", "_", data.name.partition(".")[0])
    tokenizer = HuggingFaceTokenizer(model, template, question=question, options=options.told)
    problems = [problem.prompt for problem in load_problems(data, tokenizer, source=source, name=name)]
    # Replies count for the context.
    share, replies = (2, ", and as many of replies") if options.environment else (1, "")
    longest, context = _lengths(options.environment, problems, model, share * options.completion_tokens, tokenizer)
    if len(problems) < 3:
        what = f"it has {len(problems)} problems"
        raise InputError(str(data), what, "give at least 3: one each to train, validate and test on")
    held_out = max(1, int(HELD_OUT * len(problems)))
    validation, test = min(200, held_out), 0 if options.test else min(400, held_out)
    trained = max(1, len(problems) - validation - test)
    prompts = 1 << min(128 if options.cluster else 16, trained).bit_length() - 1  # a power of two
    settings = [
        Given("run.name", options.name),
        Given("run.init_from", str(model.absolute())),
        Given("run.steps", STEPS, f"{STEPS * prompts / trained:.2g} passes over all problems"),
        Given("run.eval_every", 10, "accuracy on the validation problems"),
        Given("run.export_every", -1, "after the last step, a Hugging Face folder: export/ in the run's directory"),
        *_files(options, name, source, len(problems)),
        Given("data.question", question),
        Given("data.validation_size", validation, "taken off the problems"),
        Given("data.shared_test_problems", options.shared_test_problems, "of data.test_path are trained on too"),
        Given("data.test_size", test, "taken off as well, for the first and the last evaluation"),
        Given("model.context", context, f"the longest prompt, {longest} tokens, and the completion{replies}"),
        Given("rollout.max_new_tokens", (context - longest) // share, "tokens of the longest completion"),
        _engine(model_settings(model, context), bool(options.cluster)),
        *_of_environment(options, template, tokenizer),
        Given("algorithm.prompts_per_step", prompts, "problems"),
        Given("algorithm.group_size", 8, "completions of each"),
        Given("layout.micro_batch_tokens", max(16384, context)),
        Given("optimizer.lr", 1e-6, "usual for RL of a whole model"),
        Given("optimizer.warmup_steps", 5),
    ]
    chosen = {"model": "from_folder", "layout": "auto", "data": option, "algorithm": "grpo_token_mean"}
    if ":" in options.reward:
        term = options.reward.rpartition(":")[2]
        settings.append(Given("reward.terms", [{"name": term, "weight": 1.0, "function": options.reward}]))
        settings.append(Given("reward.success", term, "what is reported as accuracy"))
    else:
        chosen["reward"] = options.reward
    if options.cluster:
        chosen["cluster"] = options.cluster
        settings.append(Given("cluster.nodes", options.nodes))
    has_effect = [s for s in settings if s.value not in (None, 0, "{prompt}") or s.name.endswith(".answer")]
    return Draft(options.name, chosen, has_effect, problems, min(2, prompts))


def _lengths(
    environment: str | None, problems: Sequence[Prompt], model: Path, completion_tokens: int, tokenizer: Tokenizer
) -> tuple[int, int]:
    """`longest_lengths`, with what the environment adds to prompts."""
    added = longest_opening(environment, problems, tokenizer) if environment else 0
    longest, context = longest_lengths(problems, model, added + completion_tokens)
    if context <= longest + added:
        what = f"it adds {added} tokens to a problem, and {model} was trained for {context}"
        raise InputError(f"--environment {environment}", what, "make what it adds shorter")
    return longest + added, context


def _of_environment(options: argparse.Namespace, template: str, tokenizer: HuggingFaceTokenizer) -> list[Given]:
    form = ({"reply": "tool"} if options.environment and template == CHAT else {}) | options.form
    if options.agent:
        # The endpoint reads calls, whole turns are its answers, and messages need no form.
        form = {name: value for name, value in form.items() if name in ("open", "tool_call_parser")}
        end = tokenizer.end_of_turn()
        form |= {} if end is None else {"close": tokenizer.decode([end])}
    return [
        Given("data.template_options", options.told, "what the chat template tells the policy"),
        Given("environment.path", options.environment),
        *(
            Given(f"environment.{name}", value, "the model's form of calls and replies" if not options.agent else "")
            for name, value in form.items()
        ),
    ]


def check_given(options: argparse.Namespace) -> None:
    """Raises FileNotFoundError that names everything on the command line that does not exist."""
    given = {"--model": options.model, "--data": options.data, "--test": options.test}
    gone = [
        f"{name} {path} does not exist{instead_of(path)}{on_hub(path, name != '--model')}"
        for name, path in given.items()
        if path and not os.path.exists(path)
    ]
    if gone:
        raise FileNotFoundError("\n  ".join(gone))


def columns(options: argparse.Namespace) -> SourceConfig:
    """The columns of the problems: those of the command line, and of the others those that rewards may read.

    Raises:
        InputError: A row cannot be read.
    """
    of_rows = [row.fields for row in records(options.data)]
    somewhere = [*dict.fromkeys(name for row in of_rows for name in row if row[name] is not None)]
    everywhere = [name for name in somewhere if all(row.get(name) is not None for row in of_rows)]
    named = {options.prompt, options.answer}
    metadata = {"code": ["tests"], "countdown": [NUMBERS]}.get(options.reward, [])
    if ":" in options.reward or options.environment:
        if partly := [name for name in somewhere if name not in (*everywhere, *named)]:
            who = "the environment does" if options.environment else "rewards do"
            print(
                f"columns that some rows lack, so that {who} not get them: {', '.join(partly)}",
                file=sys.stderr,
            )
        metadata = [name for name in everywhere if name not in named | {"id", "task"} and _is_json(of_rows[0][name])]
    needs_none = options.reward in ("code", "environment") or ":" in options.reward
    has_answer = options.answer != "answer" or "answer" in somewhere or not needs_none
    return SourceConfig(
        prompt=options.prompt,
        answer=options.answer if has_answer else None,
        answer_pattern=options.answer_pattern,
        metadata=metadata,
    )


def _is_json(value: object) -> bool:
    try:
        return bool(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return False


def _files(options: argparse.Namespace, name: str, source: SourceConfig, count: int) -> list[Given]:
    """Settings of the files of problems: as one source without a name if its columns are those that need no naming."""
    path, test = str(Path(options.data).absolute()), str(Path(options.test).absolute()) if options.test else None
    if name == ONLY:
        return [Given("data.train_path", path, f"{count:,} problems"), Given("data.test_path", test)]
    field = f"data.sources.{name}"
    settings = [
        Given(f"{field}.path", path, f"{count:,} problems"),
        Given(f"{field}.test_path", test),
    ]
    columns_of = ("prompt", "answer", "answer_pattern", "metadata")
    changed = [column for column in columns_of if getattr(source, column) != getattr(SourceConfig(), column)]
    return [*settings, *(Given(f"{field}.{column}", getattr(source, column)) for column in changed)]


def _engine(layers: dict[str, Any], gpus: bool) -> Given:
    """Setting of the engine: SGLang on GPUs, if it supports the model's layers (`config/rules/rollout.py`)."""
    family = layers_of(layers.get("family"))
    if gpus and (not family.sglang or (layers.get("window") and not family.sglang_windows)):
        return Given("rollout.engine", "embedded", "slow: SGLang is not tried with the windows of these layers")
    return Given("rollout.engine", "sglang" if gpus else "embedded")


def try_reward(config: Config, data: Data) -> None:
    """Prints the rewards of made-up completions, right and wrong, of a problem of each task.

    Raises:
        InputError: A term cannot score them.
    """
    refusals = Refusals([])
    show_rewards(config, Read(data.tokenizer, [*data.problems, *data.validation, *data.test]), refusals)
    if refusals.found:
        raise InputError("reward.terms", "\n".join(refusals.found), "correct the reward, or give another with --reward")


def fit_layout(experiment: Draft, config: Config) -> None:
    """Adds the settings of the layout that `choice.propose` finds for the machines.

    Raises:
        ConfigError: No layout fits.
    """
    from grpo_mega.forecast.planning.choice import propose
    from grpo_mega.forecast.planning.search import differing

    fitting = propose(config)
    experiment.options["layout"] = "single"
    experiment.settings = [setting for setting in experiment.settings if not setting.name.startswith("layout.")]
    before = replace(config, layout=LayoutConfig(), optimizer=replace(config.optimizer, distributed=False))
    for name, value in differing(before, fitting):
        experiment.set(name, value)
    experiment.processes = config.cluster.gpus_per_node


def write_script(path: Path, title: str, cluster: ClusterConfig, checkpoint: float) -> None:
    """Writes the Slurm script of an experiment with known machines and checkpoints of so many bytes."""
    written_and_read = 2 * checkpoint / 1e9 / GB_PER_SECOND
    text = SCRIPT.format(
        title=title,
        name=path.stem,
        nodes=cluster.nodes,
        gpus=cluster.gpus_per_node,
        seconds=max(SECONDS_TO_SAVE, int(written_and_read) + OTHER_SECONDS),
    )
    write_atomic(path, text)
    path.chmod(0o755)


def _show(experiment: Draft, planned: dict[str, Any] | None, paths: Sequence[Path]) -> None:
    """Prints the written files, the plan for the GPUs (None without them), and the commands to type next."""
    from grpo_mega.forecast.planning.show import show

    first, written = experiment.problems[0], "\n".join(map(str, paths))
    print(f"{written}\n\nThe policy is asked, for example:\n\n{first.text}\n\n(the answer is: {first.answer})\n")
    if planned:
        show(planned)
    print("\nTo see what would be wrong, and to train:\n")
    if planned:
        print(
            f"    slurm/{experiment.name}.sh --dry-run\n    slurm/{experiment.name}.sh --partition=NAME --account=NAME"
        )
        return
    print(f"    python -m grpo_mega.train experiment={experiment.name} --dry-run")
    print(f"    torchrun --nproc-per-node {experiment.processes} -m grpo_mega.train experiment={experiment.name}")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m grpo_mega.new", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rewards, clusters = groups()["reward"], [name for name in groups()["cluster"] if name != "any"]
    parser.add_argument("name", help="of the experiment, and of the run's directory")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings to write besides the derived ones")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a Hugging Face model with its tokenizer")
    parser.add_argument(
        "--data", required=True, metavar="FILE", help="problems: JSON Lines, CSV, Parquet (docs/data.md)"
    )
    parser.add_argument("--prompt", default="prompt", metavar="COLUMN", help="column of the problem (prompt)")
    parser.add_argument("--answer", default="answer", metavar="COLUMN", help="column of the answer (answer)")
    parser.add_argument("--answer-pattern", metavar="REGEX", help="its last match is the answer, or the group in it")
    parser.add_argument("--test", metavar="FILE", help="held-out problems; a tenth of --data unless given")
    parser.add_argument(
        "--shared-test-problems",
        type=int,
        default=0,
        metavar="N",
        help="number of problems of --test that --data may contain, too (0)",
    )
    parser.add_argument("--reward", help=f"{', '.join(rewards)}, or your function as module:function (boxed)")
    help_ = "your tools or game as module:Class or module:function; its get_reward, if any, is the reward"
    parser.add_argument("--environment", metavar="PATH", help=help_)
    parser.add_argument(
        "--completion-tokens", type=int, default=1024, metavar="N", help="tokens of the longest completion (1024)"
    )
    parser.add_argument("--answer-tokens", action=Renamed, const="--completion-tokens")
    parser.add_argument("--cluster", choices=clusters, help="GPUs that the run must fit; without it, a CPU is assumed")
    parser.add_argument("--nodes", type=int, default=1, help="machines of the cluster (1)")
    options = parser.parse_intermixed_args(as_meant(arguments))
    if options.reward and ":" not in options.reward and options.reward not in rewards:
        parser.error(f"--reward {options.reward}: choose {', '.join(rewards)}, or name a function as module:function")
    if not options.name.replace("-", "_").replace(".", "_").isidentifier():
        parser.error(f"NAME {options.name!r}: letters, digits, - and _ only, beginning with a letter")
    if strange := [word for word in options.settings if not re.match(r"[a-z]\w*(\.\w+)*=", word)]:
        parser.error(f"{strange[0]!r} is neither an option nor a setting (key=value)")
    searched = {f"layout.{name}" for name in (*DECIDED, "recompute")} | {"layout"}
    if options.cluster and (typed := [word for word in options.settings if word.partition("=")[0] in searched]):
        parser.error(f"{typed[0]}: --cluster searches the layout; leave one of them out")
    if options.completion_tokens < 1 or options.nodes < 1:
        parser.error("--completion-tokens and --nodes must be at least 1")
    if options.shared_test_problems < 0 or (options.shared_test_problems and not options.test):
        parser.error("--shared-test-problems must be at least 0, and needs --test FILE: give both, or neither")
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    options = _options(arguments)
    path = config_dir() / "experiment" / f"{options.name}.yaml"
    script = config_dir().parent / "slurm" / f"{options.name}.sh"
    paths = [path, script] if options.cluster else [path]
    if existing := [name for name in paths if name.exists()]:
        print(f"error: {existing[0]} exists; choose a different NAME, or remove it", file=sys.stderr)
        return BAD_INPUT
    warnings.filterwarnings("ignore", module="megatron")
    platform.start_planning()
    problems = f"{Path(options.data).name} with {Path(options.model).absolute().name}"
    title = f"GRPO on {problems}, written by python -m grpo_mega.new; yours to change."
    try:
        waiting.begin(f"{problems}: reading", stays=False)
        environment: dict[str, Any] = described(options.environment) if options.environment else {}
        options.reward = options.reward or ("environment" if environment.get("rewards") else "boxed")
        options.told, options.form, told_by = None, {}, "its prompt must describe them"
        options.agent = bool(environment.get("agent"))
        if environment and re.search(r"\btools\b", template := chat_template(Path(options.model))):
            if options.agent:
                options.form = form_of(template)
            elif environment["schemas"]:
                options.told, told_by = {"tools": environment["schemas"]}, "its chat template describes them"
                options.form = {} if environment["stepped"] else form_of(template, [*environment["tools"]])
            else:
                told_by += f" ({environment['undescribed']})"
        experiment = draft(options)
        experiment.take(options.settings)
        write_atomic(path, experiment.text(title))
        config = compose_config([f"experiment={options.name}"])
        data = build_data(config, partial(why_unreachable, config.reward.terms), keep=True, tell=waiting.tell)
        waiting.end()
        try_reward(config, data)
        if options.environment:
            try_out(config, data.tokenizer, data.problems, environment["tools"], told_by)
        if options.cluster:
            fit_layout(experiment, config)
            write_atomic(path, experiment.text(title))
            config = compose_config([f"experiment={options.name}"])
        from grpo_mega.forecast.planning.plan import plan  # builds models, and takes seconds to import

        planned = plan(config) if config.cluster.gpu_memory_mib else None
        if options.cluster:
            assert planned, "fit_layout has set the memory of the GPUs"
            write_script(script, title, config.cluster, planned["checkpoint"])
        _show(experiment, planned, paths)
    except BaseException as error:
        waiting.end()
        for written in paths:
            written.unlink(missing_ok=True)  # no untested files remain
        if not isinstance(error, (ValueError, OSError, RuntimeError, OmegaConfBaseException)):
            raise
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    for warning in data.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return WRITTEN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
