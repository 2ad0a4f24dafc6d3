"""Reward terms by a language model as judge, through any OpenAI-compatible chat completions API, such as SGLang's."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import threading
import unicodedata
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mega.config.schema.terms import JudgeOptions
from grpo_mega.errors import InputError
from grpo_mega.platform.files import write_atomic
from grpo_mega.reward.service import Away, Refused, Service
from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Sample

MOST_KEPT = 1 << 14
"""Number of replies kept in memory."""
CUT = ("length", "max_tokens", "model_length", "content_filter", "abort", "error")
"""Values of finish_reason for replies that the model did not end."""
SHOWN_CHARACTERS = 1000
"""Number of trailing characters of a reply that become a verdict's reason."""
logger = logging.getLogger(__name__)
_FIELDS = re.compile(r"\{(prompt|answer|completion|mark)\}")
_SPECIAL = re.compile(
    r"<(?=[|\uff5c])|[|\uff5c](?=>)"
    r"|<(?=/?(?:s|bos|eos|pad|unk|sop|eop|eoh|eoa|eot|eod|(?:start|end)_of_turn|seed:\w+|<SYS>|</SYS>)>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_(?:CALLS|RESULTS|CONTENT)|ARGS|CALL_ID|THINK|IMG)\])"
    r"|\[(?=(?:[gs]?MASK|[BE]OS|PAD|UNK|CLS|SEP)\])|\](?=~!?b[\[\]])|\[(?=e~\[)"
)
"""Pattern of the characters that begin or end special tokens of chat templates and tokenizers."""


@dataclass
class Judge:
    """A judge model with a cache of its replies.

    Attributes:
        options: Model, rubric and request settings.
        seconds: Time limit for a reply.
        kept: Cache, digest of a question and the parsing of its reply -> reply, least recently used first.
        service: Client shared by all calls, so that a hanging service is remembered between calls.
    """

    options: JudgeOptions
    seconds: float
    kept: OrderedDict[str, str] = field(default_factory=OrderedDict)
    service: Service = field(init=False)

    def __post_init__(self) -> None:
        """Raises InputError when the environment lacks the key, or it cannot be sent; the message never shows it."""
        options = self.options
        key = _key(options.key) if options.key else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = options.url.rstrip("/") + "/chat/completions"
        self.service = Service(url, self.seconds, options.retries, options.backoff, headers, key)
        self._lock = threading.Lock()
        self._warned = False

    def outcomes(self, samples: Sequence[Sample]) -> list[Verdict | Exception]:
        """Verdicts of the judge: the number in its reply, with the reply as the reason.

        Samples that lead to the same question share a reply. A sample is left without a score if the service does not
        answer, refuses the question (400, 413, 422; e.g. longer than the model's context), does not end its reply, or
        replies without a score, or with one that may be quoted from the sample.
        """
        questions = [question(self.options.rubric, sample) for sample in samples]
        different = dict(zip(questions, samples, strict=True))
        with ThreadPoolExecutor(self.options.at_once, "reward worker") as threads:
            outcomes = dict(zip(different, threads.map(self._outcome, different.values()), strict=True))
        return [outcomes[text] for text in questions]

    def _outcome(self, sample: Sample) -> Verdict | Exception:
        options, text = self.options, question(self.options.rubric, sample)
        request = {
            "model": options.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
        }
        # "finished" separates these replies from those that earlier releases kept, which may have been cut.
        of_reply = [self.service.url, request, options.pattern, options.low, options.high, "finished"]
        digest = hashlib.sha256(json.dumps(of_reply).encode()).hexdigest()
        try:
            reply = self._known(digest)
            if reply is None:
                reply = self.service.ask(request, _content)
        except (Away, Refused) as without:
            return Verdict(0.0, unscorable=str(without))
        # The error belongs to this sample: raised, it would end the scoring of all others.
        except Exception as error:
            return error
        # Replies without a score are not kept, so that the question is asked again next time.
        verdict = verdict_in(reply, options, sample)
        if not verdict.unscorable:
            self._keep(digest, reply)
        return verdict

    def _known(self, digest: str) -> str | None:
        """Cached reply to a question; None for a new question, or a cache file that cannot be read."""
        if self.options.cache:
            file = _file(self.options.cache, digest)
            try:
                return file.read_text(encoding="utf-8")
            except FileNotFoundError:
                return None
            except (OSError, UnicodeDecodeError) as error:
                self._warn(file, error)
                return None
        with self._lock:
            if digest in self.kept:
                self.kept.move_to_end(digest)
            return self.kept.get(digest)

    def _keep(self, digest: str, reply: str) -> None:
        if self.options.cache:
            file = _file(self.options.cache, digest)
            # Another rank, perhaps on another machine, may write the same file at the same time.
            unique = file.with_name(f"{file.stem}.{socket.gethostname()}.{uuid.uuid4().hex}")
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(unique, reply.encode(errors="replace"))
                unique.replace(file)
            except OSError as error:
                self._warn(file, error)
            return
        with self._lock:
            self.kept[digest] = reply
            if len(self.kept) > MOST_KEPT:
                self.kept.popitem(last=False)

    def _warn(self, file: Path, error: Exception) -> None:
        """Warns once that replies are requested again because the cache cannot be used."""
        if not self._warned:
            self._warned = True
            logger.warning("options.cache=%s of a judge: %s: %s; replies are not kept", self.options.cache, file, error)


