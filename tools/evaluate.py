"""Evaluates a model: pass@1, pass@k, majority votes, format and length, with confidence intervals, task by task.

    python tools/evaluate.py runs/tiny --samples 16
    python tools/evaluate.py runs/tiny/checkpoints/step-000080 --samples 4 --temperature 0.6
    torchrun --master-port 29501 --nproc-per-node 2 tools/evaluate.py runs/tiny layout.ep=2
    python tools/evaluate.py models/Qwen2.5-0.5B-Instruct --data problems.jsonl
    python tools/evaluate.py runs/mine rollout.engine=sglang --budgets 1024 2048 4096 8192
    python tools/evaluate.py runs/tiny --train 1000 --samples 4 --out pool
    python tools/evaluate.py runs/tiny --train 1000 --samples 8 --continue pool --separators ';' --out continued

It evaluates the newest intact checkpoint of a run directory, the named checkpoint, or a Hugging Face folder. A run is
evaluated on its own test problems, or with --train on its first training problems, and scored with its own reward,
unless --data and --reward select others; further words are settings, such as rollout.max_new_tokens=64. A folder is
prompted as by python -m grpo_mega.new, with DeepSeek-R1's settings: temperature 0.6, top-p 0.95, up to 32,768 tokens.

With the setting reward.model.path=RUN a reward model scores the samples too: the term model, and rm@k, the accuracy of
its highest-scored one of k. A run's own reward model is used only if it is named this way.

Generation is by the embedded engine unless rollout.engine=sglang is given. --budgets also measures the accuracy of
completions cut after these numbers of tokens: each is scored again up to there, and nothing is generated again.

With --continue the completions of a pool are continued after each step, as split by --separators, and scored as whole
completions: labels of steps for a process reward model (tools/rejection_sample.py --steps --continued). The problems
must be those of the pool: give its --train or --data again.

The results go to a folder (--out; evaluations/ of the run directory): results.json, every sample in samples.jsonl,
curves.png and, with --budgets, budgets.png. A killed command resumes with the missing problems when started again; a
finished one is shown again. On SIGTERM or SIGUSR1 it exits with 75, and can be resumed too. With the embedded engine
the numbers are the same under every layout and number of processes.

Exit code: 0 the results are complete, 1 a reward or the disk failed, 2 invalid input, 75 stopped.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mega import platform
from grpo_mega.config.typed import as_meant
from grpo_mega.convert.command import parser_of, run
from grpo_mega.errors import InputError
from grpo_mega.observe.launcher import STOPPED, Heartbeat, leave, refusing_options
from grpo_mega.platform.stop import SIGNALS, Interrupted, Stopped, StopRequest

if TYPE_CHECKING:
    from grpo_mega.config.schema import Config
    from grpo_mega.data.tokenizer import Tokenizer
    from grpo_mega.environment.conversation import Conversation
    from grpo_mega.evaluate.generate import Scorer
    from grpo_mega.evaluate.subject import Asked, Subject
    from grpo_mega.first_weights import CheckedRewardModel
    from grpo_mega.models.topology import Topology
    from grpo_mega.recipes.curation.continuing import Begun
    from grpo_mega.rollout.engine import SamplingParams
    from grpo_mega.types import Prompt

PREFERRED = "reward.model.path="
"""Setting that makes a reward model score the samples."""
ROLES = ("policy", "average", "reference")
AGAIN = "Fix that; the same command continues with the missing problems"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command's options."""
    parser = parser_of(__doc__, "RUN|CHECKPOINT|FOLDER", ROLES, None)
    parser.add_argument("settings", nargs="*", metavar="FIELD=VALUE", help="settings, such as layout.ep=2")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="[TASK=]FILE", help="problems (the run's test problems)"
    )
    parser.add_argument("--train", type=int, metavar="N", help="ask the run's first N training problems instead")
    parser.add_argument("--samples", type=int, default=16, metavar="N", help="completions of each problem (16)")
    parser.add_argument("--temperature", type=float, help="of the samples, 0 for greedy (as the run; 0.6 for a folder)")
    parser.add_argument("--top-p", type=float, help="nucleus sampling (as the run; 0.95 for a folder)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[], metavar="TOKENS", help="where to cut completions")
    parser.add_argument(
        "--continue", dest="pool", type=Path, metavar="POOL", help="continue completions of an evaluation, step by step"
    )
    parser.add_argument("--separators", nargs="+", default=[], metavar="TEXT", help="what divides steps (\\n)")
    parser.add_argument("--reward", help="of configs/reward, or module:function (the run's; boxed for a folder)")
    parser.add_argument(
        "--trust-run",
        action="store_true",
        help="allow what RUN's configuration runs or calls: functions, commands, services, arguments of SGLang",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the results")
    return parser.parse_intermixed_args(as_meant(arguments))


def main(arguments: list[str]) -> int:
    """Runs the command on every rank; returns its exit code."""
    with refusing_options():
        options = parse(arguments)
    # Before generation there is nothing to save, so a signal ends the rank at once; `_generate` takes over from there.
    for number in SIGNALS:
        signal.signal(number, lambda *_: leave("stopped before it generated; the same command continues", STOPPED))
    return run(lambda here: evaluate(options, here), AGAIN)


def evaluate(options: argparse.Namespace, here: platform.Platform) -> str:
    """Generates and scores the missing samples; returns the table.

    Raises:
        InputError: The input is invalid.
        FileNotFoundError: The source or a file does not exist.
        RuntimeError: A reward failed, or the disk.
        Stopped: A signal arrived during generation; finished parts are kept.
    """
    import torch.distributed as dist

    from grpo_mega.data.model_defaults import stop_ids
    from grpo_mega.evaluate import results
    from grpo_mega.evaluate.results import CONTINUES
    from grpo_mega.evaluate.subject import subject
    from grpo_mega.platform.collectives import from_main_rank, succeed_together
    from grpo_mega.rollout.engine import SamplingParams
    from grpo_mega.show.evaluation import conclude, shown
    from grpo_mega.stages.step import longest_completion

    model = subject(options.source, _asked(options), dist.get_world_size())
    continues, begun = _continuations(options, model)
    if begun:
        prompts = [each.asked for each in begun.values()]
        model = replace(model, prompts=prompts, name=f"{model.name}, from {options.pool}")
    config, sampled = model.config, model.config.eval
    sampling = SamplingParams(
        max_new_tokens=longest_completion(config.rollout, model.draw),
        stop_ids=stop_ids(config.rollout.stop, model.tokenizer, (config.data.tokenizer, config.run.init_from)),
        temperature=config.rollout.temperature if sampled.temperature is None else sampled.temperature,
        top_p=config.rollout.top_p if sampled.top_p is None else sampled.top_p,
        top_k=config.rollout.top_k,
        seed=config.run.seed,
        draw=model.draw,
    )
    folder, budgets = model.folder, tuple(sorted({*options.budgets}))
    if budgets and model.config.environment.path:
        what = "an environment's part in a completion cannot be cut"
        raise InputError("--budgets", what, "leave it out, or give environment.path=null")
    if budgets and not 1 <= budgets[0] <= budgets[-1] < sampling.max_new_tokens:
        raise InputError(
            f"--budgets {' '.join(map(str, options.budgets))}",
            f"completions have up to rollout.max_new_tokens={sampling.max_new_tokens} tokens",
            f"choose numbers from 1 to {sampling.max_new_tokens - 1}",
        )
    # What decides the numbers: a folder with results of other settings is refused, one of the same is continued.
    settings = model.identity | {"sampling": vars(sampling), "samples": sampled.samples}
    settings |= {"budgets": budgets} if budgets else {}
    settings |= {CONTINUES: continues} if begun else {}
    preferred = _reward_model(model) if _asks_reward_model(options) else None
    settings |= {"reward_model": preferred.checksum} if preferred else {}
    with ExitStack() as held:
        # An error on the main rank alone would leave the others waiting: it is returned, and raised everywhere.
        if problem := from_main_rank(lambda: _refusal(folder, settings, held)):
            raise problem
        if not from_main_rank((folder / results.RESULTS).is_file):
            _generate(folder, model, sampling, budgets, preferred, begun, here)
            succeed_together(lambda: conclude(folder, model, settings) if dist.get_rank() == 0 else None)
    return from_main_rank(lambda: shown(folder, model, settings))


def _continuations(options: argparse.Namespace, made: Subject) -> tuple[dict[str, Any], dict[str, Begun]]:
    """Beginnings to continue, for settings.json and by id; empty without --continue.

    Raises:
        InputError: The options do not go together, or the pool has nothing to continue.
    """
    from grpo_mega.config.schema import PairsConfig
    from grpo_mega.recipes.curation.continuing import begun_of
    from grpo_mega.recipes.curation.selection import open_pool

    if options.pool is None:
        if options.separators:
            raise InputError("--separators", "divide the steps of --continue", "give that, or leave them out")
        return {}, {}
    if options.budgets or options.out is None or _asks_reward_model(options):
        raise InputError(
            "--continue",
            f"continuations are not whole completions, so --budgets and {PREFERRED} cannot measure them",
            "give --out FOLDER, and leave the others out",
        )
    if made.config.environment.path:
        what = "a beginning is continued without the environment's part in it"
        raise InputError("--continue", what, "leave it out, or give environment.path=null")
    separators = [text.replace("\\n", "\n") for text in options.separators] or PairsConfig().separators
    pool = open_pool(options.pool)
    begun = begun_of(pool, made.prompts, separators, made.tokenizer, made.config.model.context)
    return {"pool": pool.sha256, "separators": separators}, begun


def _asks_reward_model(options: argparse.Namespace) -> bool:
    return any(word.startswith(PREFERRED) for word in options.settings)


def _reward_model(made: Subject) -> CheckedRewardModel:
    """The reward model named by the settings. Raises InputError when it cannot score these samples."""
    from grpo_mega.checks import check_learned_reward, refuse_together
    from grpo_mega.first_weights import find_reward_model

    config = _of_whole_completions(made.config)
    if config.rollout.engine == "sglang":
        raise InputError(
            f"{PREFERRED}{config.reward.model.path} with rollout.engine=sglang",
            "engines hold the GPUs until the last sample, and the reward model would need them in between",
            "leave rollout.engine out",
        )
    path = Path(str(config.reward.model.path))
    check = partial(check_learned_reward, config, path, made.tokenizer)
    refuse_together([("reward.model.path", check)])
    reward_model = find_reward_model(config, made.tokenizer)
    assert reward_model is not None, "the setting has a value"
    return reward_model


def _of_whole_completions(config: Config) -> Config:
    """The configuration of a reward model of whole completions, however the run was trained: nothing has advantages."""
    return replace(config, algorithm=replace(config.algorithm, supervision="outcome", advantage_std="none"))


def _refusal(folder: Path, settings: dict[str, Any], held: ExitStack) -> ValueError | OSError | None:
    """Why the results cannot be written to this folder; None if they can, and `held` then locks it."""
    from grpo_mega.evaluate.results import RESULTS, open_folder
    from grpo_mega.platform.files import only_one

    try:
        open_folder(folder, settings)
        # Finished results are only shown, which several commands may do at once.
        if not (folder / RESULTS).is_file():
            held.enter_context(only_one(folder / RESULTS))
    except (ValueError, OSError) as error:
        return error
    return None


def _generate(
    folder: Path,
    made: Subject,
    sampling: SamplingParams,
    budgets: tuple[int, ...],
    preferred: CheckedRewardModel | None,
    begun: dict[str, Begun],
    here: platform.Platform,
) -> None:
    """Builds model and engine, and generates and scores the samples that the folder lacks."""
    from grpo_mega.colocation.colocation import Colocation
    from grpo_mega.data.tokenizer import vocabulary
    from grpo_mega.environment.conversation import conversation_of
    from grpo_mega.evaluate.generate import generate_missing
    from grpo_mega.models.policy import Policy
    from grpo_mega.models.topology import join_layout
    from grpo_mega.observe.timer import PhaseTimer
    from grpo_mega.rollout.embedded import EmbeddedEngine
    from grpo_mega.rollout.sglang.engine import SGLangEngine
    from grpo_mega.rollout.sglang.lifecycle import Engines

    config, decode = made.config, _decoder(made.tokenizer)
    beat, stop = Heartbeat(), StopRequest()

    def interrupted() -> bool:
        beat("generate")
        return stop.asked()

    beat("load the model")
    scorer = _scorer(made, budgets, begun, decode)
    topology = join_layout(config.layout, seed=config.run.seed)
    vocab_size, at_once = vocabulary(config.model, made.tokenizer), config.rollout.concurrent_sequences
    serves = config.rollout.engine == "sglang"
    if serves:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    engines = partial(Engines, config.model, config.rollout, config.run.seed, vocab_size, here, folder)
    with (
        conversation_of(config, made.tokenizer) as conversation,
        # Before the policy takes memory, as it measures what is free.
        closing(SGLangEngine(engines(), decode)) if serves else nullcontext() as sglang,
        _resumable(stop, folder),
    ):
        if conversation:
            scorer, sampling = _with_replies(conversation, made.prompts, scorer, sampling)
        policy = Policy(config.model, config.layout, vocab_size, topology, here, optimizer=None, lora=config.lora)
        made.read(policy)
        if preferred:
            scorer = _with_preferences(config, preferred, topology, here, scorer, decode)
        engine, samples = sglang or EmbeddedEngine(policy, decode, at_once), config.eval.samples
        # A kill loses the part in progress: it has as many problems as keep all replicas busy, and no more.
        together = max(1, at_once // samples) * topology.scorers
        # From here on a signal is recorded, and generation ends at the next point at which no work is lost.
        stop.listen()
        how = (sampling, engine, scorer, together, partial(_say, folder), interrupted)
        work = partial(generate_missing, folder, made.prompts, samples, *how)
        if sglang:
            text = [token for prompt in made.prompts for token in prompt.token_ids]
            colocation = Colocation(policy, [], sglang, config.rollout.sglang, PhaseTimer(), text, folder)
            work = partial(colocation.generate, 0, "evaluate", work)
        work()


def _with_preferences(
    config: Config,
    checked: CheckedRewardModel,
    topology: Topology,
    here: platform.Platform,
    scorer: Scorer,
    decode: Callable[[Sequence[int]], str],
) -> Scorer:
    """The scorer with the scores of a reward model, which is loaded."""
    from grpo_mega.assemble import learned_reward
    from grpo_mega.first_weights import load_reward_model
    from grpo_mega.stages.step import StepOptions

    options = StepOptions.of(_of_whole_completions(config))
    model = load_reward_model(checked, config.layout, topology, here)
    return replace(scorer, learned=learned_reward(config.reward, checked, model, options, decode).added)


def _with_replies(
    conversation: Conversation, prompts: Sequence[Prompt], scorer: Scorer, sampling: SamplingParams
) -> tuple[Scorer, SamplingParams]:
    """The scorer and the sampling of an evaluation with an environment.

    Raises:
        InputError: A problem lacks a field that `reset` needs.
    """
    conversation.check_fields(prompts)
    score = partial(conversation.scores, scorer.score)
    replying = replace(scorer, score=score, replying=conversation, opened=conversation.opened)
    return replying, replace(sampling, stop_ids=(*sampling.stop_ids, conversation.stop_id))


def _say(folder: Path, progress: str) -> None:
    """Prints the progress, on the main rank."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        print(f"{folder}: {progress}", file=sys.stderr)


def _decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Decodes tokens; leaves out those that the model has beyond the tokenizer's vocabulary."""
    return lambda ids: tokenizer.decode(i for i in ids if i < tokenizer.vocab_size)


def _scorer(
    made: Subject, budgets: tuple[int, ...], begun: dict[str, Begun], decode: Callable[[Sequence[int]], str]
) -> Scorer:
    """What scores a completion; with beginnings that are continued, it scores the whole completions."""
    from grpo_mega.evaluate.generate import Scorer
    from grpo_mega.evaluate.votes import ballot_of
    from grpo_mega.recipes.curation.continuing import scored_whole
    from grpo_mega.reward.compose import build_reward

    config = made.config.reward
    reward = build_reward(config, made.config.run.seed)
    score = scored_whole(reward.score, begun) if begun else reward.score
    # Votes are read from whole completions, and a continuation is the end of one.
    ballot = None if begun else ballot_of(config)
    return Scorer(score, config.success, ballot, budgets, decode)


@contextmanager
def _resumable(stop: StopRequest, folder: Path) -> Iterator[None]:
    """Raises Stopped when a signal, here or on another rank, ends the work in this context."""
    try:
        yield
    except (Interrupted, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not stop.asked():
            raise
        # Another rank may have received the signal earlier and left, which ends the collective that this one waits in.
        if isinstance(error, RuntimeError):
            print(f"asked to stop; then: {error}", file=sys.stderr)
        raise Stopped(f"stopped; the same command continues with the problems that {folder} lacks") from error


def _asked(options: argparse.Namespace) -> Asked:
    """Options of the subject; settings for which there are options follow the given ones."""
    from grpo_mega.evaluate.subject import Asked

    named = {"samples": options.samples, "temperature": options.temperature, "top_p": options.top_p}
    return Asked(
        data=options.data,
        train=options.train,
        reward=options.reward,
        settings=[*options.settings, *(f"eval.{name}={value}" for name, value in named.items() if value is not None)],
        config=options.config,
        role=options.model,
        out=options.out,
        trusts=options.trust_run,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
