"""Names in checkpoints, the rest through transformers' loader, Kimi-K2, layers and dtypes."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from double import on_meta, saved
from transformers import (
    Ernie4_5_VLMoeConfig,
    Ernie4_5_VLMoeForConditionalGeneration,
    GenerationConfig,
    PreTrainedModel,
    Qwen3MoeForCausalLM,
)
from transformers import (
    initialization as init,
)
from transformers.core_model_loading import dot_natural_key

import ktinject
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.errors import CheckpointError, KTInjectError, PlanError
from ktinject.hf import models as hf
from ktinject.hf.key_map import KeyMap, Piece, key_map
from ktinject.planning.match import grouped

torch.set_num_threads(1)
IDS = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0))


def mapping_of(model: PreTrainedModel, names: list[str]) -> KeyMap:
    return key_map(model, names)


def as_kimi(folder: Path) -> Path:
    """The same checkpoint as Kimi-K2 publishes it: another model_type, and remote code that must not be run."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# Names of checkpoints


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "qwen3_moe"])
def test_experts_of_a_checkpoint_become_pieces(name: str, tmp_path: Path) -> None:
    model = models.tiny(name)
    with Checkpoint.open(saved(model, tmp_path)) as checkpoint:
        mapping = mapping_of(on_meta(model), list(checkpoint.names))
        path, leaf = models.leaf(model)
        assert not mapping.missing and not mapping.unexpected and not mapping.conversions
        for parameter in ("gate_up_proj", "down_proj"):
            whole = torch.full_like(getattr(leaf, parameter), torch.nan)
            for piece in mapping.targets[f"{path}.{parameter}"]:
                part = whole[piece.expert]
                if piece.part is not None:
                    part = part.chunk(mapping.parts[f"{path}.{parameter}"])[piece.part]
                part.copy_(checkpoint.read(piece.key))
            assert torch.equal(whole, getattr(leaf, parameter))


def ernie_vl() -> PreTrainedModel:
    """Two groups of twelve experts that one list in the checkpoint holds."""
    text = {
        **models.COMMON,
        "moe_intermediate_size": [24, 24],
        "moe_num_experts": 12,
        "moe_k": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 2]},
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 32, "patch_size": 4}
    torch.manual_seed(0)
    config = Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision)
    return Ernie4_5_VLMoeForConditionalGeneration(config).eval()


def test_transformers_converter_gets_experts_by_number(tmp_path: Path) -> None:
    """It splits the list where it is told to: experts in the order 0, 1, 10, 11, 2 … would be exchanged in silence."""
    model = ernie_vl()
    saved(model, tmp_path)
    with torch.device("meta"):
        new = type(model)(copy.deepcopy(model.config))
    rule = {"name": "experts", "match": {"path": r".*\.experts"}, "replace": {"operator": "held_experts"}}
    ktinject.optimize(new, [rule], checkpoint=tmp_path, progress=False)
    assert len(new.ktinject.replacements) == 2
    for replacement in new.ktinject.replacements:
        for name in replacement.parameter_shapes:
            found = new.get_submodule(replacement.path).unpack(name)
            assert torch.equal(found, model.get_parameter(f"{replacement.path}.{name}"))
    mapping = new.ktinject.mapping
    assert mapping is not None and mapping.conversions
    for conversion in mapping.conversions.values():
        assert all(list(keys) == sorted(keys, key=dot_natural_key) for keys in conversion.sources.values())


def test_fused_names_stay_whole(tmp_path: Path) -> None:
    model = models.tiny("gpt_oss")
    with Checkpoint.open(saved(model, tmp_path)) as checkpoint:
        mapping = mapping_of(on_meta(model), list(checkpoint.names))
    name = f"{models.leaf(model)[0]}.gate_up_proj"
    assert mapping.targets[name] == [Piece(name)]


def test_what_is_missing_is_named_as_the_checkpoint_would_name_it() -> None:
    model = on_meta(models.tiny("mixtral"))
    names = names_of(models.tiny("mixtral"))
    absent = [
        "model.layers.0.block_sparse_moe.experts.2.w3.weight",
        "model.layers.1.block_sparse_moe.experts.5.w2.weight",
        "model.layers.1.self_attn.q_proj.weight",
    ]
    mapping = mapping_of(model, [name for name in names if name not in absent])
    assert mapping.missing == absent and not mapping.unexpected


