"""Rows that break kernels, what is right for them in float64, and checks that any implementation has to pass.

`operations` is a module with `row_stats`, `row_gradient_` and `grpo_rows_`, as `grpo_kernels.rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.options import LossOptions
from grpo_kernels.rows import logprob_and_entropy
from grpo_kernels.token_loss import RowLosses, Tokens, token_losses

INF = float("inf")
PADDING = 5  # columns behind the real ones
GAP = 3  # elements between the rows, which nobody may touch
ROUNDING = {torch.float32: 5e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
OPTIONS = {
    "ppo": LossOptions(clip_low=0.2, clip_high=0.28),
    "ppo, all of it": LossOptions(
        clip_low=0.2, clip_high=0.28, dual_clip=3.0, kl="k3", kl_coef=0.05, entropy_coef=0.01
    ),
    "k1": LossOptions(kl="k1", kl_coef=0.1),
    "k2": LossOptions(kl="k2", kl_coef=0.1, entropy_coef=-0.02),
    "cispo": LossOptions(kind="cispo", clip_low=0.9, clip_high=0.5, kl_coef=0.02),
    "wide bounds": LossOptions(clip_low=10.0, clip_high=10.0),
    "no bounds": LossOptions(clip_low=1.0, clip_high=INF),
    "cispo, no bound below": LossOptions(kind="cispo", clip_low=1.0, clip_high=0.5),
    "cispo, no bounds": LossOptions(kind="cispo", clip_low=INF, clip_high=INF),
    "sapo": LossOptions(kind="sapo"),
    "sapo, all of it": LossOptions(
        kind="sapo",
        tau_pos=0.7,
        tau_neg=3.0,
        kl="k2",
        kl_coef=0.05,
        kl_unbiased=True,
        entropy_coef=0.01,
        correction="truncate",
    ),
    "k1, unbiased": LossOptions(kl="k1", kl_coef=0.1, kl_unbiased=True),
    "k3, unbiased": LossOptions(kind="cispo", kl="k3", kl_coef=0.1, kl_unbiased=True),
    "truncate": LossOptions(clip_high=0.28, correction="truncate"),
    "truncate on both sides": LossOptions(correction="truncate", correction_floor=0.5),
    "mask on both sides": LossOptions(kl_coef=0.1, correction="mask", correction_floor=0.5, correction_cap=5.0),
    "mask": LossOptions(kl_coef=0.1, entropy_coef=0.02, correction="mask"),
    "cispo, mask": LossOptions(kind="cispo", correction="mask", correction_cap=1.4),
}


@dataclass
class Case:
    """[N, width] logits with a gap between rows, of which `rows` (None: all) count; [n] target columns."""

    logits: Tensor
    ids: Tensor
    rows: Tensor | None
    columns: int
    temperature: float

    @property
    def exact(self) -> Exact:
        listed = self.logits if self.rows is None else self.logits[self.rows]
        return Exact.of(listed[:, : self.columns].double().cpu(), self.ids.cpu(), self.temperature)


@dataclass
class Exact:
    """[n, V] log p and p, [n] log-prob of the target and entropy, in float64; a logit of -inf has p = 0."""

    log_p: Tensor
    p: Tensor
    logprob: Tensor
    entropy: Tensor
    target: Tensor
    inv_temperature: float

    @classmethod
    def of(cls, x: Tensor, ids: Tensor, temperature: float) -> Exact:
        log_p = torch.log_softmax(x / temperature, -1)
        target = torch.zeros_like(x).scatter_(1, ids[:, None], 1.0)
        p = log_p.exp()
        entropy = -torch.where(p > 0, p * log_p, torch.where(p == 0, 0.0, p)).sum(-1)
        return cls(log_p, p, log_p.gather(1, ids[:, None])[:, 0], entropy, target, 1 / temperature)

    def gradient(self, by_logprob: Tensor, by_entropy: Tensor | None) -> Tensor:
        grad = by_logprob.double()[:, None] * (self.target - self.p)
        if by_entropy is not None:
            spread = torch.where(self.p == 0, 0.0, self.p * (self.log_p + self.entropy[:, None]))
            grad = grad - by_entropy.double()[:, None] * spread
        return grad * self.inv_temperature


def _first_block(x: Tensor) -> None:
    x[:, : x.shape[1] // 2 + 1] = -INF


def _middle_block(x: Tensor) -> None:
    x[:, x.shape[1] // 4 : 3 * x.shape[1] // 4] = -INF


def _last_block(x: Tensor) -> None:
    x[:, x.shape[1] // 3 + 1 :] = -INF


def _all_but_one(x: Tensor) -> None:
    kept = x[:, -1].clone()
    x[:] = -INF
    x[:, -1] = kept


def _lowest(x: Tensor) -> None:
    x[:, 1::2] = torch.finfo(torch.bfloat16).min


ADVERSARIAL: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda x: None,
    "first block -inf": _first_block,
    "middle block -inf": _middle_block,
    "last block -inf": _last_block,
    "all but one -inf": _all_but_one,
    "lowest finite numbers": _lowest,
    "all equal": lambda x: x.fill_(3.0),
    "offset 1e4": lambda x: x.add_(1e4),
    "offset -1e4": lambda x: x.sub_(1e4),
    "magnitude 1e4": lambda x: x.mul_(2.5e3),
}


def case(
    columns: int,
    change: Callable[[Tensor], Any] = lambda x: None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    listed: bool = False,
    count: int = 6,
    temperature: float = 0.9,
    gap: int = GAP,
) -> Case:
    """Random rows of scale 4, changed; targets are finite logits; NaN wherever nobody may read."""
    generator = torch.Generator().manual_seed(columns)
    width = columns + PADDING
    x = torch.randn(count, columns, generator=generator) * 4
    change(x)
    x[(x < -1e30).all(1), -1] = 1.0
    possible = (x > -1e30).float()
    ids = torch.multinomial(possible, 1, generator=generator)[:, 0]
    storage = torch.full((count, width + gap), float("nan"), dtype=dtype)
    storage[:, :columns] = x.to(dtype)
    rows = None
    if listed:
        rows = torch.tensor([4, 1, 2])
        ids = ids[rows]
        unlisted = [row for row in range(count) if row not in rows]
        storage[unlisted] = float("nan")
        rows = rows.to(device)
    return Case(storage.to(device)[:, :width], ids.to(device), rows, columns, temperature)


def check_stats(operations: Any, c: Case) -> None:
    """Log-prob and entropy within 1e-5 (and float32's rounding of large ones)."""
    stats = operations.row_stats(c.logits, c.ids, c.rows, c.columns, 1 / c.temperature)
    logprob, entropy = logprob_and_entropy(stats, 1 / c.temperature)
    near(logprob, c.exact.logprob, 1e-5, 3e-7)
    near(entropy, c.exact.entropy, 1e-5, 3e-7)


def check_gradient(operations: Any, c: Case, with_entropy: bool, others: str, out_dtype: torch.dtype | None) -> None:
    """The gradient, its zeros, what must not be touched; out of place when `out_dtype` is given."""
    exact, n = c.exact, len(c.ids)
    by_logprob, by_entropy = torch.linspace(-1, 2, n), torch.linspace(0.5, -0.5, n)
    by_logprob[1], by_entropy[1] = 0, 0
    expected = exact.gradient(by_logprob, by_entropy if with_entropy else None)
    stats = operations.row_stats(c.logits, c.ids, c.rows, c.columns, 1 / c.temperature)
    _poison(c, 1)
    before = _storage(c.logits).clone()
    out = None if out_dtype is None else torch.full_like(_storage(c.logits), 7.0, dtype=out_dtype)
    out = None if out is None else out[:, : c.logits.shape[1]]
    device = c.logits.device
    gradients = (by_logprob.to(device), by_entropy.to(device) if with_entropy else None)
    operations.row_gradient_(c.logits, c.ids, c.rows, c.columns, 1 / c.temperature, stats, *gradients, others, out)
    if out is not None:
        assert torch.equal(_storage(c.logits).cpu().view(torch.uint8), before.cpu().view(torch.uint8))
    expect_written(c, c.logits if out is None else out, expected, others, poison="nan" if out is None else "7")


def check_grpo(
    operations: Any,
    c: Case,
    options: LossOptions,
    old: bool,
    others: str,
    gradient: bool,
    out_dtype: torch.dtype | None = None,
    grad_scale: float = 1.0,
) -> None:
    """All outputs and the gradient, with log-ratios beyond every bound and the correction's cap, a row of NaN that does
    not count and both signs of A.
    """
    exact, n = c.exact, len(c.ids)
    device = c.logits.device
    advantage = torch.tensor([1.5, -1.0, 0.0, -2.0, 1.0, -0.5])[:n]
    weight = torch.tensor([0.3, 0.0, 1.0, 0.5, 0.7, 2.0])[:n]
    log_ratio = torch.tensor([0.5, 0.1, -0.4, 2.0, -0.1, -0.7])[:n]
    disagreement = torch.tensor([1.5, 0.0, 0.2, 0.5, 0.1, -1.0])[:n] + (log_ratio if old else 0.0)
    tokens = Tokens(
        advantage=_strided(advantage).to(device),
        weight=_strided(weight).to(device),
        old=_strided((exact.logprob - log_ratio).float()).to(device) if old else None,
        ref=_strided((exact.logprob + log_ratio / 3).float()).to(device) if options.kl_coef else None,
        rollout=_strided((exact.logprob - disagreement).float()).to(device),
    )
    doubles = Tokens(*(None if value is None else value.double().cpu() for value in vars(tokens).values()))
    found = token_losses(exact.logprob, exact.entropy, doubles, options)
    expected = found.outputs(exact.logprob, exact.entropy).masked_fill((weight == 0)[:, None], 0.0)
    _poison(c, 1)
    before = _storage(c.logits).clone()
    out = None if out_dtype is None else torch.full_like(_storage(c.logits), 7.0, dtype=out_dtype)
    out = None if out is None else out[:, : c.logits.shape[1]]
    place = (c.logits, c.ids, c.rows, c.columns, 1 / c.temperature)
    outputs = operations.grpo_rows_(*place, tokens, options, gradient, others, out, grad_scale)
    slack = 5e-7 * float(exact.logprob.abs().max())  # float32 log-probs of -3e4 are 2e-3 apart, and so are their ratios
    exactly = [fields(RowLosses)[column].name in ("clipped", "weight") for column in range(outputs.shape[1])]
    near(outputs[:, ~torch.tensor(exactly)], expected[:, ~torch.tensor(exactly)], 2e-5 + slack, 1e-5)
    assert torch.equal(outputs[:, exactly].cpu(), expected[:, exactly].float())
    if not gradient or out is not None:
        assert torch.equal(_storage(c.logits).cpu().view(torch.uint8), before.cpu().view(torch.uint8))
    if gradient:
        expected_gradient = exact.gradient(*found.gradients(grad_scale)).nan_to_num_(0.0)
        written = (c.logits, "nan") if out is None else (out, "7")
        expect_written(c, written[0], expected_gradient, others, written[1], slack)


def check_masked(operations: Any, device: str = "cpu") -> None:
    """Tokens that the correction masks have loss and gradient 0, also when the log-prob is NaN; a NaN of the engine's
    shows.
    """
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(0)).to(device)
    logits[0, 3] = torch.nan
    old, rollout = torch.full((4,), -1.0, device=device), torch.tensor([-9.0, -9.0, -1.0, INF - INF], device=device)
    tokens = Tokens(torch.ones(4, device=device), torch.ones(4, device=device), old, rollout=rollout)
    ids, options = torch.arange(4, device=device), LossOptions(correction="mask", entropy_coef=0.1)
    found = RowLosses.of(operations.grpo_rows_(logits, ids, None, 20, 1.0, tokens, options, True, "zero"))
    assert found.weight.tolist() == [0, 0, 1, 1]
    assert found.loss[:2].tolist() == found.clipped[:2].tolist() == [0, 0]
    assert found.logprob.isnan().tolist() == [True, False, False, False]
    assert found.loss.isnan().tolist() == [False, False, False, True]
    assert not logits[:2].any()
    assert logits[2].any()


