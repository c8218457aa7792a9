"""Packages that SGLang imports and a run on a CPU does not use, and entry points, as a folder for PYTHONPATH."""

from __future__ import annotations

import textwrap
from pathlib import Path

# sglang-kernel needs CUDA. Without its parts, SGLang does without what they are for.
_FUNCTIONS = """
    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*arguments, **named):
            raise NotImplementedError(name)

        return absent
"""
# torchvision comes with CUDA, or for one version of torch alone.
_ANYTHING = """
    import importlib.machinery, sys, types

    __version__ = "0.26.0"
    _MODES = ("BILINEAR", "BICUBIC", "NEAREST", "NEAREST_EXACT", "LANCZOS", "BOX", "HAMMING")


    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), dict.fromkeys(_MODES, 0))


    class _Anything(types.ModuleType):
        __path__ = []
        __getattr__ = staticmethod(__getattr__)


    class _Finder:
        def find_spec(self, name, path=None, target=None):
            if name.startswith(__name__ + "."):
                return importlib.machinery.ModuleSpec(name, self, is_package=True)

        def create_module(self, spec):
            return _Anything(spec.name)

        def exec_module(self, module):
            pass


    sys.meta_path.insert(0, _Finder())
"""
# The 100th answer of the layers, within the first round, is as one that the CPU failed to compute.
_FAILING = """
    import torch

    from ktinject.sglang import failures, wrapper

    calls = 0


    def register():
        original = wrapper.KTMoEWrapper.sync_forward

        def sync_forward(self, x, stream=None):
            global calls
            calls += 1
            out = original(self, x, stream)
            if calls != 100:
                return out
            failures.note("this test")
            return torch.full_like(out, torch.nan)

        wrapper.KTMoEWrapper.sync_forward = sync_forward
"""


def write(folder: Path, fails: bool) -> Path:
    """The folder. fails: with a second plug-in, by which one answer of the CPU fails."""
    for name, code in (("sgl_kernel", _FUNCTIONS), ("torchvision", _ANYTHING)):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(textwrap.dedent(code))
    _distribution(folder, "torchvision", "0.26.0", "")
    (folder / "failing.py").write_text(textwrap.dedent(_FAILING))
    points = "ktinject = ktinject.sglang.plugin:register\n" + "failing = failing:register\n" * fails
    # An installed ktinject has the first itself, and may be called twice.
    _distribution(folder, "plugins", "0", f"[sglang.srt.plugins]\n{points}")
    return folder


def _distribution(folder: Path, name: str, version: str, points: str) -> None:
    made = folder / f"{name}-{version}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (made / "entry_points.txt").write_text(points)