def test_a_part_that_is_missing_for_all_experts_is_listed_in_full() -> None:
    model = models.tiny("deepseek_v3")
    absent = sorted(name for name in names_of(model) if ".mlp.experts." in name and ".up_proj." in name)
    mapping = mapping_of(model, [name for name in names_of(model) if name not in absent])
    assert mapping.missing == absent


def test_a_whole_parameter_that_is_missing_goes_by_its_own_name() -> None:
    model = models.tiny("deepseek_v3")
    mapping = mapping_of(model, [name for name in names_of(model) if ".down_proj" not in name])
    assert "model.layers.1.mlp.experts.down_proj" in mapping.missing


def test_what_belongs_nowhere_is_listed() -> None:
    model = models.tiny("deepseek_v3")
    extra = [
        "model.layers.1.mlp.experts.3.gate_proj.bias",
        "model.layers.1.mlp.experts.03.gate_proj.weight",  # a second expert 3
        "model.layers.1.mlp.experts.6.gate_proj.weight",  # there are 0 to 5
        "model.layers.1.mlp.experts.down_proj.weight_packed",
        "model.layers.7.self_attn.o_proj.weight",
        "visual.patch_embed.weight",
    ]
    mapping = mapping_of(model, names_of(model) + extra)
    assert sorted(mapping.unexpected) == sorted(extra) and not mapping.missing


def test_a_checkpoint_with_both_spellings_of_a_parameter_is_too_much() -> None:
    model = models.tiny("qwen3_moe")
    mapping = mapping_of(model, [*names_of(model), "model.layers.1.mlp.experts.down_proj"])
    assert [name for name in mapping.unexpected if ".down_proj" in name] == mapping.unexpected != []


NASTY = [
    "model.layers.1.mlp.experts." + "9" * 5000 + ".gate_proj.weight",
    "model.layers." + "1" * 5000 + ".mlp.gate.weight",
    "model.layers.².mlp.experts.².gate_proj.weight",
    "model.layers.1.mlp.experts.-1.gate_proj.weight",
    "model.layers.1.mlp.experts.٣.gate_proj.weight",
    "model.{0}.{x!r:>99999999}.weight",
    "\\1.\\g<0>.experts.1.w1.weight",
    "",
    ".",
    "..experts.1.",
    "\x1b[2J.weight",
    "model." * 1000,
]


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "gpt_oss"])
def test_names_made_to_trip_us_are_only_unexpected(name: str) -> None:
    model = models.tiny(name)
    mapping = mapping_of(model, [*names_of(model), *NASTY])
    assert sorted(mapping.unexpected) == sorted(NASTY) and not mapping.missing
    lines = grouped([*NASTY, *(f"{name}.{number}" for name in NASTY for number in range(3))])
    assert len(lines) >= len(NASTY)


