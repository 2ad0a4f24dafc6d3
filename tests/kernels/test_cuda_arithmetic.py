"""The arithmetic of the CUDA kernel, compiled for the host: every thread's work, one thread after the other."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import astuple
from pathlib import Path

import pytest
import row_cases
import torch
from limits import limit

import grpo_kernels
from grpo_kernels import rows
from grpo_kernels.chunked import output_layer
from grpo_kernels.launch import scalars
from grpo_kernels.passes import Work, one_launch
from grpo_kernels.token_loss import RowLosses, Tokens

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
CLUSTERS = [1, 2, 4, 8]
HEADERS = Path(grpo_kernels.__file__).parent / "csrc"
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Host:
    """`grpo_rows_` of the compiled library, for all rows."""

    def __init__(self, library: Path):
        self.library = ctypes.CDLL(str(library))

    def grpo_rows_(
        self, logits, ids, rows, columns, inv_temperature, tokens, options, gradient, others, out=None, grad_scale=1.0
    ):
        assert rows is None
        out = logits if out is None else out
        outputs = torch.zeros(len(ids), 7)
        width = logits.shape[1] if others == "zero" else columns
        rollout = None if options.correction == "none" else tokens.rollout
        vectors = (ids, tokens.old, tokens.ref, rollout, tokens.advantage, tokens.weight, outputs)
        held = [v if v is None else v.contiguous() for v in vectors]
        pointers = [ctypes.c_void_p(None if v is None else v.data_ptr()) for v in (logits, out, *held)]
        sizes = [ctypes.c_int64(size) for size in (len(logits), logits.stride(0), out.stride(0))]
        numbers = [ctypes.c_float(value) if isinstance(value, float) else value for value in astuple(scalars(options))]
        function = self.library[f"{DTYPES[logits.dtype]}_{DTYPES[out.dtype]}"]
        temperature, scale = ctypes.c_float(inv_temperature), ctypes.c_float(grad_scale)
        function(*pointers, *sizes, columns, width, temperature, *numbers, scale, int(gradient))
        return outputs


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> Host:
    return compiled(tmp_path_factory, 8)


@pytest.fixture(scope="module", params=CLUSTERS)
def host_of_any_cluster(request, tmp_path_factory) -> Host:
    return compiled(tmp_path_factory, request.param)


def compiled(tmp_path_factory, ctas) -> Host:
    library = tmp_path_factory.getbasetemp() / f"grpo_rows_host_{ctas}.so"
    if library.exists():
        return Host(library)
    built = library.with_suffix(".tmp")
    source = Path(__file__).with_name("grpo_rows_host.cpp")
    flags = [
        "-O2",
        "-std=c++17",
        "-fno-strict-aliasing",
        "-fsanitize=alignment",
        "-fsanitize-undefined-trap-on-error",
        "-Wall",
        "-Werror",
        "-shared",
        "-fPIC",
        f"-I{HEADERS}",
        f"-DCTAS={ctas}",
    ]
    done = subprocess.run(
        ["g++", *flags, str(source), "-o", str(built)], capture_output=True, text=True, timeout=limit(300)
    )
    assert done.returncode == 0, done.stderr
    built.rename(library)
    host = Host(library)
    assert host.library.ctas() == ctas
    return host


@pytest.mark.parametrize("name", row_cases.ADVERSARIAL)
@pytest.mark.parametrize("columns", [1, 13, 4099, 70001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_rows(host, name, columns, dtype):
    case = row_cases.case(columns, row_cases.ADVERSARIAL[name], dtype=dtype)
    row_cases.check_grpo(host, case, row_cases.OPTIONS["ppo, all of it"], True, "zero", True)


@pytest.mark.parametrize("options", row_cases.OPTIONS)
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("others", ["zero", "leave"])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("gradient", [True, False])
def test_options(host, options, old, others, out_dtype, gradient):
    case = row_cases.case(1000)
    row_cases.check_grpo(host, case, row_cases.OPTIONS[options], old, others, gradient, out_dtype, -1.7)


def test_what_the_correction_masks_has_no_gradient_whatever_it_holds(host):
    row_cases.check_masked(host)


@pytest.mark.parametrize("name", row_cases.OPTIONS)
@pytest.mark.parametrize("chunk", [64, 10_000])
def test_the_output_layer_s_chunks(host, name, chunk):
    """The loop over chunks that training takes, on the kernel's arithmetic: as on torch's."""
    draw = torch.Generator().manual_seed(0)
    hidden, output_weight = torch.randn(150, 8, generator=draw), torch.randn(60, 8, generator=draw)
    inputs = (hidden.requires_grad_(), output_weight.requires_grad_())
    ids = torch.arange(150) % 57
    old, ref, advantage, rollout = torch.randn(4, 150, generator=draw) - torch.tensor([[4.0], [4.0], [0.0], [4.0]])
    tokens = Tokens(advantage, (torch.rand(150, generator=draw) > 0.2) / 150, old, ref, rollout)

    def run(operations):
        layer = output_layer(*inputs, ids, chunk=chunk, vocab_size=57, temperature=0.8)
        main_grad = torch.zeros_like(output_weight)
        work = Work.of(layer, *inputs, ids, main_grad, 1.7)
        with torch.no_grad():
            outputs = one_launch(work, operations, tokens, row_cases.OPTIONS[name])
        loss = work.attached(RowLosses.of(outputs).loss.sum(), *inputs, main_grad)
        return outputs, main_grad, *torch.autograd.grad(loss * 1.7, inputs[:1])

    for found, expected in zip(run(host), run(rows), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("gap", range(8))
@pytest.mark.parametrize("columns", [4096, 4099])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_begin_anywhere_in_16_bytes(host, gap, columns, dtype):
    case = row_cases.case(columns, dtype=dtype, gap=gap)
    row_cases.check_grpo(host, case, row_cases.OPTIONS["ppo, all of it"], True, "zero", True)


def test_a_real_vocabulary(host):
    case = row_cases.case(151936, dtype=torch.bfloat16)
    row_cases.check_grpo(host, case, row_cases.OPTIONS["ppo, all of it"], True, "zero", True)


@pytest.mark.parametrize("shift", range(4))
def test_a_bfloat16_gradient_of_float32_logits(host, shift):
    case = row_cases.case(1000)
    wide = row_cases.case(1000).logits.clone()
    tokens = Tokens(torch.ones(6), torch.ones(6))
    in_place = (case.ids, None, 1000, 1 / 0.9, tokens, row_cases.OPTIONS["ppo"], True)
    host.grpo_rows_(wide, *in_place, "zero")
    out = torch.full((6, 1011), 7.0, dtype=torch.bfloat16)[:, shift : shift + 1005]
    before = case.logits.clone()
    host.grpo_rows_(case.logits, *in_place, "zero", out=out)
    assert torch.equal(case.logits[:, :1000], before[:, :1000])
    assert torch.equal(out, wide.bfloat16())


def test_rounding_to_bfloat16_is_torchs(host):
    """A gradient of +-weight / 2 in two equal columns, for weights that lie between two bfloat16 numbers."""
    bits = torch.randint(0x3F000000, 0x4F000000, (4096,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    bits[:2048] = (bits[:2048] & ~0xFFFF) | 0x8000  # exactly in the middle
    weight = bits.view(torch.float32)
    logits, ones = torch.zeros(4096, 2), torch.ones(4096)
    out = torch.empty(4096, 2, dtype=torch.bfloat16)
    options = row_cases.OPTIONS["ppo"]
    ids = torch.zeros(4096, dtype=torch.int64)
    host.grpo_rows_(logits, ids, None, 2, 1.0, Tokens(ones, weight), options, True, "leave", out=out)
    assert torch.equal(out[:, 1], (weight / 2).bfloat16())
    assert torch.equal(out[:, 0], (-weight / 2).bfloat16())


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("columns", [1, 13, 4099])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clusters_of_any_size(host_of_any_cluster, columns, dtype, gap):
    case = row_cases.case(columns, dtype=dtype, gap=gap)
    row_cases.check_grpo(host_of_any_cluster, case, row_cases.OPTIONS["ppo, all of it"], True, "zero", True)


@pytest.mark.parametrize("columns", [1, 7, 8, 57, 64, 4099, 151936])
def test_python_and_cuda_agree_about_the_launch(host_of_any_cluster, columns):
    cuda_rows = pytest.importorskip("grpo_kernels.cuda_rows", reason="triton is not installed", exc_type=ImportError)
    library = host_of_any_cluster.library
    assert tuple(CLUSTERS) == cuda_rows.CLUSTERS
    assert library.threads() == cuda_rows.THREADS
    for dtype in DTYPES:
        assert cuda_rows.part_bytes(columns, dtype, library.ctas()) == library.part_bytes(columns, dtype.itemsize)
