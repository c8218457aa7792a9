"""How `int4_linear` multiplies so many tokens: with its own kernel, or with cuBLAS and a weight that was unpacked.

What is faster was measured on an H200, with groups of 128: docs/benchmarks.md, "Linear layers on the GPU", has the
times.
"""

from __future__ import annotations

# With more tokens than this (first on Hopper, then on other GPUs), it is faster to unpack the weight and use cuBLAS.
MANY_TOKENS, MANY_TOKENS_SM80 = 4096, 256
# Small layers on Hopper: (more tokens than, up to), fewest outputs, and (most outputs, most million weights) with which
# that is faster, too, measured for the layers of the models that `ktinject bench` knows. The kernels have the same
# blocks for all tokens of a range, of which the greatest number was measured.
_SMALL_LAYERS = (
    ((192, 256), 2048, ((4096, 10.0),)),
    ((384, 512), 512, ((4096, 11.1), (3600, 13.0))),
)

_MEASURED = 132  # multiprocessors of an H100 or H200
# With up to 64 tokens, int4_linear was faster than cuBLAS with a weight in bf16 for all layers; with more than 1024,
# cuBLAS was as fast or faster. In between, these numbers of tokens were measured. A number between two is taken as the
# greater one, as blocks are (native/cuda/int4_blocks.cpp).
_FEW, _COMPARED = 64, (128, 256, 512, 1024)
# Inputs and outputs → those of the numbers above with which int4 was faster. The smallest layers first.
INT4_IS_FASTER: dict[tuple[int, int], tuple[int, ...]] = {
    (512, 2048): (128, 256, 512), (2048, 512): (128, 256, 512), (2560, 512): (128, 256, 512),
    (2880, 512): (128, 256, 512), (3584, 512): (128, 256, 512), (4096, 512): (128, 512),
    (3072, 1024): (128, 256), (7168, 576): (128,), (2048, 2048): (128, 512), (4096, 1024): (256,), (5120, 1024): (),
    (1408, 4096): (128, 256, 512), (4096, 1408): (128,), (1536, 4096): (128, 256, 512), (2560, 2560): (128,),
    (2560, 3072): (128,), (3072, 2560): (128,), (512, 16384): (128,), (2048, 4096): (128, 256, 512),
    (4096, 2048): (128, 256, 512), (7168, 1536): (128,), (2816, 4096): (128, 256), (4096, 2816): (),
    (2880, 4096): (128, 256), (4096, 2880): (128,), (2048, 6144): (128, 512), (3072, 4096): (128, 256),
    (4096, 3072): (256,), (3584, 3584): (128, 256), (2048, 7168): (128,), (7168, 2048): (512,),
    (2048, 8192): (128, 256), (4096, 4096): (128, 256), (1536, 12288): (128, 256), (3072, 6144): (128, 512),
    (6144, 3072): (), (2048, 12288): (128, 256), (5120, 5120): (), (2560, 12288): (128, 256), (12288, 2560): (),
    (4096, 8192): (128, 256), (8192, 4096): (128, 256), (16384, 7168): (128, 512, 1024),
    (7168, 18432): (128, 512, 1024),
}  # fmt: skip
# All other layers, and other GPUs. On Hopper, layers of fewer weights than this were behind from 65 tokens on in the
# mean, larger ones from 129 on. Other GPUs were not measured: they are taken to be as large layers are on Hopper.
_LARGE = 40_000_000


def is_small(k: int, n: int, m: int) -> bool:
    """Whether a weight [n, k] and m tokens are so few work that, on Hopper, unpacking it and cuBLAS are faster."""
    return any(
        few < m <= most
        and n >= fewest
        and any(n <= outputs and n * k <= million * 1e6 for outputs, million in bounds)
        for (few, most), fewest, bounds in _SMALL_LAYERS
    )


def bf16_is_faster(k: int, n: int, m: int, multiprocessors: int) -> bool:
    """Whether cuBLAS with a weight [n, k] in 16 bits multiplies m tokens faster than int4_linear with one in int4.

    multiprocessors  those of a Hopper GPU; 0: another GPU
    """
    int4_is_faster = INT4_IS_FASTER.get((k, n))
    if multiprocessors == _MEASURED and int4_is_faster is not None:
        return m > _FEW and next((most for most in _COMPARED if m <= most), None) not in int4_is_faster
    return m > (_FEW if multiprocessors and n * k < _LARGE else 2 * _FEW)
