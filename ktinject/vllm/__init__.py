"""vLLM's routed experts by ktinject's kernels, on machines without a GPU: `--quantization ktinject`.

    vLLM ──► ExpertsConfig (plugin.py) ──► ExpertsMethod (experts.py) ──► ktinject.sglang's KTMoEWrapper ──► operators
                 ▲
                 └── by vLLM's entry point `vllm.general_plugins`

vLLM has the scheduler, the cache, attention, the dense layers and the router; this has the experts, packed while they
are read. The object behind it is the one that serves SGLang. Nothing is imported before it is used.
"""

NAME = "ktinject"
