"""The checks before a run starts, in one list for all who ask: a start, `--dry-run`, and a submission to Slurm.

A start and a submission refuse what fails (`refuse_all`), a dry run lists it beside other problems. `layout_checks` and
`input_checks` need neither torch nor Megatron; `model_checks` read the headers and small files of models, no weights.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from grpo_mega import platform
from grpo_mega.config.inputs import inputs
from grpo_mega.config.load import identity
from grpo_mega.config.recorded import run_of, written
from grpo_mega.config.rules import check_layout
from grpo_mega.config.schema import REWARD_MODELS, Config, ModelConfig, RunConfig
from grpo_mega.config.trained_model import check_reward_model, check_teacher, read_reward_model, read_teacher
from grpo_mega.data.check_models import check_reward_model_state, teacher_vocabulary
from grpo_mega.data.tokenizer import Tokenizer
from grpo_mega.errors import ConfigError, InputError
from grpo_mega.models.families.hf_folder import missing
from grpo_mega.observe.run_dir import CHECKPOINTS, check_run_dir, has_checkpoints
from grpo_mega.platform.manifest import MANIFEST

Check: TypeAlias = tuple[str, Callable[[], object]]
"""What is checked, and the function that raises an InputError if it is wrong."""
TOKENIZER = "tokenizer.json"


def refuse_all(checks: Iterable[Check]) -> None:
    """Runs every check.

    Raises:
        InputError: One problem.
        ConfigError: Several, all named.
    """
    problems: list[InputError] = []
    for name, check in checks:
        try:
            check()
        except ConfigError as error:
            problems += error.problems
        except InputError as error:
            problems.append(error)
        except ImportError:  # nothing is known then; whoever asks decides what that means
            raise
        except Exception as error:  # a damaged file fails in as many ways as there are readers
            problems.append(InputError(name, f"{type(error).__name__}: {error}", "restore it, or choose another"))
    if problems:
        raise ConfigError.of(problems)


def refuse_together(checks: Iterable[Check]) -> None:
    """Runs every check on the main rank; every rank must call it, and all raise what `refuse_all` raises there."""
    from grpo_mega.platform.collectives import from_main_rank  # imports torch, which the other checks do without

    def problem() -> InputError | None:
        try:
            refuse_all(checks)
        except InputError as error:
            return error
        return None

    if found := from_main_rank(problem):
        raise found


def layout_checks(config: Config, processes: int | None) -> list[Check]:
    """The check of the layout; none while the number of processes or the layout is open."""
    if processes is None or config.layout.undecided:  # layout=auto is chosen when all processes have joined
        return []
    return [("the layout", partial(check_layout, config, processes))]


def input_checks(config: Config) -> list[Check]:
    """Checks that every file and folder that the run reads is there."""
    return [(name, partial(_check_readable, name, path)) for name, path in inputs(config).items()]


def _check_readable(name: str, path: str) -> None:
    """Raises an InputError when the file or folder of the setting `name` is missing or not readable."""
    if not os.path.exists(path):
        raise missing(name, path, is_data=name.startswith(("data.train", "data.test", "data.sources")))
    if not os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0)):
        raise InputError(f"{name}={path}", "cannot be read", "ask its owner for the permission")


def run_directory(config: RunConfig) -> Path:
    """Absolute path of the run directory, which may not exist yet."""
    return Path(config.root).resolve() / config.name


def check_run_directory(config: Config) -> None:
    """Checks that the run directory is new or belongs to this run, and can be created; changes nothing.

    A start does not call it: it opens the directory, which refuses the same under its lock (`open_run_dir`).

    Raises:
        InputError: The directory belongs to another experiment, or the file system does not let it be created.
    """
    path = run_directory(config.run)
    check_run_dir(path, identity=identity(config))
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):  # permissions do not tell of file systems that are read-only
            pass
    except OSError as error:
        what = f"cannot be written to ({error.strerror})"
        raise InputError(str(existing), what, "choose another run.root") from error


def model_checks(config: Config, tokenizer: Tokenizer | None, vocab_size: int | None, alone: bool) -> list[Check]:
    """Checks of the models that the run starts from or learns from. Missing ones are left to `input_checks`.

    Args:
        config: The configuration.
        tokenizer: The policy's; None if it cannot be read here, which leaves out comparisons with it.
        vocab_size: Number of tokens that the policy scores; None if only the tokenizer knows.
        alone: Whether this process is in no process group, and may prepare the platform for planning. Shapes of a
            checkpoint's tensors are checked only then; otherwise loading checks them.

    The checks raise ImportError where torch or Megatron, which reading needs, is not installed.
    """
    checks: list[Check] = []
    origin = Path(config.run.init_from or "")
    # A run that resumes from its own checkpoints no longer reads the initial weights.
    read = not config.base.train and not has_checkpoints(run_directory(config.run))
    if config.run.init_from and origin.exists() and read:
        model, name, expected = config.model, config.data.tokenizer, vocab_size if alone else None
        checks += [
            ("run.init_from", partial(_check_origin, config.run, name, model, origin, expected)),
            ("run.init_from", partial(_check_origin_architecture, model, origin, vocab_size, alone)),
            ("run.init_from", partial(_check_origin_tokenizer, origin, name)),
        ]
    if not config.distill.served and config.distill.teacher and Path(config.distill.teacher).exists():
        checks.append(("distill.teacher", partial(_check_teacher, config, tokenizer)))
    if config.reward.model.path and Path(config.reward.model.path).exists():
        path = Path(config.reward.model.path)
        checks.append(("reward.model.path", partial(check_learned_reward, config, path, tokenizer)))
    return [("the models", platform.start_planning), *checks] if alone and checks else checks


def _check_origin(run: RunConfig, tokenizer: str, model: ModelConfig, origin: Path, vocab_size: int | None) -> None:
    """Checks that the initial weights are complete and, with `vocab_size`, that those of a run's checkpoint have the
    model's shapes."""
    from grpo_mega.checkpoint.checkpoint import STATE
    from grpo_mega.checkpoint.contents import check_beside_weights, check_files, check_weights
    from grpo_mega.checkpoint.model_state import POLICY, folder_of
    from grpo_mega.models.scalar import REWARD_MODEL
    from grpo_mega.weights.directory import CONFIG, is_model

    if not (origin / STATE).is_file():
        if not is_model(origin):
            what = f"neither a checkpoint (no {STATE}) nor a Hugging Face model (no {CONFIG})"
            saved = sorted(one.name for one in (origin / CHECKPOINTS).glob("[!.]*"))
            fix = f"choose {origin / CHECKPOINTS}/{saved[-1]}" if saved else "choose a folder that is one of the two"
            raise InputError(f"run.init_from={origin}", what, fix)
        return
    reward_model = run.trains in REWARD_MODELS and (origin / folder_of(REWARD_MODEL)).is_dir()
    check_files(origin, folder_of(REWARD_MODEL) if reward_model else POLICY)
    if Path(tokenizer) != origin:  # otherwise reading the tokenizer has checked them
        check_beside_weights(origin)
    # An imported checkpoint has its config.json to compare; what was a reward model has a head of another shape.
    if vocab_size and not reward_model and not is_model(origin):
        check_weights(origin, model, vocab_size)


