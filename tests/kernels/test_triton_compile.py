"""The Triton kernels compile to machine code for Hopper and Blackwell, without spilling and with 16-byte accesses."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from limits import limit

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from grpo_kernels import triton_rows  # noqa: E402

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {
    "ids": "*i64", "index": "*i64", "old": "*fp32", "ref": "*fp32", "rollout": "*fp32", "advantage": "*fp32",
    "weight": "*fp32", "outputs": "*fp32", "stats": "*fp32", "grad_logprob": "*fp32", "grad_entropy": "*fp32",
}  # fmt: skip
INTEGERS = ("count", "stride", "out_stride", "columns", "width", "kl", "cispo", "correction")
ALIGNED = ("logits", "out", "stride", "out_stride", "columns", "width")
SWITCHES = {"MODE": 2, "HAS_OLD": True, "HAS_REF": True, "HAS_ROLLOUT": True, "ENTROPY": True, "GRADIENT": True}


def compiled(kernel, architecture: int, logits: str, out: str, warps: int, at_once: int):
    """The kernel with everything switched on, for an aligned vocabulary."""
    lane = 4 if logits == "fp32" else 8
    constants = SWITCHES | {"BLOCK": warps * 64 * lane, "LANE": lane}
    names = kernel.arg_names
    types = POINTERS | dict.fromkeys(INTEGERS, "i32") | dict.fromkeys(constants, "constexpr")
    types |= {"logits": f"*{logits}", "out": f"*{out}"}
    source = ASTSource(
        kernel,
        signature={name: types.get(name, "fp32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED if name in names},
    )
    options = {"num_warps": warps, "maxnreg": triton_rows.registers_for(warps, at_once)}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def machine_code(binary: bytes, folder: Path) -> tuple[int, str]:
    """Registers per thread, and the instructions."""
    (folder / "kernel.cubin").write_bytes(binary)
    used, instructions = (
        subprocess.run(
            [BINARIES / "cuobjdump", what, "kernel.cubin"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=limit(120),
        ).stdout
        for what in ("-res-usage", "-sass")
    )
    return int(re.search(r"\bREG:(\d+)", used)[1]), instructions


# kernel, dtype of logits and gradient, warps, how many programs a multiprocessor has to have room for
KERNELS = [
    ("stats_kernel", "bf16", "fp32", 8, triton_rows.STATS_AT_ONCE),
    ("stats_kernel", "fp32", "fp32", 8, triton_rows.STATS_AT_ONCE),
    ("gradient_kernel", "bf16", "bf16", 8, triton_rows.GRADIENT_AT_ONCE),
    ("gradient_kernel", "fp32", "bf16", 8, triton_rows.GRADIENT_AT_ONCE),
    ("grpo_kernel", "bf16", "bf16", 8, triton_rows.GRPO_AT_ONCE),
    ("grpo_kernel", "fp32", "fp32", 8, triton_rows.GRPO_AT_ONCE),
    ("grpo_kernel", "bf16", "bf16", 32, 1),
    ("grpo_kernel", "fp32", "fp32", 32, 1),
]


@pytest.mark.parametrize("architecture", [90, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "logits", "out", "warps", "at_once"), KERNELS)
def test_few_registers_no_spills_wide_accesses(name, logits, out, warps, at_once, architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = compiled(getattr(triton_rows, name), architecture, logits, out, warps, at_once)
    registers, instructions = machine_code(kernel.asm["cubin"], tmp_path)
    print(name, architecture, logits, warps, registers, kernel.metadata.shared)
    assert not re.search(r"\b(LDL|STL)\b", instructions), "spilled"
    assert registers <= triton_rows.registers_for(warps, at_once)
    assert re.search(r"\bLDG\.E\S*\.128\b", instructions)
    if name != "stats_kernel":
        assert re.search(r"\bSTG\.E\S*\.128\b", instructions)