def expect_written(c: Case, found: Tensor, expected: Tensor, others: str, poison: str, slack: float = 0) -> None:
    """Listed rows hold the expected gradient; padding and other rows are zero or as they were; gaps as they were."""
    everything = _storage(found).cpu().double()
    listed = torch.arange(len(everything)) if c.rows is None else c.rows.cpu()
    near(everything[listed][:, : c.columns], expected, 1e-6 + slack, ROUNDING[found.dtype])
    unlisted = torch.tensor([row for row in range(len(everything)) if row not in listed], dtype=torch.int64)
    width = c.columns + PADDING
    rest = torch.cat([everything[listed][:, c.columns : width].flatten(), everything[unlisted][:, :width].flatten()])
    untouched = torch.isnan if poison == "nan" else (lambda values: values == 7)
    assert (rest == 0).all() if others == "zero" else untouched(rest).all()
    assert untouched(everything[:-1, width:]).all()


def near(found: Tensor, expected: Tensor, absolute: float, relative: float) -> None:
    torch.testing.assert_close(found.cpu().double(), expected.cpu().double(), atol=absolute, rtol=relative)


def _strided(vector: Tensor) -> Tensor:
    """Every other element of a tensor, the rest of which is NaN."""
    return torch.stack([vector, torch.full_like(vector, float("nan"))], -1)[:, 0]


def _poison(c: Case, token: int) -> None:
    """Fills a row that must not be read with NaN."""
    c.logits[token if c.rows is None else int(c.rows[token])] = float("nan")


def _storage(view: Tensor) -> Tensor:
    """The view with the gap behind each row."""
    return view.as_strided((len(view), view.stride(0)), view.stride())