def _check_origin_architecture(model: ModelConfig, origin: Path, vocab_size: int | None, alone: bool) -> None:
    """Compares config.json, if there is one, and the tensors beside it, with the configuration's model."""
    from grpo_mega.checkpoint.checkpoint import STATE
    from grpo_mega.weights.directory import Reader, check_architecture, is_model

    if not is_model(origin):
        return
    imported = (origin / STATE).is_file()
    check_architecture(origin, model, vocab_size, has_weights=not imported)
    if alone and vocab_size and not imported:
        Reader(origin, model, vocab_size)


def _check_origin_tokenizer(origin: Path, tokenizer: str) -> None:
    """Refuses a checkpoint whose run is known to have had other tokens than this one."""
    from grpo_mega.checkpoint.checkpoint import STATE

    try:
        state = json.loads((origin / STATE).read_text())
    except FileNotFoundError:  # a Hugging Face folder
        return
    trained = (state.get("config") or written(run_of(origin.absolute()))).get("data", {}).get("tokenizer")
    if trained in (None, tokenizer):
        return
    theirs, ours = (_tokens(Path(folder) / TOKENIZER) for folder in (trained, tokenizer))
    # Tokens that were added since do no harm: the model has rows for them, which training fills.
    if "chars" in (trained, tokenizer) or (theirs and ours and not theirs.are_among(ours)):
        what = (
            f"was trained with data.tokenizer={trained}, whose tokens differ from those of data.tokenizer={tokenizer}"
        )
        raise InputError(f"run.init_from={origin}", what, f"set data.tokenizer={trained}")


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens of a tokenizer.json with their ids, the special ones, and what it makes of a text."""

    ids: dict[str, int]
    special: set[int]
    of_text: list[int]

    def are_among(self, others: _Vocabulary) -> bool:
        """Whether the other tokenizer reads and writes at least these tokens, by the same ids."""
        same = self.special <= others.special and self.of_text == others.of_text
        return same and self.ids.items() <= others.ids.items()


def _tokens(file: Path) -> _Vocabulary | None:
    """The tokens, whatever the file's formatting; None if it cannot be read, which is reported where it is needed."""
    from tokenizers import Tokenizer as FastTokenizer

    try:
        read = FastTokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception:  # a bare Exception is what tokenizers raises
        return None
    special = {i for i, token in read.get_added_tokens_decoder().items() if token.special}
    return _Vocabulary(read.get_vocab(), special, read.encode("a").ids)


def _check_teacher(config: Config, tokenizer: Tokenizer | None) -> None:
    """Checks that the layout can split the teacher, and that it has the policy's tokens."""
    teacher = read_teacher(config.distill, config.model)
    assert teacher is not None, "the setting has a value"
    check_teacher(config, teacher)
    if tokenizer:
        teacher_vocabulary(teacher, tokenizer, config.distill, config.data, config.model)


def check_learned_reward(config: Config, path: Path, tokenizer: Tokenizer | None) -> None:
    """Checks that the reward model is complete, can be split by the layout, and has the policy's tokens.

    Raises:
        InputError: A check fails, or `path` holds no reward model.
    """
    from grpo_mega.checkpoint.checkpoint import STATE
    from grpo_mega.checkpoint.contents import check_files
    from grpo_mega.checkpoint.model_state import folder_of
    from grpo_mega.models.scalar import REWARD_MODEL

    folder = folder_of(REWARD_MODEL)
    own = [path] if (path / STATE).is_file() else sorted((path / CHECKPOINTS).glob("step-*"))
    whole = [each for each in own if (each / folder).is_dir() and (each / MANIFEST).is_file()]
    if not whole:
        raise InputError(
            f"reward.model.path={path}",
            "holds no finished reward model",
            "choose the directory of a run with run.trains=reward_model or process_reward_model, or a checkpoint of it",
        )
    check_files(whole[-1], folder)
    check_reward_model(config, read_reward_model(config.reward, config.model) or config.model)
    if tokenizer:
        state = json.loads((whole[-1] / STATE).read_text())["stage"]
        check_reward_model_state(whole[-1], state, tokenizer, config.reward, config.algorithm, config.data)
