"""kt_kernel, as SGLang imports it, with the experts of ktinject.

SGLang takes an ImportError, and nothing else, for "not installed"; so this imports what it names, and starts nothing.
"""

from ktinject import __version__
from ktinject.sglang import KTMoEWrapper, generate_gpu_experts_masks

__all__ = ["KTMoEWrapper", "__cpu_variant__", "__version__", "generate_gpu_experts_masks"]

__cpu_variant__ = "ktinject"
