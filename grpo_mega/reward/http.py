"""Reward terms computed by a user's HTTP service: samples as JSON in batches, one verdict for each in the answer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from grpo_mega.config.schema.terms import HttpOptions
from grpo_mega.reward.service import Away, Service
from grpo_mega.reward.verdict import NoVerdict, Verdict, read_verdict, sample_json, shown
from grpo_mega.types import Sample


@dataclass
class Http:
    """A user's HTTP service that scores samples.

    Attributes:
        options: Address and request settings.
        seconds: Time limit for one attempt.
        service: Client shared by all calls, so that a hanging service is remembered between calls.
    """

    options: HttpOptions
    seconds: float
    service: Service = field(init=False)

    def __post_init__(self) -> None:
        self.service = Service(self.options.url, self.seconds, self.options.retries, self.options.backoff)

    def outcomes(self, samples: Sequence[Sample]) -> list[Verdict | Exception]:
        """Verdicts of the service: sends {"samples": [...]}, expects {"verdicts": [...]}, one per sample.

        A service that does not answer leaves the samples of the batch without a score. Refusing them, or any other
        answer, is an error.
        """
        options = self.options
        batches = [samples[start : start + options.batch] for start in range(0, len(samples), options.batch)]
        with ThreadPoolExecutor(options.at_once, "reward worker") as threads:
            return [*chain.from_iterable(threads.map(partial(_of_batch, self.service), batches))]


def _of_batch(service: Service, samples: Sequence[Sample]) -> list[Verdict | Exception]:
    request = {"samples": [sample_json(sample) for sample in samples]}
    try:
        return service.ask(request, partial(_read, service.url, len(samples)))
    except Away as away:
        return [Verdict(0.0, unscorable=str(away)) for _ in samples]
    except Exception as error:  # fails these samples only; must not end the thread that asks for others
        return [error for _ in samples]


def _read(url: str, number: int, answer: Any) -> list[Verdict | Exception]:
    verdicts = answer.get("verdicts") if isinstance(answer, dict) else None
    if not isinstance(verdicts, list) or len(verdicts) != number:
        raise ValueError(
            f"{url} answered {shown(answer)[:300]} to {number} samples; it must answer "
            f'{{"verdicts": [...]}} with one of each'
        )
    return [_verdict(url, verdict) for verdict in verdicts]


def _verdict(url: str, answered: Any) -> Verdict | Exception:
    try:
        return read_verdict(answered)
    except NoVerdict as error:
        return ValueError(f"{url} {error}")
