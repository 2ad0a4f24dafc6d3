"""Terms by a language model that judges: any OpenAI-compatible service of chat completions, such as SGLang's."""

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
"""Replies that are kept in memory."""
SHOWN_CHARACTERS = 1000
"""Of a reply, the last ones, that are a verdict's reason."""
logger = logging.getLogger(__name__)
_FIELDS = re.compile(r"\{(prompt|answer|completion)\}")


@dataclass
class Judge:
    """A model that judges, and the replies that it has given.

    Attributes:
        options: Which model is asked what.
        seconds: Time limit for a reply.
        kept: Digest of a question and how its reply is read -> reply, the latest used last.
        service: What all calls ask, so that one that hangs is known to from call to call.
    """

    options: JudgeOptions
    seconds: float
    kept: OrderedDict[str, str] = field(default_factory=OrderedDict)
    service: Service = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError when the environment lacks the key, or it cannot be sent; the message does not show it."""
        options = self.options
        key = _key(options.key) if options.key else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = options.url.rstrip("/") + "/chat/completions"
        self.service = Service(url, self.seconds, options.retries, options.backoff, headers, key)
        self._lock = threading.Lock()
        self._warned = False

    def outcomes(self, samples: Sequence[Sample]) -> list[Verdict | Exception]:
        """What the model makes of samples: the number in its reply, and the reply as the reason.

        Samples that lead to the same question share a reply. A service that does not answer, one that refuses a
        question (400, 413, 422), as it does when it is longer than the model's context, or a reply without a score
        leaves the sample without one.
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
        except Exception as error:  # of this sample, and not the end of the thread that asks for others
            return error
        verdict = verdict_in(reply, options)
        if not verdict.unscorable:
            self._keep(digest, reply)
        return verdict

    def _known(self, digest: str) -> str | None:
        """The reply to a question that was asked before; None for a new one, or one that cannot be read."""
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
        """Says once that replies are asked for again, because the cache cannot be used."""
        if not self._warned:
            self._warned = True
            logger.warning("options.cache=%s of a judge: %s: %s; replies are not kept", self.options.cache, file, error)


def question(rubric: str, sample: Sample) -> str:
    """The rubric with the sample's texts in it; braces within these texts stay as they are."""
    texts = {"prompt": sample.prompt.text, "answer": sample.prompt.answer, "completion": sample.text}
    return _FIELDS.sub(lambda match: texts[match[1]], rubric)


def verdict_in(reply: str, options: JudgeOptions) -> Verdict:
    """The last score in a reply, and its end as the reason."""
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
    """The key in a variable of the environment, without white space around it; messages never show it."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"options.key={variable} of a judge is no variable of the environment: export it, or remove key"
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"options.key={variable} of a judge: the variable is not printable ASCII: export the key anew")
    return key


def _content(answer: Any) -> str:
    """The text of a chat completion; "" for one that has none, as when its tokens went into thinking."""
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
