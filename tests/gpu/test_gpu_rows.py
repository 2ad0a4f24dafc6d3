"""The kernels on a GPU: the same checks as in the interpreter and on the host, and what only a GPU can show."""

from __future__ import annotations

import importlib

import pytest
import row_cases
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from grpo_kernels import LossOptions, backend, fused_grpo_loss, fused_logprob, linear_grpo_loss, linear_logprob
from grpo_kernels.token_loss import Tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REAL_VOCABULARY = 151936
KERNELS = ["stats_kernel", "gradient_kernel", "grpo_kernel", "grpo_rows"]


@pytest.fixture(params=["triton", "cuda", "cuda in clusters of 8"])
def operations(request, monkeypatch):
    name, *forced = request.param.split(" ", 1)
    module = importlib.import_module(f"grpo_kernels.{name}_rows")
    if name == "cuda":
        if torch.version.hip is not None or torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("the kernel is for compute capability 9.0 on")
        if forced:  # short rows, too, where a CTA reads what its peers have
            monkeypatch.setattr(module, "cluster_size", lambda *_: 8)
        assert not module.why_not(torch.device("cuda"), torch.bfloat16, REAL_VOCABULARY)
    return module


def case(*arguments, **named):
    return row_cases.case(*arguments, device="cuda", **named)


def takes(operations, dtype) -> bool:
    return dtype != torch.float16 or operations.__name__.endswith("triton_rows")


