"""SGLang's experts on the CPU: what SGLang and its fork ask of a module called kt_kernel, on ktinject's kernels.

    sglang --kt-weight-path … ──► KTEPWrapperMethod ──► KTMoEWrapper (wrapper.py) ──► layer.py ──► operators
                 ▲
                 └── plugin.py, by SGLang's entry point `sglang.srt.plugins`

SGLang has the experts on the GPU, the scheduler, the cache and the server; this has the experts on the CPU. Nothing is
imported before it is used: SGLang imports this in every process, also in those that need none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktinject.sglang.wrapper import KTMoEWrapper, generate_gpu_experts_masks

__all__ = ["KTMoEWrapper", "generate_gpu_experts_masks"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ktinject.sglang' has no attribute {name!r}")
    from ktinject.sglang import wrapper

    return getattr(wrapper, name)
