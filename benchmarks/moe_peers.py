"""Other implementations of a routed-experts layer, in the same process and on the same inputs as bench_moe.py's own.

PyTorch is always there. kt-kernel is measured where `pip install --no-deps kt-kernel` was done, or where PYTHONPATH
names a folder with the wheel's `kt_kernel` and `kt_kernel.libs`: only its extension module is loaded, not the package,
which wants triton and more.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from ktinject import _native


def torch_layer(gate_up: Tensor, down: Tensor, x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """The plain way: sort the pairs, loop over the experts hit, oneDNN underneath."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    flat = index.flatten()
    order = flat.argsort()
    tokens = order // index.shape[1]
    sorted_weight = weight.flatten()[order]
    start = 0
    for e, count in enumerate(torch.bincount(flat, minlength=gate_up.shape[0]).tolist()):
        if count == 0:
            continue
        rows = tokens[start : start + count]
        gate, up = functional.linear(x[rows], gate_up[e]).chunk(2, -1)
        y = functional.linear(functional.silu(gate) * up, down[e])
        out.index_add_(0, rows, y.float() * sorted_weight[start : start + count, None])
        start += count
    return out


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what native code prints."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def load_kt_kernel() -> ModuleType | None:
    """kt-kernel's extension for this CPU; None where it is not installed."""
    spec = importlib.util.find_spec("kt_kernel")
    if spec is None or spec.submodule_search_locations is None:
        return None
    features = _native.cpu_features()
    variant = "amx" if features.get("amx_tile") else "avx512_bf16" if features.get("avx512_bf16") else "avx2"
    for folder in spec.submodule_search_locations:
        tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}-"
        for path in Path(folder).glob(f"_kt_kernel_ext_{variant}.{tag}*.so"):
            found = importlib.util.spec_from_file_location("kt_kernel_ext", path)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            try:
                found.loader.exec_module(module)
            except ImportError as error:
                print(f"# kt-kernel is left out: {error}")
                return None
            return module
    return None