def test_names_that_the_model_class_ignores_are_ignored() -> None:
    model = models.tiny("deepseek_v3")
    names = [
        *names_of(model),
        "model.layers.61.eh_proj.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ]
    mapping = mapping_of(model, names)
    assert not mapping.unexpected and not mapping.missing


def test_a_checkpoint_of_the_base_model_fits(tmp_path: Path) -> None:
    model = models.tiny("qwen3_moe", tie_word_embeddings=True)
    with Checkpoint.open(saved(model.model, tmp_path)) as checkpoint:
        assert all(not name.startswith("model.") for name in checkpoint.names)
        mapping = mapping_of(on_meta(model), list(checkpoint.names))
    assert not mapping.unexpected and not mapping.missing


def test_tied_parameters_share_a_key_either_way() -> None:
    model = models.tiny("qwen3_moe", tie_word_embeddings=True)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    others = [name for name in names_of(model) if name not in (embedding, head)]
    for there in (embedding, head):
        mapping = mapping_of(model, [*others, there])
        assert not mapping.missing
        assert mapping.targets[embedding] == mapping.targets[head] == [Piece(there)]


def names_of(model: PreTrainedModel) -> list[str]:
    """The names under which transformers saves a model."""
    from transformers.core_model_loading import revert_weight_conversion

    return list(revert_weight_conversion(model, model.state_dict()))


# Loading what is not swapped


@pytest.mark.parametrize("name", models.AVAILABLE)
def test_transformers_loads_a_model_through_us_bit_by_bit(name: str, tmp_path: Path) -> None:
    model = models.tiny(name)
    with Checkpoint.open(saved(model, tmp_path)) as checkpoint:
        loaded = on_meta(model)
        mapping = mapping_of(loaded, list(checkpoint.names))
        assert not mapping.missing and not mapping.unexpected
        hf.load_rest(loaded, mapping, checkpoint.read, {"": "cpu"}, str(tmp_path))
    assert not loaded.training
    for (path, ours), theirs in zip(everything(loaded), everything(model), strict=True):
        assert torch.equal(ours, theirs[1]), path


def everything(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


class Reaching(Qwen3MoeForCausalLM):
    """Initialises experts from the block and from the layer above, as Qwen3-Omni does from the block."""

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        block = getattr(module, "mlp", module)
        if "experts" in dir(block):
            init.normal_(block.experts.gate_up_proj)
            init.zeros_(block.experts.down_proj)
            assert block.experts.down_proj.shape[0] == self.config.num_experts


@pytest.mark.parametrize(
    "operator, path",
    [("held_experts", r".*\.experts"), ("cpu_experts", r".*\.experts"), ("deferred_moe", r".*\.1\.mlp")],
)
def test_a_parent_may_initialise_what_an_operator_has_taken(operator: str, path: str, tmp_path: Path) -> None:
    model = Reaching(models.config("qwen3_moe")).eval()
    saved(model, tmp_path)
    with torch.device("meta"):
        new = Reaching(copy.deepcopy(model.config))
    rule = {"name": "experts", "match": {"path": path}, "replace": {"operator": operator}}
    ktinject.optimize(new, [rule], checkpoint=tmp_path, progress=False)
    left = [
        name for module in new.modules() for name in vars(module) if name in ("gate_up_proj", "down_proj")
    ]
    assert not left, "stand-ins stay no longer than they are needed"
    with torch.no_grad():
        assert torch.allclose(new(IDS).logits, model(IDS).logits, atol=1e-2)


def test_a_parameter_that_is_not_filled_is_fatal(tmp_path: Path) -> None:
    model = models.tiny("qwen3_moe")
    with Checkpoint.open(saved(model, tmp_path)) as checkpoint:
        loaded = on_meta(model)
        mapping = mapping_of(loaded, list(checkpoint.names))
        del mapping.targets["model.norm.weight"], mapping.targets["model.layers.1.mlp.gate.weight"]
        with pytest.raises(CheckpointError, match=r"gate.weight: not filled\n.*norm.weight: not filled"):
            hf.load_rest(loaded, mapping, checkpoint.read, {"": "cpu"}, str(tmp_path))


@pytest.mark.parametrize("shown", [True, False])
def test_transformers_shows_no_bars_and_keeps_its_setting(
    shown: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import logging

    monkeypatch.setattr(logging, "_tqdm_active", shown)
    model = models.tiny("qwen3_moe")
    with Checkpoint.open(saved(model, tmp_path)) as checkpoint:
        loaded = on_meta(model)
        mapping = mapping_of(loaded, list(checkpoint.names))
        capfd.readouterr()
        hf.load_rest(loaded, mapping, checkpoint.read, {"": "cpu"}, str(tmp_path))
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled() == shown


def test_what_stays_fp32_in_a_bf16_model(tmp_path: Path) -> None:
    model = models.tiny("deepseek_v3")
    with Checkpoint.open(saved(model, tmp_path)) as checkpoint:
        loaded = hf.meta_model(model.config, torch.bfloat16)
        dtype_of = hf.final_dtype(loaded)
        mapping = mapping_of(loaded, list(checkpoint.names))
        hf.load_rest(loaded, mapping, checkpoint.read, {"": "cpu"}, str(tmp_path))
    bias = loaded.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32 == dtype_of("model.layers.1.mlp.gate.e_score_correction_bias", bias)
    assert loaded.lm_head.weight.dtype == torch.bfloat16 == dtype_of("lm_head.weight", loaded.lm_head.weight)
    assert torch.equal(bias, model.model.layers[1].mlp.gate.e_score_correction_bias)


def test_the_checkpoints_generation_config_is_taken_unless_one_was_set(tmp_path: Path) -> None:
    GenerationConfig(max_new_tokens=7, do_sample=True, temperature=0.6).save_pretrained(tmp_path)
    model = on_meta(models.tiny("qwen3_moe"))
    found = hf.generation_config(model, tmp_path)
    assert found is not None and found.max_new_tokens == 7
    model.generation_config.max_new_tokens = 9
    assert hf.generation_config(model, tmp_path) is None
    assert hf.generation_config(on_meta(models.tiny("qwen3_moe")), tmp_path / "nothing") is None


def test_a_generation_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be used"):
        hf.generation_config(on_meta(models.tiny("qwen3_moe")), tmp_path)


# Kimi-K2


# What is asked of transformers first decides the order in which its modules import one another.
FIRST = [
    "import transformers; import ktinject",
    "import ktinject; import transformers",
    "import ktinject, transformers; from transformers.models.deepseek_v3 import DeepseekV3Config",
    "import ktinject, transformers; from transformers.models.auto import modeling_auto",
]


@pytest.mark.nightly
def test_kimi_k2_loads_in_plain_transformers_once_ktinject_is_imported(tmp_path: Path) -> None:
    model = models.tiny("deepseek_v3")
    torch.save({"ids": IDS, "logits": model(IDS).logits}, tmp_path / "expected.pt")
    folder = as_kimi(saved(model, tmp_path / "kimi"))
    # Each order in a process of its own; what transformers imports of others is imported once.
    code = f"""
import os, sys, traceback
import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor, torch.export
import torch.distributed.checkpoint, torch.nn.attention.flex_attention
import accelerate, huggingface_hub, jinja2, safetensors.torch, tokenizers
torch.set_num_threads({torch.get_num_threads()})
assert "transformers" not in sys.modules and "ktinject" not in sys.modules
def load():
    expected = torch.load({str(tmp_path / "expected.pt")!r})
    config = transformers.AutoConfig.from_pretrained({str(folder)!r})
    assert config.model_type == "kimi_k2", config
    assert "ktinject" in transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING, "the other thing that waits for this"
    model = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})
    print((model(expected["ids"]).logits - expected["logits"]).abs().max().item(), model.config._experts_implementation)
for first in {FIRST!r}:
    child = os.fork()
    if child == 0:
        try:
            exec(first)
            load()
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"0.0 {model.config._experts_implementation}"] * len(FIRST), (
        done.stderr
    )


def test_importing_ktinject_imports_no_torch() -> None:
    code = "import sys, ktinject, ktinject.rules; print(sorted({'torch', 'transformers'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


# Building on meta


def test_dtype_of_a_meta_model(tmp_path: Path) -> None:
    model = models.tiny("qwen3_moe").half()
    folder = saved(model, tmp_path)
    config = hf.read_config(folder)
    assert hf.meta_model(config).dtype == torch.float16
    assert hf.meta_model(config, "bfloat16").dtype == torch.bfloat16
    assert hf.meta_model(config, torch.float32).lm_head.weight.is_meta
    config = hf.read_config(folder)
    config.dtype = None
    with Checkpoint.open(folder) as checkpoint:
        assert hf.meta_model(config, "auto", checkpoint).dtype == torch.float16
    assert hf.meta_model(config).dtype == torch.float16, "the config keeps what was found"


@pytest.mark.parametrize("dtype", ["bf16", "int8", torch.int8, torch.float8_e4m3fn, "nn"])
def test_a_dtype_that_is_none_is_refused(dtype: str | torch.dtype) -> None:
    with pytest.raises(PlanError, match=r"dtype: found .*; use auto, bfloat16"):
        hf.meta_model(models.config("qwen3_moe"), dtype)


def test_a_config_without_a_language_model_is_refused() -> None:
    from transformers import ViTConfig

    with pytest.raises(PlanError, match="'vit': transformers has no language model"):
        hf.meta_model(ViTConfig())


@pytest.mark.parametrize(
    "content, found",
    [
        ("{", "brackets do not pair up"),
        ('{"model_type": "nothing"}', "nothing"),
        ("{}", "model_type"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(content: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"(?s)config.json cannot be used.*({found})"):
        hf.read_config(tmp_path)


def test_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be used"):
        hf.read_config(tmp_path)


@pytest.mark.parametrize("change", [{"hidden_size": "wide"}, {"hidden_size": -3}, {"rope_parameters": 7}])
def test_a_config_that_makes_no_model_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(KTInjectError):
        hf.meta_model(hf.read_config(folder))


def test_no_room_for_threads_is_no_room(tiny_qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> None:
        raise RuntimeError("can't start new thread")  # as CPython says it

    monkeypatch.setattr("threading.Thread.start", start)
    with pytest.raises(CheckpointError, match=r"no room for the threads that read it\. Free memory"):
        ktinject.load(tiny_qwen3_moe, devices=["cpu"], progress=False)
