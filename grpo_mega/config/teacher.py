"""The teacher of on-policy distillation, read from its own files: architecture and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from grpo_mega.config.rules.layout import layout_problems
from grpo_mega.config.rules.model import model_problems
from grpo_mega.config.rules.problems import refuse
from grpo_mega.config.schema import Config
from grpo_mega.config.trained_model import TrainedModel, read_trained_model
from grpo_mega.errors import InputError


def read_teacher(config: Config) -> TrainedModel | None:
    """Reads the description of `distill.teacher` from its files; None without a teacher, or with one on a server.

    Raises: see `read_trained_model`.
    """
    if not config.distill.teacher or config.distill.served:
        return None
    return read_trained_model("distill.teacher", config.distill.teacher, config.model.context)


def check_teacher(config: Config, teacher: TrainedModel) -> None:
    """Checks that the run's layout can split the teacher, and that the teacher supports sequences as long as the run's.

    Raises:
        ConfigError: A check fails; names the fields, which are the teacher's.
    """
    refuse(_problems(config, teacher))


def _problems(config: Config, teacher: TrainedModel) -> Iterator[InputError]:
    context, layout, where = config.model.context, config.layout, f"distill.teacher={config.distill.teacher}"
    if teacher.model.context < context:
        yield InputError(
            where,
            f"supports sequences of {teacher.model.context} tokens, and model.context={context}",
            f"lower model.context to {teacher.model.context}",
        )
    # The weights have a fixed shape, like those of run.init_from.
    run = replace(config.run, init_from=config.distill.teacher)
    own = layout if teacher.model.moe.experts else replace(layout, dispatch="alltoall")
    theirs = replace(config, model=replace(teacher.model, context=context), run=run, layout=own)
    for problem in (*model_problems(theirs), *layout_problems(theirs)):
        yield InputError(where, f"of the teacher, {problem.where}: {problem.what}", problem.fix)
    if not (config.model.moe.experts or teacher.model.moe.experts):
        for name, size in (("layout.ep", layout.ep), ("layout.etp", layout.etp)):
            if size > 1:
                yield InputError(f"{name}={size}", "neither the model nor its teacher has experts", f"set {name}=1")