def question(rubric: str, sample: Sample) -> str:
    """The rubric with the sample's texts inserted; braces within these texts are kept, special tokens are broken."""
    # Special tokens are broken by a space, as a completion with a judge's end of turn could forge the judge's reply.
    texts = {"prompt": sample.prompt.text, "answer": sample.prompt.answer, "completion": sample.text}
    texts = {name: _SPECIAL.sub(r"\g<0> ", text) for name, text in texts.items()} | {"mark": mark(sample)}
    return _FIELDS.sub(lambda match: texts[match[1]], rubric)


def mark(sample: Sample) -> str:
    """Text for `{mark}` in a rubric, a digest of the sample's texts, so that none of these can contain it."""
    texts = [sample.prompt.text, sample.prompt.answer, sample.text]
    return "mark-" + hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]


def verdict_in(reply: str, options: JudgeOptions, sample: Sample) -> Verdict:
    """Last score in a reply, with the end of the reply as the reason.

    It counts where the sample cannot have written it: after the mark in the last line if the rubric has one, or else
    in words that are not in the completion.
    """
    end = reply.strip()[-SHOWN_CHARACTERS:]
    marked = "{mark}" in options.rubric
    read = reply.strip().rpartition("\n")[2].partition(mark(sample))[2].strip() if marked else reply
    scores = [*re.finditer(options.pattern, read)]
    try:
        value = float(scores[-1][1])
    except (IndexError, TypeError, ValueError):
        return Verdict(0.0, unscorable=f"the judge's reply has no score: {end!r}")
    # A score that is a bare number cannot be told from the completion's numbers, so it does not count as quoted.
    written, number = (_letters(part) for part in scores[-1].group(0, 1))
    if not marked and written != number and re.search(rf"{re.escape(written)}(?![0-9])", _letters(sample.text)):
        return Verdict(0.0, unscorable=f"the judge's score may be quoted, the completion writes it too: {end!r}")
    if not options.low <= value <= options.high:
        bounds = f"[{options.low:g}, {options.high:g}]"
        return Verdict(0.0, unscorable=f"the judge's score {value:g} is not in {bounds}: {end!r}")
    return Verdict(value, end)


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", text).casefold()))


def _key(variable: str) -> str:
    """API key from an environment variable, without surrounding white space; messages never show it."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise InputError(f"options.key={variable} of a judge", "not set in the environment", "export it, or remove key")
    # http.client would refuse such a key with an error that quotes it.
    if not (key.isascii() and key.isprintable()):
        what = "the variable is not printable ASCII"
        raise InputError(f"options.key={variable} of a judge", what, "export the key again")
    return key


def _content(answer: Any) -> str:
    """Text of a chat completion; "" when it has none, e.g. when all tokens went into thinking.

    Raises:
        Refused: The service says that the reply was cut, by `max_tokens` or a filter.
        InputError: The answer is not a chat completion.
    """
    what = f"answered {str(answer)[:300]}, which is not a chat completion"
    error = InputError("the judge", what, "correct options.url, or the service")
    try:
        content, end = answer["choices"][0]["message"]["content"], answer["choices"][0].get("finish_reason")
    except (AttributeError, KeyError, IndexError, TypeError):
        raise error from None
    content = "" if content is None else content
    if not isinstance(content, str):
        raise error
    if end in CUT:
        raise Refused(f"the judge's reply is unfinished (finish_reason {end!r:.40}): {content[-SHOWN_CHARACTERS:]!r}")
    return content


def _file(folder: str, digest: str) -> Path:
    # Spread over 256 folders, as git spreads its objects, so that no folder holds all files.
    return Path(folder) / digest[:2] / f"{digest[2:]}.txt"
