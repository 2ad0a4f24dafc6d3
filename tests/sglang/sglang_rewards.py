"""A reward that random weights learn in a few steps."""

from grpo_mega.types import Sample


def sevens(sample: Sample) -> float:
    """The share of sevens among the sampled tokens."""
    return sample.text.count("7") / len(sample.token_ids)


def broken(_: Sample) -> float:
    """Fails."""
    raise ArithmeticError("this reward is broken")