@pytest.mark.parametrize("name", row_cases.ADVERSARIAL)
@pytest.mark.parametrize("columns", [1, 13, 1000, 4099, 75967, REAL_VOCABULARY])  # clusters of 1, 2, 4 and 8 CTAs
@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_rows(operations, name, columns, dtype):
    if not takes(operations, dtype) or (dtype == torch.float16 and "1e4" in name):
        pytest.skip("not in this dtype")
    change = row_cases.ADVERSARIAL[name]
    row_cases.check_stats(operations, case(columns, change, dtype=dtype))
    row_cases.check_gradient(operations, case(columns, change, dtype=dtype), True, "zero", None)
    options = row_cases.OPTIONS["ppo, all of it"]
    row_cases.check_grpo(operations, case(columns, change, dtype=dtype), options, True, "zero", True)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("others", ["zero", "leave"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_gradient_goes_where_it_should(operations, listed, others, dtype, out_dtype):
    row_cases.check_gradient(operations, case(4099, dtype=dtype, listed=listed), listed, others, out_dtype)


@pytest.mark.parametrize("options", row_cases.OPTIONS)
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("others", ["zero", "leave"])
@pytest.mark.parametrize("gradient", [False, True])
def test_loss_of_chosen_rows(operations, options, old, listed, others, gradient):
    chosen = row_cases.OPTIONS[options]
    for dtype in filter(lambda dtype: takes(operations, dtype), DTYPES):
        row_cases.check_grpo(operations, case(4099, dtype=dtype, listed=listed), chosen, old, others, gradient)


@pytest.mark.parametrize("options", ["ppo, all of it", "mask", "truncate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scaled_gradient_beside_the_logits(operations, options, dtype):
    """As for a chunk of float32 logits of a bfloat16 weight."""
    chosen = row_cases.OPTIONS[options]
    row_cases.check_grpo(operations, case(4099, dtype=dtype), chosen, True, "leave", True, torch.bfloat16, -1.7)


def test_what_the_correction_masks_has_no_gradient_whatever_it_holds(operations):
    row_cases.check_masked(operations, "cuda")


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["ppo", "cispo", "gspo"])
def test_a_chunk_takes_one_launch_or_two(operations, kind, weight_dtype):
    """Counted where they happen: kernels on the device, by their names."""
    count, columns, name = 5000, 1003, operations.__name__.removeprefix("grpo_kernels.").removesuffix("_rows")
    hidden = torch.randn(count, 64, device="cuda").requires_grad_()
    output_weight = torch.randn(columns, 64, device="cuda").to(weight_dtype).requires_grad_()
    ids, vectors = torch.arange(count, device="cuda") % columns, torch.randn(2, count, device="cuda")
    ends = torch.tensor([0, 50, count], device="cuda") if kind == "gspo" else None

    def run() -> None:
        loss, _ = linear_grpo_loss(
            hidden,
            output_weight,
            ids,
            None,
            None,
            *vectors,
            options=LossOptions(kind=kind),
            cu_seqlens=ends,
            backend=name,
        )
        loss.backward()

    run()  # compiles
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    on_device = [event.name for event in profiled.events() if event.device_type == DeviceType.CUDA]
    kernels = [name for name in on_device if not name.startswith("grpo_kernels::")]  # the label of a launch
    found = {kernel: sum(kernel in name for name in kernels) for kernel in KERNELS}
    one = "grpo_rows" if name == "cuda" else "grpo_kernel"
    once = ["stats_kernel", "gradient_kernel"] if kind == "gspo" else [one]
    assert found == {kernel: 3 if kernel in once else 0 for kernel in KERNELS}


@pytest.mark.parametrize("gap", range(8))
def test_rows_that_begin_anywhere_in_16_bytes(operations, gap):
    options = row_cases.OPTIONS["ppo, all of it"]
    for dtype in (torch.float32, torch.bfloat16):
        row_cases.check_grpo(operations, case(4099, dtype=dtype, gap=gap), options, True, "zero", True)


def test_the_same_bits_every_time_and_among_any_number_of_rows(operations):
    """More rows than run at a time: clusters follow each other, and Triton's programs go through several."""
    count, columns = 5000, 32000
    x = torch.randn(count, columns, device="cuda", dtype=torch.bfloat16) * 4
    ids = torch.randint(columns, (count,), device="cuda")
    one, advantage = torch.ones(count, device="cuda"), torch.randn(count, device="cuda")
    advantage[::7] = 0
    weight = (torch.rand(count, device="cuda") > 0.2).float()
    options = LossOptions(entropy_coef=0.1)

    def run(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        logits = x[part].clone()
        tokens = Tokens(advantage[part], weight[part], -one[part])
        return operations.grpo_rows_(logits, ids[part], None, columns, 1.0, tokens, options, True, "zero"), logits

    outputs, gradient = run(slice(None))
    for part in (slice(None), slice(0, 1), slice(4990, 5000), slice(1000, 2234)):
        again, gradient_again = run(part)
        assert torch.equal(outputs[part], again)
        assert torch.equal(gradient[part], gradient_again)
    row = operations.row_stats(x, ids, None, columns, 1.0)
    assert torch.equal(row[4000:4001], operations.row_stats(x[4000:4001], ids[4000:4001], None, columns, 1.0))


def test_more_than_2_to_the_31_elements_and_65535_rows(operations):
    count, columns = 70000, 32768
    if torch.cuda.mem_get_info()[0] < 3 * count * columns * 2:
        pytest.skip("needs 14 GB")
    x = torch.empty(count, columns, device="cuda", dtype=torch.bfloat16).normal_(std=3)
    ids = torch.randint(columns, (count,), device="cuda")
    one = torch.ones(count, device="cuda")
    picked = torch.tensor([0, 65535, 65536, 69999], device="cuda")
    sample = x[picked].clone()
    outputs = operations.grpo_rows_(x, ids, None, columns, 1.0, Tokens(one, one), LossOptions(), True, "zero")
    tokens = Tokens(one[:4], one[:4])
    alone = operations.grpo_rows_(sample, ids[picked], None, columns, 1.0, tokens, LossOptions(), True, "zero")
    assert torch.equal(outputs[picked], alone)
    assert torch.equal(x[picked], sample)


def test_no_number_compiles_a_kernel_again():
    from grpo_kernels import triton_rows

    def run(count: int, temperature: float, options: LossOptions) -> None:
        logits = torch.randn(count, 4096, device="cuda")
        ids = torch.zeros(count, dtype=torch.int64, device="cuda")
        one = torch.ones(count, device="cuda")
        fused_grpo_loss(logits, ids, one, one, one, one, options=options, temperature=temperature, backend="triton")

    def compiled() -> int:
        return sum(len(caches[0]) for caches in triton_rows.grpo_kernel.device_caches.values())

    run(5, 1.0, LossOptions(kl_coef=0.1))
    before = compiled()
    for count, temperature, kl in ((1, 0.5, "k1"), (16, 2.0, "k2"), (17, 1.0, "k3")):
        run(count, temperature, LossOptions(kind="cispo", clip_low=0.5, kl=kl, kl_coef=0.3))
        run(count, temperature, LossOptions(dual_clip=3.0, kl=kl, kl_coef=1.0))
    assert compiled() == before


@pytest.mark.parametrize("name", ["triton", "cuda"])
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
def test_the_public_functions_agree_with_the_torch_path_and_never_wait_for_the_gpu(name, kind, operations):
    torch.manual_seed(0)
    count, columns, hidden = 300, 5003, 64
    device = {"device": "cuda"}
    logits = torch.randn(count, columns, **device)
    ids = torch.randint(columns, (count,), **device)
    rows = torch.randperm(count, **device)[:200]
    ids = ids[:200]
    old, ref, advantage = torch.randn(3, 200, **device) - 9  # near log-probs: a ratio of e^20 would enlarge roundings
    advantage += 9
    weight = (torch.rand(200, **device) > 0.3) / 200
    ends = torch.tensor([0, 50, 120, 200], **device) if kind == "gspo" else None
    options = LossOptions(kind=kind, kl_coef=0.1, entropy_coef=0.01)
    h, w = torch.randn(200, hidden, **device), torch.randn(columns, hidden, **device) / hidden**0.5

    def run(which: str) -> list[torch.Tensor]:
        given = logits.clone().requires_grad_()
        logprob, entropy = fused_logprob(given, ids, rows=rows, temperature=0.8, backend=which)
        (logprob * advantage + entropy).sum().backward()
        given_up = logits.clone().requires_grad_()
        vectors = (old, ref, advantage, weight)
        loss, metrics = fused_grpo_loss(
            given_up, ids, *vectors, options=options, rows=rows, cu_seqlens=ends, temperature=0.8, backend=which
        )
        loss.backward()
        of_hidden = linear_logprob(h, w, ids, backend=which)
        inputs, main_grad = (h.clone().requires_grad_(), w.clone().requires_grad_()), torch.zeros_like(w)
        linear, logged = linear_grpo_loss(
            *inputs, ids, *vectors, options=options, cu_seqlens=ends, temperature=0.8, backend=which,
            main_grad=main_grad, grad_scale=2.0,
        )  # fmt: skip
        (linear * 2.0).backward()
        scalars = [*vars(metrics).values(), *vars(logged).values()]
        gradients = (given.grad, given_up.grad, inputs[0].grad, main_grad)
        return [logprob, entropy, loss, linear, *of_hidden, *gradients, *scalars]

    run(name)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(name)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for value, expected in zip(found, run("torch"), strict=True):
        torch.testing.assert_close(value, expected, atol=2e-5, rtol=1e-4)


def test_dispatch_says_why():
    logits = torch.zeros(2, REAL_VOCABULARY, dtype=torch.bfloat16, device="cuda")
    assert backend(logits).name == "triton"
    chosen = backend(logits, one_launch=True)
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    assert chosen.name == ("cuda" if hopper else "triton"), chosen.why
    assert "float16" in backend(logits.half(), one_launch=True).why
    assert "gradient" in backend(logits, one_launch=True, gradient=torch.float32).why or not hopper
