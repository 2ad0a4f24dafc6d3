"""How much of what samples go on after comes from the prefix caches of SGLang."""

from __future__ import annotations

from engine_contract import Bench, polled_until_idle, sampling, wanted

from grpo_mega.rollout.engine import Wanted


def missed(bench: Bench) -> float:
    """Tokens read again, beyond the last of each prefix, which SGLang always computes; per sample that goes on."""
    how = sampling(max_new_tokens=12, stop_ids=())
    begin = [Wanted(one.prompt, one.index, most=6, number=number) for number, one in enumerate(wanted(bench))]
    bench.engine.submit(begin, how, bench.version)
    begun = sorted((s for poll in polled_until_idle(bench) for s in poll), key=lambda s: s.number)
    bench.engine.metrics()
    # Not in the order of the first time, nor all: a rule that deals anew would give them to other engines.
    parts = [Wanted(s.prompt, s.index, s, number=s.number) for s in begun[::-1] if s.number % 4]
    bench.engine.submit(parts, how, bench.version)
    assert sum(map(len, polled_until_idle(bench))) == len(parts)
    read = sum(len(one.prefix) for one in parts)
    return (read * (1 - bench.engine.metrics()["rollout/cached"]) - len(parts)) / len(parts)
