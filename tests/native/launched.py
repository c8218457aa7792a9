"""Which of our CUDA kernels a selection of tests launches: exits with 1 if one is missing, so that what a sanitizer
runs cannot quietly become less than all of them.

    python tests/native/launched.py -m gpu tests/operators -k "…"
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

CUDA = Path(__file__).parents[2] / "native/cuda"
ASKED_ABOUT = {"sample_kernel"}  # devices.cu only asks what its code was compiled for
KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(")


def kernels() -> set[str]:
    """The names of all kernels in the sources that anybody launches."""
    sources = [file.read_text("utf-8") for file in sorted(CUDA.glob("*.cu*"))]
    return {name for source in sources for name in KERNEL.findall(source)} - ASKED_ABOUT


def main() -> int:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        code = int(pytest.main(sys.argv[1:]))
    launched = " ".join({event.key for event in profiler.key_averages()})
    missing = sorted(name for name in kernels() if name not in launched)
    print(
        f"{len(kernels()) - len(missing)} of {len(kernels())} kernels were launched; missing: {missing or 'none'}"
    )
    return code or bool(missing)


if __name__ == "__main__":
    sys.exit(main())
