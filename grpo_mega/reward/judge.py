"""Reward terms by a language model as judge, through any OpenAI-compatible chat completions API, such as SGLang's."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mega.config.schema.terms import JudgeOptions
from grpo_mega.platform.files import write_atomic
from grpo_mega.reward.service import Away, Refused, Service
from grpo_mega.reward.verdict import Verdict
from grpo_mega.types import Sample

MOST_KEPT = 1 << 14
"""Number of replies kept in memory."""
SHOWN_CHARACTERS = 1000
"""Number of trailing characters of a reply that become a verdict's reason."""
logger = logging.getLogger(__name__)
_FIELDS = re.compile(r"\{(prompt|answer|completion)\}")


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
        """Raises ValueError when the environment lacks the key, or it cannot be sent; the message never shows it."""
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
        answer, refuses the question (400, 413, 422; e.g. longer than the model's context), or replies without a score.
        """
        questions = [question(self.options.rubric, sample) for sample in samples]
        different = [*dict.fromkeys(questions)]
        with ThreadPoolExecutor(self.options.at_once, "reward worker") as threads:
            outcomes = dict(zip(different, threads.map(self._outcome, different), strict=True))
        return [outcomes[text] for text in questions]

    def _outcome(self, text: str) -> Verdict | Exception:
        options = self.options
        request = {
            "model": options.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
        }
        of_reply = [self.service.url, request, options.pattern, options.low, options.high]
        digest = hashlib.sha256(json.dumps(of_reply).encode()).hexdigest()
        try:
            reply = self._known(digest)
            if reply is None:
                reply = self.service.ask(request, _content)
        except (Away, Refused) as without:
            return Verdict(0.0, unscorable=str(without))
        except Exception as error:  # fails this sample only; must not end the thread that asks for others
            return error
        verdict = verdict_in(reply, options)
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
            own = file.with_name(f"{file.stem}.{socket.gethostname()}.{uuid.uuid4().hex}")
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(own, reply.encode(errors="replace"))
                own.replace(file)
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
    """The rubric with the sample's texts inserted; braces within these texts are kept."""
    texts = {"prompt": sample.prompt.text, "answer": sample.prompt.answer, "completion": sample.text}
    return _FIELDS.sub(lambda match: texts[match[1]], rubric)


def verdict_in(reply: str, options: JudgeOptions) -> Verdict:
    """Last score in a reply, with the end of the reply as the reason."""
    end = reply.strip()[-SHOWN_CHARACTERS:]
    scores = [match[1] for match in re.finditer(options.pattern, reply)]
    try:
        value = float(scores[-1])
    except (IndexError, TypeError, ValueError):
        return Verdict(0.0, unscorable=f"the judge's reply has no score: {end!r}")
    if not options.low <= value <= options.high:
        bounds = f"[{options.low:g}, {options.high:g}]"
        return Verdict(0.0, unscorable=f"the judge's score {value:g} is not in {bounds}: {end!r}")
    return Verdict(value, end)


def _key(variable: str) -> str:
    """API key from an environment variable, without surrounding white space; messages never show it."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"options.key={variable} of a judge is no variable of the environment: export it, or remove key"
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"options.key={variable} of a judge: the variable is not printable ASCII: export the key anew")
    return key


def _content(answer: Any) -> str:
    """Text of a chat completion; "" when it has none, e.g. when all tokens went into thinking."""
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"the judge answered {str(answer)[:300]}, which is no chat completion") from None
    content = "" if content is None else content
    if not isinstance(content, str):
        raise ValueError(f"the judge answered {str(answer)[:300]}, which is no chat completion")
    return content


def _file(folder: str, digest: str) -> Path:
    return Path(folder) / digest[:2] / f"{digest[2:]}.txt"
