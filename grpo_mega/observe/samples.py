"""Writes samples for people, a JSON object a line: samples/step-NNNNNN.jsonl has whole groups of each step,
samples/followed-NNNNNN.jsonl those of the followed problems at each evaluation. docs/samples.md explains
the fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from grpo_mega.platform.files import write_atomic
from grpo_mega.step_ends import BYTES
from grpo_mega.types import Call, Decode, Sample, Score, sampled_spans

FIELDS = (
    "prompt_id", "prompt", "answer", "completion", "group", "sample", "reward", "terms", "reason", "unscorable",
    "tokens", "finish_reason", "policy_version", "advantage", "advantages", "token_texts", "given", "restarts", "calls",
    "ages", "engine_logprobs", "old_logprobs", "new_logprobs", "ref_logprobs", "entropies",
)  # fmt: skip
"""The fields of a record, besides those that are named like terms of the reward."""
DECIMALS = 6
"""Decimals of numbers that belong to tokens: those that float32 log-probs have, in half the space of all digits."""
UNFINISHED = "\ufffd"
"""Replacement character, which decoders return for the first bytes of a character."""


def write_samples(run_dir_path: Path, step: int, records: Sequence[dict[str, Any]], kind: str = "step") -> Path:
    """Writes one JSON object per record to samples/ and returns the file; a step that runs again replaces its file.

    `kind` begins the file's name: "step" or "followed".

    Raises:
        ValueError: A record has a value that JSON cannot express (a tensor, NaN); names the step and the record.
    """
    path = run_dir_path / "samples" / f"{kind}-{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = []
    for index, record in enumerate(records):
        try:
            lines.append(json.dumps(record, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise ValueError(f"sample {index} of step {step} cannot be written as JSON: {error}") from None
    write_atomic(path, "".join(lines))
    return path


def sample_record(sample: Sample, score: Score, group: int, decode: Decode) -> dict[str, Any]:
    """Record of a sample for samples/, before any update; without a score its reward is null.

    `group` is the number of its group in the file. A reward term that is named like another field is only in "terms".
    """
    of_sampled: list[float | None] = [None] * len(sample.token_ids)
    for first, end in sampled_spans(len(sample.token_ids), sample.given):
        of_sampled[first:end] = sample.logprobs[first:end]
    return {
        "prompt_id": sample.prompt.id,
        "prompt": sample.prompt.text,
        "answer": sample.prompt.answer,
        "completion": sample.text,
        "group": group,
        "sample": sample.index,
        "reward": None if score.unscorable else score.total,
        **{name: value for name, value in score.terms.items() if name not in FIELDS},
        "terms": score.terms,
        **({"reason": score.reason} if score.reason else {}),
        **({"unscorable": score.unscorable} if score.unscorable else {}),
        "tokens": sample.sampled,
        "finish_reason": sample.finish_reason,
        "policy_version": sample.policy_version,
        "advantage": None,
        "token_texts": token_texts(sample.token_ids, decode),
        **({"given": sample.given} if sample.given else {}),
        **({"restarts": sample.restarts} if sample.restarts else {}),
        **({"calls": [_record_of_call(call) for call in sample.calls]} if sample.calls else {}),
        "engine_logprobs": rounded(of_sampled),
    }


def _record_of_call(call: Call) -> dict[str, Any]:
    return {name: value for name, value in call._asdict().items() if name != "then"}


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """The values as samples/ shows them: rounded to `DECIMALS`, null where they are not finite, or there is none."""
    return [None if value is None or not math.isfinite(value) else round(value, DECIMALS) for value in values]


def token_texts(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """The text of each token, which joined give the text of all.

    Of tokens that form a character together, the last one has it and the others have "". Where a decoder's output
    depends on neighbouring tokens, each token has what it adds to the text of those before it.
    """
    alone = {token: decode([token]) for token in {*token_ids}}
    texts = [alone[token] for token in token_ids]
    if "".join(texts) == decode(token_ids):
        return texts
    texts, before, first = [], 0, 0
    # Tokens from `before` to `first` have their text and are decoded again as context; those up to `end` wait.
    for end in range(1, len(token_ids) + 1):
        spelled, with_pending = decode(token_ids[before:first]), decode(token_ids[before:end])
        # A character ends within BYTES tokens. Without that bound, bytes that form no character would hold back all
        # that follows.
        if with_pending.endswith(UNFINISHED) and end - first < BYTES and end < len(token_ids):
            texts.append("")
            continue
        texts.append(with_pending[len(spelled) :])
        before, first = first, end
    return texts


def telling(records: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(why it was chosen, record) of the most informative samples of a step; empty without records.

    These are the best and the worst of the group whose rewards are farthest apart, or, if no group's rewards differ,
    the first sample.
    """
    groups: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["group"], []).append(record)
    spread, chosen = 0.0, None
    for of_group in groups.values():
        scored = sorted((r for r in of_group if r["reward"] is not None), key=lambda r: -r["reward"])
        if scored and scored[0]["reward"] - scored[-1]["reward"] > spread:
            spread, chosen = scored[0]["reward"] - scored[-1]["reward"], scored
    if chosen is not None:
        return [(f"best of {len(chosen)}", chosen[0]), (f"worst of {len(chosen)}", chosen[-1])]
    return [(f"first of {len(of_group)}", of_group[0]) for of_group in groups.values()][:1]