def kt_version() -> str:
    """From the metadata, or from the name of a folder beside the package; else unknown."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("kt-kernel")
    for folder in map(Path, sys.path):
        for path in folder.glob("kt_kernel-*.dist-info"):
            return re.sub(r"kt_kernel-(.*)\.dist-info", r"\1", path.name)
    return "of unknown version"


def random_codes(given: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes [1, n, bytes] and scales as kt-kernel takes them: e4m3 with an fp32 scale for 128 x 128 weights, or two
    4-bit codes a byte with a bf16 scale for 32."""
    if given == "fp8":
        codes = torch.randint(0, 120, (1, n, k), dtype=torch.uint8)
        return codes, torch.full((1, -(-n // 128), -(-k // 128)), 1e-3)
    codes = torch.randint(0, 256, (1, n, k // 2), dtype=torch.uint8)
    return codes, torch.full((1, n, k // 32), 2.0**-8, dtype=torch.bfloat16)


class KtKernel:
    """One pool of kt-kernel's workers.

    It busy-waits in a dispatcher thread of its own, which fights a pinned worker where every CPU has one: so it gets
    one worker less than CPUs and the dispatcher the CPU that is left, its best setting wherever we tried.
    """

    # Its formats beside ours: (its name, its class, what it is given). It quantises bf16 itself, with one scale a row,
    # or takes codes with a scale a group.
    FORMATS = {
        "bf16": [("BF16", "AMXBF16_MOE", "bf16")],
        "int8": [("INT8", "AMXInt8_MOE", "row")],
        "int4-g128": [
            ("INT4 a scale a row", "AMXInt4_MOE", "row"),
            ("RAWINT4", "AMXInt4_KGroup_MOE", "int4"),
        ],
        "int4-g32": [("RAWINT4", "AMXInt4_KGroup_MOE", "int4")],
        "fp8": [("FP8", "AMXFP8_MOE", "fp8")],
        "mxfp4": [("MXFP4", "AMXFP4_KGroup_MOE", "int4")],
    }

    def __init__(self, extension: ModuleType, threads: int) -> None:
        self.extension = extension
        self.version = kt_version()
        cpus = sorted(os.sched_getaffinity(0))
        self.workers = max(1, min(threads, len(cpus) - 1))
        config = extension.WorkerPoolConfig()
        config.subpool_count = 1
        config.subpool_numa_map = [0]
        config.subpool_thread_count = [self.workers]
        os.sched_setaffinity(0, {cpus[-1]})  # inherited by the dispatcher; workers bind themselves
        try:
            with quiet():
                self.pool = extension.CPUInfer(config)
        finally:
            os.sched_setaffinity(0, cpus)

    def layer(
        self, format: tuple[str, str, str], gate_up: Tensor, down: Tensor, top_k: int, most: int
    ) -> KtLayer:
        """gate_up [e, 2i, h], down [e, h, i] bf16; `most`: tokens of the longest call."""
        return KtLayer(self, format, gate_up, down, top_k, most)


class KtLayer:
    """A layer packed by kt-kernel; raises AttributeError where its build for this CPU lacks the format."""

    def __init__(
        self, kt: KtKernel, format: tuple[str, str, str], gate_up: Tensor, down: Tensor, top_k: int, most: int
    ) -> None:
        self.kt = kt
        name, kind, given = format
        self.name = f"kt-kernel {kt.version} {name}"
        make = getattr(kt.extension.moe, kind)
        experts, hidden, intermediate = down.shape
        config = kt.extension.moe.MOEConfig(experts, top_k, hidden, intermediate, 0)
        config.max_len = (most + 63) // 64 * 64  # it wants whole blocks
        config.pool = kt.pool.backend_
        order = torch.arange(experts)
        parts = {"gate": gate_up[:, :intermediate], "up": gate_up[:, intermediate:], "down": down}
        kept: list[Tensor] = [order]
        is_coded = given in ("int4", "fp8")
        if is_coded:
            config.quant_config.bits = 8 if given == "fp8" else 4
            config.quant_config.group_size = 128 if given == "fp8" else 32
            config.quant_config.zero_point = False
        for part, weight in parts.items():
            if is_coded:  # the values do not matter for speed
                codes, scales = (t.repeat(experts, 1, 1) for t in random_codes(given, *weight.shape[1:]))
                kept += [codes, scales]
                setattr(config, f"{part}_projs", [[codes[e].data_ptr() for e in range(experts)]])
                setattr(config, f"{part}_scales", [[scales[e].data_ptr() for e in range(experts)]])
            elif given == "bf16":
                kept.append(weight)
                setattr(config, f"{part}_projs", [[weight[e].data_ptr() for e in range(experts)]])
                setattr(config, f"{part}_scales", [[0] * experts])
            else:
                weight = weight.contiguous()
                kept.append(weight)
                setattr(config, f"{part}_proj", weight.data_ptr())
        config.physical_to_logical_map = order.data_ptr()
        with quiet():
            self.moe = make(config)
            kt.pool.submit(self.moe.load_weights_task(order.data_ptr()))
            kt.pool.sync()
        del kept[1:]  # repacked into memory of its own
        self.is_checked = not is_coded
        self.order = order
        self.count = torch.zeros(1, dtype=torch.int32)

    def forward(self, x: Tensor, ids: Tensor, weight: Tensor, out: Tensor) -> None:
        """x, out [m, hidden] bf16; ids [m, top_k] int64; weight [m, top_k] fp32."""
        self.count[0] = x.shape[0]
        task = self.moe.forward_task(
            self.count.data_ptr(),
            ids.shape[1],
            ids.data_ptr(),
            weight.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            False,
        )
        self.kt.pool.submit(task)
        self.kt.pool.sync()

    def error(self, gate_up: Tensor, down: Tensor) -> float:
        """Relative error of one token against fp32; NaN where the weights are not those of gate_up and down."""
        if not self.is_checked:
            return math.nan
        intermediate = down.shape[2]
        x = torch.randn(1, down.shape[1]).bfloat16()
        out = torch.zeros_like(x)
        self.forward(x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), out)
        inner = x.float() @ gate_up[0].float().T
        inner = functional.silu(inner[:, :intermediate]) * inner[:, intermediate:]
        expected = inner @ down[0].float().T
        return float((out.float() - expected).norm() / expected.norm())
