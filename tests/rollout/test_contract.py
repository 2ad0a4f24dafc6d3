"""What any sequence of calls comes to: nothing is generated without whole, current weights and memory to do it in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega.rollout.contract import TAGS, Contract, EngineError, Spec

NAMES = ("a.weight", "b.weight")
SHAPE = (2, 3)
CALLS = st.one_of(
    st.just(("begin",)),
    st.tuples(st.just("push"), st.sampled_from(NAMES)),
    st.tuples(st.just("end"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["release", "resume"]), st.sampled_from(TAGS)),
    st.tuples(st.just("submit"), st.integers(0, 3)),
    st.sampled_from([("poll",), ("scores",)]),
)


def contract(has_weights: bool = False) -> Contract:
    return Contract(lambda: {name: Spec(SHAPE, torch.float32) for name in NAMES}, has_weights)


def made(engine: Contract, name: str, *arguments) -> bool:
    """Makes a call; whether it was legal."""
    try:
        if name == "begin":
            engine.begin_update()
        elif name == "push":
            engine.push([(arguments[0], torch.zeros(SHAPE))])
        elif name == "end":
            engine.end_update(arguments[0])
        elif name == "release":
            engine.release([arguments[0]])
        elif name == "resume":
            engine.resume([arguments[0]])
        elif name == "submit":
            engine.submit(arguments[0], samples=2)
        elif name == "poll":
            engine.poll()
            engine.hand_out(1)
        else:
            engine.scores()
    except EngineError:
        return False
    return True


@given(st.booleans(), st.lists(CALLS, max_size=40))
def test_generation_needs_memory_and_whole_weights_of_that_version(ready: bool, calls: list[tuple]) -> None:
    """While samples are under way more can be submitted and all polled for, nothing else."""
    engine = contract(has_weights=ready)
    under_way = 0
    out: set[str] = set()
    pushed: set[str] | None = None
    version: int | None = None
    newest = -1
    for name, *arguments in calls:
        legal = made(engine, name, *arguments)
        argument = arguments[0] if arguments else None
        if name == "begin":
            assert legal == (not under_way and pushed is None and "weights" not in out)
            pushed, version, ready = (set(), None, False) if legal else (pushed, version, ready)
        elif name == "push":
            assert legal == (pushed is not None and argument not in pushed)
            if legal:
                pushed.add(argument)
        elif name == "end":
            assert legal == (pushed == {*NAMES} and argument >= newest)
            if legal:
                pushed, version, newest, ready = None, argument, argument, True
        elif name == "release":
            assert legal == (not under_way and argument not in out and pushed is None)
            out |= {argument} if legal else set()
            version, ready = (None, False) if legal and argument == "weights" else (version, ready)
        elif name == "resume":
            assert legal == (argument in out)
            out -= {argument}
        elif name == "submit":
            assert legal == (ready and not out and version in (None, argument))
            under_way += 2 * legal
        elif name == "poll":
            assert legal == (under_way > 0)
            under_way -= legal
        else:
            assert legal == (ready and not under_way and not out)
        assert engine.version == version
        assert engine.busy == (under_way > 0)


def test_an_engine_that_has_weights_generates_before_the_first_push() -> None:
    engine = contract(has_weights=True)
    assert made(engine, "submit", 5)
    assert engine.version is None
    engine.drop()
    engine.release(["weights"])
    engine.resume(["weights"])
    assert not made(engine, "submit", 5)


def test_a_bucket_is_refused_as_a_whole() -> None:
    engine = contract()
    engine.begin_update()
    with pytest.raises(EngineError, match=r"b\.weight is \[3\] float32, but the model's is \[2, 3\] float32"):
        engine.push([("a.weight", torch.zeros(SHAPE)), ("b.weight", torch.zeros(3))])
    engine.push([(name, torch.zeros(SHAPE)) for name in NAMES])
    engine.end_update(0)


def test_an_engine_that_was_reset_has_no_weights_and_no_session() -> None:
    engine = contract(has_weights=True)
    engine.submit(0, samples=2)
    engine.reset(["kv_cache"])
    assert not engine.busy
    assert engine.released == {"kv_cache"}
    assert not made(engine, "push", "a.weight")
    engine.resume(["kv_cache"])
    assert not made(engine, "submit", 0)
