"""The CUDA parts, or what stands in for them: the same symbols, which refuse."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ktinject import _native

NATIVE = Path(__file__).parents[2] / "native"


def test_devices_are_listed_or_the_reason_is_given():
    """Tests hide the GPUs, so a build with CUDA finds none or no driver."""
    if _native.cuda_built():
        try:
            assert _native.cuda_devices() == []
        except RuntimeError as error:
            assert "counting CUDA devices: " in str(error) and "nvidia-smi" in str(error)
    else:
        with pytest.raises(
            RuntimeError, match=r"nvcc was not found when it was made\. Install the CUDA toolkit"
        ):
            _native.cuda_devices()


# Headers of CUDA parts in another room.
OUTSIDE = ("channel", "expert_cache")


@pytest.mark.gpu
def test_devices_are_those_of_torch():
    import torch

    if not torch.cuda.is_available() or not _native.cuda_built():
        pytest.skip("no CUDA device, or built without CUDA")
    found = [(device["name"], device["capability"]) for device in _native.cuda_devices()]
    wanted = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    assert found == [(device.name, (device.major, device.minor)) for device in wanted]


@pytest.mark.nightly
def test_a_build_without_cuda_has_the_same_symbols_and_refuses(tmp_path):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    main = tmp_path / "main.cpp"
    main.write_text(
        '#include <iostream>\n#include "cuda/devices.hpp"\n'
        "int main() {\n"
        "  if (ktinject::cuda::is_built()) return 1;\n"
        "  try { ktinject::cuda::devices(); } catch (const std::exception& e) { std::cout << e.what(); return 0; }\n"
        "  return 2;\n}\n"
    )
    sources = [str(path) for path in (NATIVE / "no_cuda").glob("*.cpp")]
    program = tmp_path / "program"
    subprocess.run(
        [compiler, "-std=c++20", f"-I{NATIVE}", str(main), *sources, "-o", str(program)], check=True
    )
    answer = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    assert "has no CUDA parts" in answer.stdout
    # Whatever others may call has a header of C++; files without one are called by CUDA code only. A header of types
    # alone declares nothing that could refuse, and what is plain C++ is the same in both builds.
    headers = [*(NATIVE / "cuda").glob("*.hpp"), *(NATIVE / "handoff" / f"{name}.hpp" for name in OUTSIDE)]
    stems = {path.stem for path in headers if "(" in re.sub(r"//.*", "", path.read_text("utf-8"))}
    plain = {path.stem for path in (NATIVE / "cuda").glob("*.cpp")}
    assert stems - plain == {path.stem for path in (NATIVE / "no_cuda").glob("*.cpp")}
    assert plain <= stems
