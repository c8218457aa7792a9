"""A process with vLLM. Arguments: a JSON of settings, and the file for the answer.

model, options  of vllm.LLM; several models are held at once, and asked in turns
prompts, new    lists of ids, and how many tokens each answer has
refusals        instead: layers that are made, by their attributes, and what the checks say of them
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def answers(given: dict[str, Any]) -> list[list[list[int]]]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    sampling = SamplingParams(temperature=0, max_tokens=given["new"], ignore_eos=True)
    made = [LLM(model=model, **given["options"]) for model in given["model"]]
    asked = [{"prompt_token_ids": ids} for ids in given["prompts"]]
    return [
        [[*answer.outputs[0].token_ids] for answer in one.generate(asked, sampling, use_tqdm=False)]
        for one in made
    ]


def refusals(given: dict[str, Any]) -> list[str]:
    from vllm.config import VllmConfig, set_current_vllm_config  # type: ignore[import-not-found]

    from ktinject.errors import OperatorError
    from ktinject.vllm import experts, plugin

    said = []
    for case in given["refusals"]:
        parallel = {"tp_size": 1, "dp_size": 1, "use_ep": False} | case.get("parallel", {})
        config = {"num_experts": 32, "num_logical_experts": 32, "is_lora_enabled": False, "has_bias": False}
        layer = {
            "layer_name": "model.layers.7.mlp.experts",
            "activation": SimpleNamespace(value="silu"),
            "swiglu_limit": None,
            "swiglu_alpha": None,
            "swiglu_beta": None,
            "apply_router_weight_on_input": False,
        }
        layer |= {name: value for name, value in case.get("layer", {}).items() if name != "activation"}
        if "activation" in case.get("layer", {}):
            layer["activation"] = SimpleNamespace(value=case["layer"]["activation"])
        made = SimpleNamespace(
            moe_config=SimpleNamespace(
                moe_parallel_config=SimpleNamespace(**parallel), **config | case.get("config", {})
            ),
            **layer,
        )
        try:
            if "version" in case:
                plugin.VERSION = case["version"]
                plugin.ExpertsConfig()
            elif "device" in case:
                plugin.VERSION = "0.32.0"
                plugin.current_platform = SimpleNamespace(is_cpu=lambda: False, device_name=case["device"])
                plugin.ExpertsConfig()
            elif "options" in case:
                with set_current_vllm_config(VllmConfig(additional_config={"ktinject": case["options"]})):
                    said.append(repr(experts.options()))
            elif case.get("packed"):
                method = experts.ExpertsMethod.__new__(experts.ExpertsMethod)
                method.name, method._is_loaded = "model.layers.7.mlp.experts", True
                method._skip(iter([]))
            elif "folder" in case:
                experts.folder_of(case["folder"])
            else:
                said.append(repr(experts.check(made)))
        except (OperatorError, experts.CheckpointError) as error:
            said.append(str(error))
    return said


def main() -> None:
    given = json.loads(sys.argv[1])
    out = refusals(given) if "refusals" in given else answers(given)
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
