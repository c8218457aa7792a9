"""Every name of transformers and of torch that ktinject uses and that neither promises to keep.

    PRIVATE ──► `support(feature)`: whether this version has all that a feature needs; looked at once a process
    callers ──► `compat.name`: a function or class of it, looked up when it is first used

What a version lacks costs the features that need it, and no others:

    generation  a swapped model generates by transformers' own loop; the reason is in its plan, in `doctor` and in
                `model.ktinject_decoding.reason`
    candidates  for models with states, they are refused, as transformers does
    compressed  decode steps of layers with compressed keys are transformers' own
    blocks      decode steps of layers that choose blocks of tokens by an index are transformers' own
    own_caches  decode steps of models that make caches of their own kind are transformers' own
    continued   a next turn's attention, and that of a prompt's next chunk, is transformers' own
    loading     checkpoints are refused, see `require`
    swapping    rules are refused, too
    batching    continuous batching of a swapped model is refused
    from_pretrained  transformers' door with our config is refused; `ktinject.load` is not
    templates   chat templates are refused, see templates.py
    serving     `ktinject serve` is refused
    kimi_k2     transformers does not know Kimi-K2
    probes      of experts, the forward alone is compared with the formula
    building    transformers builds models of several threads at once; ktinject refuses what comes of it
    ending      daemon threads in a forward are not stopped before the interpreter's end, see ending.py

A method of a model is called, or overridden, where that is needed, by its name; that the name means what it meant is
found out here.

Public ways were tried and do not serve. `custom_generate` is not given the streamer, the tokenizer of stop strings or
the kind of decoding, and whoever wraps `_sample` still has to call it. A quantizer's hooks run inside
`from_pretrained`, which makes a model of its own and cannot put the caller's back as it was. `AutoConfig.register`
makes Kimi-K2 known, but importing AutoConfig imports torch; so an import hook calls it (kimi.py).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ktinject.errors import PlanError
from ktinject.hf.private import SET, THERE, Private
from ktinject.support import SUPPORTED, Support

VERSIONS = "transformers>=5.17,<5.25"  # as pyproject.toml has it
TESTED = ("5.17.0", "5.24.0")

# The argument of models, layers and `generate` that is their cache of keys, values and states, and the field of outputs
# that holds it. Before 5.24, layers that have states alone took theirs as "cache_params".
_VERSION = tuple(map(int, metadata.version("transformers").split(".")[:2]))
_SINCE_5_24 = _VERSION >= (5, 24)
CACHE = "cache" if _SINCE_5_24 else "past_key_values"
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


# Type of a model → the first version whose forward works where its norms are in fp32, in which transformers loads them,
# and all else in a narrower dtype. Before it, norms gave fp32, which the linear layers behind them refuse.
_NARROW_SINCE = {"deepseek_v4": (5, 20)}


def narrow_fault(model_type: str) -> str:
    """Why a model of this type cannot be in bf16 or fp16 with this version of transformers; "" if it can."""
    since = _NARROW_SINCE.get(model_type, _VERSION)
    if since <= _VERSION:
        return ""
    version, needed = metadata.version("transformers"), ".".join(map(str, since))
    return (
        f"its norms give fp32 in transformers {version}, which its linear layers refuse. "
        f"Install transformers {needed} or later."
    )


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a model or a layer; None if there is none.

    By any of its names: who calls a model may still use an older one.
    """
    return next((found for name in CACHE_NAMES if (found := arguments.get(name)) is not None), None)


def _each(owner: str, names: str, signature: str, used_for: str) -> Iterator[Private]:
    return (Private(owner, name, signature, used_for) for name in names.split())


_GENERATION = "transformers.generation.utils:GenerationMixin"
_MODEL = "transformers.modeling_utils:PreTrainedModel"
_CONFIG = "transformers.configuration_utils:PreTrainedConfig"
_CACHE = "transformers.cache_utils"
_PROCESS = "transformers.generation.logits_process"
_CRITERIA = "transformers.generation.stopping_criteria"
_NAMES = "transformers.conversion_mapping"
_LOADER = "transformers.core_model_loading"
_INFO = "transformers.utils.loading_report:LoadStateDictInfo.__init__"
_MODULE = "torch.nn.modules.module:Module"

_MOE = "transformers.integrations.moe"
_HOOKS = "torch.nn.modules.module"
_LOOP = "(self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, {}**model_kwargs)"
_CANDIDATE = "transformers.generation.candidate_generator"
_CANDIDATES = (
    "(self, *, generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs, assistant_model=None, "
    "target_tokenizer=None, assistant_tokenizer=None)"
)
_LOOKUP, _ASSISTED_BY = "PromptLookupCandidateGenerator", "AssistedCandidateGenerator"
_HEADS, _ANY = "MTPCandidateGenerator", "CandidateGenerator"
_BECAME = "(self, input_ids, scores, num_matches)"
_READING = "(self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches)"
_NEXT = "(self, outputs, model_kwargs, is_encoder_decoder=False, num_new_tokens=1)"
_VALIDATE = "(self, generation_mode, generation_config, generation_mode_kwargs)"
_PREFILL = "input_ids, generation_config, model_kwargs"
_ANSWER = f"(*, sequences, scores, logits, {CACHE})"
_PREPARE = "(self, input_ids, next_sequence_length=None, **kwargs)"
_RENAME = "(source_key, weight_renamings, weight_converters, base_model_prefix=None, meta_state_dict=None)"
_ADD = "(self, target_key, source_key, source_pattern, future)"
_CONVERT = "(self, layer_name, *, model=None, config=None)"
_LOAD_CONFIG = "(*, pretrained_model_name_or_path, device_map, dtype, dtype_plan, weight_mapping)"
_BATCHING = "transformers.generation.continuous_batching"
_MANAGER = f"{_BATCHING}.continuous_api:ContinuousBatchingManager"
_SERVE = "transformers.cli.serve:Serve"
_SERVING = "transformers.cli.serving"
_CHAT = f"{_SERVING}.chat_completion:ChatCompletionHandler"
_COMPLETION = f"{_SERVING}.completion:CompletionHandler"
_RESPONSE = f"{_SERVING}.response:ResponseHandler"
_TEMPLATES = "transformers.utils.chat_template_utils"
_IN_THREAD = f"(self{', use_inference_mode' if _SINCE_5_24 else ''})"
_MODELS = "list_models" if _SINCE_5_24 else "get_gen_models"
_REGISTER = "(model_type_or_class_name, mapping, overwrite=False)"
_PENALTY = "RepetitionPenaltyLogitsProcessor"
_IGNORE = "_keys_to_ignore_on_load"
_LAYER = f"{_CACHE}:CacheLayerMixin"
_REGISTRY = "transformers.utils.generic:GeneralInterface"
_AUTO = "transformers.models.auto.modeling_auto:AutoModelFor"
_STREAMED = "streamer=None, "
_V4 = "transformers.models.deepseek_v4.modeling_deepseek_v4"
_HCA, _CSA = f"{_V4}:DeepseekV4HCACache", f"{_V4}:DeepseekV4CSACache"
# Layers of caches with compressed keys, the modules whose steps hide none of them, and the models that have these.
COMPRESSED_CACHES, COMPRESSORS = frozenset({_HCA, _CSA}), frozenset({f"{_V4}:DeepseekV4HCACompressor"})
COMPRESSED_MODELS = frozenset({f"{_V4}:DeepseekV4ForCausalLM"})
# Layers of caches whose index chooses blocks of tokens.
_M3 = "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl:MiniMaxM3VLSparse"
_BLOCKS, _STATIC_BLOCKS = f"{_M3}CacheLayer", f"{_M3}StaticCacheLayer"
BLOCK_CACHES = frozenset({_BLOCKS, _STATIC_BLOCKS})
# Layers of caches that keep all tokens of the prompt beside a window of those behind it.
_OCR = "transformers.models.unlimited_ocr.modeling_unlimited_ocr"
_PROMPT = f"{_OCR}:UnlimitedOcrDynamicReferenceSlidingWindowLayer"
PROMPT_CACHES = frozenset({_PROMPT})
# Models that make caches of a class of their own.
_M1 = "transformers.models.minimax.modeling_minimax"
OWN_CACHES, OWN_CACHE = frozenset({f"{_M1}:MiniMaxForCausalLM"}), f"{_M1}:MiniMaxCache"
# Of these transformers says that something is decided on the host: which experts take pictures. Steps have none.
_VL = "transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe"
DECIDE_OF_PICTURES = frozenset({f"{_VL}:Ernie4_5_VLMoeForConditionalGeneration"})
_COMPRESS = f"(self, hidden_states, q_residual, position_ids, {CACHE}, layer_idx)"
_ASSISTED = (
    "streamer=None, inputs_tensor=None, assistant_model=None, assistant_tokenizer=None, tokenizer=None, "
)


def _has(family: str) -> bool:
    """Whether this version of transformers has a family of models, which is not imported for that."""
    found = importlib.util.find_spec("transformers")
    return bool(found and found.origin and (Path(found.origin).parent / "models" / family).is_dir())


PRIVATE: dict[str, tuple[Private, ...]] = {
    "generation": (
        # Overridden, see generate.py.
        Private(
            _GENERATION, "_sample", _LOOP.format(_STREAMED), "our decode loop, or replays in the stock one"
        ),
        Private(_GENERATION, "_beam_search", _LOOP.format(""), "replays in it"),
        Private(_GENERATION, "_assisted_decoding", _LOOP.format(_ASSISTED), "our loop with candidates"),
        Private(
            _GENERATION, "_get_static_cache_init_shape", "(self)", "each process has its part of the heads"
        ),
        Private(
            _GENERATION, "_valid_auto_compile_criteria", "(self, model_kwargs, generation_config)", "replays"
        ),
        Private(_MODEL, "get_compiled_call", "(self, compile_config)", "what would be compiled is a replay"),
        *_each(
            f"{_GENERATION}._sample",
            "get_compiled_call _valid_auto_compile_criteria",
            SET,
            "the stock loop's",
        ),
        *_each(
            f"{_GENERATION}._beam_search", "_prefill reorder_cache", SET, "what of it is not the model's own"
        ),
        # Candidates: transformers' generators, and what is set on them.
        Private(_GENERATION, "_get_candidate_generator", _CANDIDATES, "what a text may go on with"),
        *_each("transformers.generation", f"{_ASSISTED_BY} {_LOOKUP}", THERE, "which kind it is"),
        *_each(
            f"{_CANDIDATE}:{_LOOKUP}.__init__",
            "logits_processor eos_token_id num_output_tokens",
            SET,
            "on the host",
        ),
        *_each(
            f"{_CANDIDATE}:{_ASSISTED_BY}.__init__", "assistant_model num_assistant_tokens", SET, "learned"
        ),
        *_each(
            f"{_CANDIDATE}:{_HEADS}", "requires_model_outputs model_kwargs_overrides", THERE, "reads hidden"
        ),
        Private(f"{_CANDIDATE}:{_HEADS}", "get_candidates", _READING, "a step's"),
        Private(f"{_CANDIDATE}:{_ANY}", "requires_model_outputs", THERE, "whether it reads hidden states"),
        Private(f"{_CANDIDATE}:{_ANY}", "get_candidates", "(self, input_ids)", "a step's"),
        Private(f"{_CANDIDATE}:{_ANY}", "update_candidate_strategy", _BECAME, "what became of them"),
        Private(f"{_GENERATION}._prepare_special_tokens", "_eos_token_tensor", SET, "what ends a text"),
        # Called.
        Private(
            _GENERATION, "_prefill", f"(self, {_PREFILL}, is_first_iteration=True)", "the prompt, in chunks"
        ),
        Private(_GENERATION, "_update_model_kwargs_for_generation", _NEXT, "a next step"),
        Private(_GENERATION, "prepare_inputs_for_generation", _PREPARE, "a step without graphs"),
        Private(_GENERATION, "_optimize_model_for_decode", "(self)", "around all decode steps"),
        Private(_GENERATION, "_has_unfinished_sequences", THERE, "our loops end by themselves"),
        Private(
            "transformers.generation.utils", "GenerateDecoderOnlyOutput", _ANSWER, "return_dict_in_generate"
        ),
        Private("torch.utils._python_dispatch", "_get_current_dispatch_mode", "()", "it would see no replay"),
        Private(
            "torch._C", "_cuda_endAllocateToPool", THERE, "a failed capture leaves the allocator recording"
        ),
        Private(
            "transformers.generation.utils",
            "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL",
            THERE,
            "what is of the prompt alone",
        ),
        # Read of a request.
        Private(
            f"{_GENERATION}._prepare_cache_for_generation", "_is_user_defined", SET, "such a cache is kept"
        ),
        Private(f"{_GENERATION}._prepare_special_tokens", "_pad_token_tensor", SET, "what ended rows get"),
        Private(f"{_PROCESS}:TemperatureLogitsWarper.__init__", "temperature", SET, "sampling"),
        *_each(
            f"{_PROCESS}:TopKLogitsWarper.__init__", "top_k filter_value min_tokens_to_keep", SET, "sampling"
        ),
        *_each(
            f"{_PROCESS}:TopPLogitsWarper.__init__", "top_p filter_value min_tokens_to_keep", SET, "sampling"
        ),
        *_each(
            f"{_PROCESS}:MinPLogitsWarper.__init__", "min_p filter_value min_tokens_to_keep", SET, "sampling"
        ),
        *_each(f"{_PROCESS}:{_PENALTY}.__init__", "penalty prompt_ignore_length", SET, "sampling"),
        *_each(f"{_PROCESS}:MinLengthLogitsProcessor.__init__", "min_length eos_token_id", SET, "sampling"),
        *_each(
            f"{_PROCESS}:MinNewTokensLengthLogitsProcessor.__init__",
            "min_new_tokens prompt_length_to_skip eos_token_id",
            SET,
            "sampling",
        ),
        Private(f"{_CRITERIA}:MaxLengthCriteria.__init__", "max_length", SET, "where a request ends"),
        Private(f"{_CRITERIA}:EosTokenCriteria.__init__", "eos_token_id", SET, "where a row ends"),
        # Caches: copied from, and what ours derive from.
        *_each(f"{_CACHE}:Cache.__init__", "layers offloading", SET, "what a cache is made of"),
        *_each(f"{_CACHE}:CacheLayerMixin.__init__", "keys values is_initialized", SET, "[b, h, n, d] each"),
        *_each(_CACHE, "DynamicSlidingWindowLayer LinearAttentionLayer", THERE, "copied from on the CPU"),
        *_each(
            f"{_CACHE}:LinearAttentionCacheLayerMixin.__init__",
            "number_of_states conv_states recurrent_states conv_kernel_size has_previous_state "
            "is_conv_states_initialized is_recurrent_states_initialized",
            SET,
            "a step's state, written to where it lies",
        ),
        *_each(
            f"{_CACHE}:DynamicSlidingWindowLayer.__init__",
            "sliding_window cumulative_length record_past",
            SET,
            "which tokens it holds",
        ),
        Private(_LAYER, "update", "(self, key_states, value_states, *args, **kwargs)", "overridden"),
        Private(_LAYER, "lazy_initialization", "(self, key_states, value_states)", "overridden"),
        Private(_LAYER, "get_mask_sizes", "(self, query_length)", "overridden"),
        *_each(_LAYER, "get_seq_length get_max_length", "(self)", "overridden"),
        # What a recorded step relies on, or need not.
        Private(_MODEL, "_can_compile_fullgraph", THERE, "a step decides nothing on the host"),
        *_each(_CONFIG, "_attn_implementation _experts_implementation", THERE, "what a step calls"),
        Private(f"{_MODEL}.__init__", "_experts_implementation_internal", SET, "changes while decoding"),
        Private(f"{_GENERATION}._prepare_static_cache", "_previous_max_cache_length", SET, "changes nothing"),
        *_each(f"{_MODEL}.get_compiled_call", "_compiled_call _last_compile_config", SET, "change nothing"),
        Private("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS", THERE, "a step calls one"),
        Private("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS", THERE, "one makes its mask"),
        Private(f"{_REGISTRY}.__init__", "_local_mapping", SET, "what is in those two"),
        Private(_REGISTRY, "_global_mapping", THERE, "what is in those two"),
        Private(
            "transformers.utils.output_capturing", "install_output_capuring_hook", THERE, "harmless hooks"
        ),
        *_each(
            _HOOKS, "_global_forward_hooks _global_forward_pre_hooks", THERE, "a replay would not call them"
        ),
        Private("torch.nn:Module", "_call_impl", THERE, "may be replaced"),
    ),
    "continued": (
        Private(
            "transformers.masking_utils",
            "sdpa_mask",
            "(*, batch_size, q_length, kv_length, q_offset=0, kv_offset=0, attention_mask=None, local_size=None, "
            "use_vmap=False)",
            "by what it is asked for, its masks are recognised",
        ),
        Private(
            "transformers.integrations.sdpa_attention",
            "sdpa_attention_forward",
            "(module, query, key, value, attention_mask, dropout=0.0, scaling=None)",
            "for all other masks",
        ),
        Private(
            "transformers.masking_utils",
            "causal_mask_function",
            "(batch_idx, head_idx, q_idx, kv_idx)",
            "of a mask that hides nothing but later tokens",
        ),
        Private("torch:ops.aten", "_flash_attention_forward", THERE, "parts of a pass's attention"),
    ),
    "candidates": (
        Private(_GENERATION, "_validate_generation_mode", _VALIDATE, "all but its refusal of states"),
        Private(f"{_GENERATION}._validate_generation_mode", "_is_stateful", SET, "what it refuses"),
    ),
    "compressed": (
        # Called by compressors, on a layer of ours.
        *_each(_CSA, "store_compression_weights", "(self, name, kv, gate)", "tokens of a window"),
        *_each(_CSA, "update_compressor_states", "(self, name, compressed)", "a window's key"),
        *_each(
            _CSA, "update_overlap_state", "(self, name, chunk_kv, chunk_gate, head_dim)", "the window before"
        ),
        *_each(
            f"{_HCA}.__init__", "compress_rate buffer_kv buffer_gate compressed_kv entry_count", SET, "copied"
        ),
        *_each(f"{_CSA}.__init__", "overlap_kv overlap_gate", SET, "copied"),
        *_each(f"{_V4}:DeepseekV4HCACompressor", "forward", _COMPRESS, "what its keys are hidden by"),
        *_each(f"{_V4}:DeepseekV4CSACompressor", "forward", _COMPRESS, "called with a layer of ours"),
        *_each(f"{_V4}:DeepseekV4Indexer", "forward", _COMPRESS, "called with a layer of ours"),
    ),
    "blocks": (
        *_each(_BLOCKS, "update_index", "(self, idx_k)", "a step's keys of an index, to a layer of ours"),
        *_each(f"{_BLOCKS}.__init__", "idx_keys", SET, "copied"),
        *_each(f"{_STATIC_BLOCKS}.__init__", "idx_keys", SET, "copied"),
    ),
    "prompts": ()
    if not _has("unlimited_ocr")
    else (
        *_each(
            f"{_PROMPT}.__init__",
            "prefill_length prefill_cumulative_length prefill_keys prefill_values",
            SET,
            "copied, and asked for by the model's masks",
        ),
        Private(_LAYER, "_layer_type", THERE, "by what the model finds such layers"),
    ),
    "own_caches": (
        Private(OWN_CACHE, "get_linear_cache", "(self, layer_idx)", "a layer's state"),
        Private(OWN_CACHE, "set_linear_cache", "(self, layer_idx, linear_cache)", "a layer's state"),
    ),
    "pictures": (
        Private(
            f"{_VL}:Ernie4_5_VLMoeMoeBlock",
            "forward",
            "(self, hidden_states, moe_mm_token_type_ids=None)",
            "steps are of text alone",
        ),
    ),
    "loading": (
        # From names of a checkpoint to parameters, see key_map.py.
        Private(_NAMES, "get_model_conversion_mapping", "(model)", "a model's renamings and converters"),
        Private(_LOADER, "rename_source_key", _RENAME, "which parameter a tensor fills"),
        Private(_LOADER, "dot_natural_key", "(s)", "the order in which converters get tensors"),
        *_each(_LOADER, "WeightRenaming WeightTransform WeightConverter", THERE, "entries of the mapping"),
        *_each(
            f"{_LOADER}:WeightTransform.__init__", "source_patterns target_patterns", SET, "from what to what"
        ),
        Private(f"{_LOADER}:WeightConverter.__init__", "operations", SET, "by what; known by class name"),
        *_each(_LOADER, "MergeModulelist Concatenate", "(dim=0)", "what pieces of a parameter are"),
        *_each(f"{_LOADER}:MergeModulelist.__init__", "dim", SET, "where the experts lie"),
        *_each(f"{_LOADER}:Concatenate.__init__", "dim", SET, "where gate and up lie"),
        Private(f"{_LOADER}:WeightConverter", "add_tensor", _ADD, "conversions left to transformers"),
        Private(f"{_LOADER}:WeightConverter", "convert", _CONVERT, "conversions left to transformers"),
        Private(f"{_LOADER}:WeightTransform", "was_used", "(self)", "what save_pretrained undoes"),
        Private(
            f"{_LOADER}:revert_weight_conversion", "_weight_conversions", SET, "what save_pretrained undoes"
        ),
        # transformers' own loader for what is not swapped, see models.py.
        Private("transformers.modeling_utils", "LoadStateDictConfig", _LOAD_CONFIG, "what it is told"),
        Private(
            _MODEL, "_load_pretrained_model", "(model, state_dict, checkpoint_files, load_config)", "loads"
        ),
        Private(_MODEL, "_finalize_model_loading", "(model, load_config, loading_info)", "buffers, ties"),
        *_each(_INFO, "missing_keys unexpected_keys mismatched_keys conversion_errors", SET, "refused"),
        *_each(_MODEL, f"{_IGNORE}_missing {_IGNORE}_unexpected", THERE, "not refused"),
        Private(_MODEL, "_init_weights", "(self, module)", "buffers that no checkpoint has"),
        Private(f"{_MODEL}._initialize_weights", "_is_hf_initialized", SET, "not of operators"),
        *(
            Private(f"{_AUTO}{kind}", "_model_mapping", THERE, "which classes a config has")
            for kind in ("CausalLM", "MultimodalLM", "ImageTextToText")
        ),
        Private(
            _HOOKS, "register_module_module_registration_hook", "(hook)", "stops configs of too many modules"
        ),
    ),
    "from_pretrained": (
        Private(_MODEL, "_from_config", "(config, **kwargs)", "builds the class that was asked for"),
        Private(
            "transformers.integrations.peft:maybe_load_adapters",
            "_adapter_model_path",
            SET,
            "an adapter to load",
        ),
    ),
    "batching": (
        # A manager is made by transformers, and its class is then one of ours.
        Private(
            f"{_BATCHING}.continuous_api:ContinuousMixin",
            "init_continuous_batching",
            "(self, generation_config=None, continuous_batching_config=None, workload_hints=None)",
            "makes a manager",
        ),
        *_each(_MANAGER, "warmup _create_batch_processor _generation_step", "(self)", "attention of a step"),
        Private(_MANAGER, "switch_to_cb_friendly_attn", "(self, model)", "overridden: not for good"),
        *_each(
            f"{_MANAGER}._create_batch_processor",
            "get_text_config _use_prefix_sharing",
            SET,
            "the widths of a cache",
        ),
        Private(
            f"{_BATCHING}.continuous_api:ContinuousBatchProcessor",
            "_generation_step",
            "(self, model)",
            "a step",
        ),
        Private(
            f"{_BATCHING}.continuous_api:ContinuousBatchProcessor.__init__",
            "model_runner",
            SET,
            "graphs or not",
        ),
        Private(
            f"{_BATCHING}.model_runner:ModelRunner",
            "compute_batch",
            "(self, model, batch_data)",
            "a step's tokens",
        ),
        Private(
            f"{_BATCHING}.model_runner:ModelRunner",
            "_get_forward_fn",
            "(self, use_block_table)",
            "graphs or not",
        ),
        Private(
            f"{_BATCHING}.continuous_api:ContinuousMixin.destroy_cached_continuous_batching_manager",
            "_cached_continuous_batching_manager",
            SET,
            "changes nothing",
        ),
        Private(
            f"{_BATCHING}.model_runner:ModelRunner",
            "_sample",
            "(self, scores, output_ids)",
            "each request's way",
        ),
        *_each(
            f"{_BATCHING}.cb_logits_processors",
            "ContinuousBatchingLogitsProcessor ContinuousBatchingLogitsProcessorList "
            "ContinuousBatchingTemperatureLogitsWarper ContinuousBatchingTopKLogitsWarper "
            "ContinuousBatchingTopPLogitsWarper",
            THERE,
            "how a request chooses",
        ),
        *_each(
            f"{_BATCHING}.cb_logits_processors:ContinuousBatchingLogitsProcessorList.__init__",
            "logits_processor tensors_required do_processing",
            SET,
            "how a request chooses",
        ),
        Private(_GENERATION, "_get_logits_processor", "(self, generation_config)", "what a request asks for"),
        Private(_MANAGER, "_run_generation_loop", _IN_THREAD, "in a thread that ends with the process"),
        *_each(
            f"{_MANAGER}.__init__",
            "logit_processor output_router background_thread_status _generation_thread",
            SET,
            "who gets the tokens",
        ),
        Private(f"{_BATCHING}.continuous_api", "OutputRouter", "()", "who gets the tokens"),
        *_each(f"{_BATCHING}.continuous_api:OutputRouter", "deliver deliver_batch", THERE, "overridden"),
        Private(f"{_BATCHING}.cache", "PagedAttentionCache", THERE, "what attention takes for one"),
        Private(f"{_BATCHING}.cache:PagedAttentionCache", "update", THERE, "keys and values of all texts"),
        Private(
            f"{_BATCHING}.cache:PagedAttentionCache",
            "search_prefix_match",
            "(self, request_id, prompt_ids)",
            "how much of a request's text was read before",
        ),
        Private(f"{_BATCHING}.input_outputs", "PagedAttentionArgs", THERE, "how a model is called"),
        Private(f"{_BATCHING}.cache", "find_head_dim", "(config)", "whether a kernel has such heads"),
        Private(
            f"{_BATCHING}.input_outputs",
            "attn_mask_is_needed",
            "(config)",
            "the name of attention with masks",
        ),
    ),
    "templates": (
        # In a process of its own.
        Private(
            _TEMPLATES,
            "render_jinja_template",
            "(conversations, tools=None, *, chat_template=None, add_generation_prompt=False, **kwargs)",
            "renders",
        ),
        Private(_TEMPLATES, "_compile_jinja_template", "(chat_template)", "which variables a template has"),
    ),
    "serving": (
        # `transformers serve` is built whole, with a model and a manager of ours in it.
        Private(_SERVE, "start_server", "(self)", "not started by itself"),
        Private(
            f"{_SERVE}.__init__",
            "_model_manager",
            SET,
            "gets the model",
        ),
        *_each(
            f"{_SERVE}.__init__",
            "_generation_state _chat_handler _completion_handler _response_handler server",
            SET,
            "get checks and a manager",
        ),
        Private("transformers.cli.serve", "Serve", THERE, "the app"),
        Private(
            f"{_SERVING}.model_manager",
            "TimedModel",
            "(model, timeout_seconds, processor=None)",
            "keeps the model",
        ),
        *_each(
            f"{_SERVING}.model_manager:ModelManager.__init__", "loaded_models force_model", SET, "one model"
        ),
        Private(f"{_SERVING}.model_manager:ModelManager", "process_model_name", "(model_id)", "its name"),
        Private(f"{_SERVING}.model_manager:ModelManager", _MODELS, THERE, "the list of models"),
        Private(f"{_SERVING}.utils:GenerationState", "get_manager", "(self, model_id, use_cb=False)", "ours"),
        Private(
            f"{_SERVING}.utils", "get_response_template", "(processor, model)", "finds the answer's parts"
        ),
        *_each(f"{_SERVING}.utils", "ToolCall ReasoningText", THERE, "parts of an answer"),
        Private(f"{_SERVING}.utils", "_StreamError", "(msg)", "ends a stream"),
        Private(f"{_SERVING}.utils", "response_events_to_chunks", "(events)", "parts of an answer"),
        Private(
            f"{_SERVING}.utils",
            "build_response_parser",
            "(processor, model, input_ids)",
            "parts of an answer",
        ),
        *_each(
            f"{_SERVING}.utils:parse_assistant_message",
            "parse_response",
            SET,
            "gives the message that the parts of an answer are",
        ),
        Private(
            f"{_SERVING}.utils:GenerateManager",
            "generate_streaming",
            "(self, model, processor, inputs, gen_config, request_id, response_parser=None)",
            "what handlers ask a manager for",
        ),
        Private(
            f"{_SERVING}.utils:GenerateManager",
            "generate_non_streaming",
            "(self, model, processor, inputs, gen_config, request_id)",
            "what handlers ask a manager for",
        ),
        Private(f"{_SERVING}.utils:BaseHandler.__init__", "generation_state", SET, "one of each request"),
        *_each(_CHAT, "handle_request", "(self, body, request_id)", "reads its prompt in another thread"),
        *_each(_CHAT, "_streaming _non_streaming", THERE, "called once the prompt is read"),
        *_each(_COMPLETION, "handle_request", "(self, body, request_id)", "the same"),
        *_each(_COMPLETION, "_streaming _non_streaming", THERE, "the same"),
        *_each(_RESPONSE, "handle_request", "(self, body, request_id)", "the same"),
        *_each(_RESPONSE, "_streaming _non_streaming", THERE, "the same"),
        Private(
            _CHAT, "_build_chunk_sse", "(self, request_id, *, finish_reason=None, usage=None)", "overridden"
        ),
        Private(
            _COMPLETION,
            "_build_chunk_sse",
            "(self, request_id, model_id, *, text='', usage=None)",
            "overridden",
        ),
        Private(f"{_SERVING}.utils:BaseHandler", "_validate_request", "(self, body)", "checks first"),
        Private(
            f"{_SERVING}.utils:BaseHandler",
            "_build_generation_config",
            "(self, body, model_generation_config, use_cb=False)",
            "within limits",
        ),
    ),
    "swapping": (
        Private(_MODEL, "_get_dtype_plan", "(self, dtype)", "parameters that stay fp32"),
        Private(_MODEL, "_keep_in_fp32_modules_strict", THERE, "those of a router need not"),
        Private(_MODEL, "_tied_weights_keys", THERE, "swapped parameters are untied"),
        Private(f"{_MODEL}.post_init", "all_tied_weights_keys", SET, "parameters that share their values"),
        Private(_MODEL, "_hf_peft_config_loaded", THERE, "save_pretrained writes adapters alone"),
        *_each(
            f"{_MODULE}.__init__", "_parameters _buffers _modules _non_persistent_buffers_set", SET, "twins"
        ),
        *_each(f"{_MODULE}.__init__", "_forward_hooks _forward_pre_hooks", SET, "twins"),
        *_each(f"{_MODULE}.__init__", "_backward_hooks _backward_pre_hooks", SET, "twins"),
        Private(
            "torch:Tensor",
            "_make_wrapper_subclass",
            THERE,
            "a weight that is packed again when it is written",
        ),
        Private("torch._C", "DisableTorchFunctionSubclass", THERE, "the same"),
    ),
    "kimi_k2": (
        Private(_NAMES, "get_checkpoint_conversion_mapping", "(model_type)", "DeepSeek-V3's names"),
        Private(_NAMES, "register_checkpoint_conversion_mapping", _REGISTER, "which are Kimi-K2's, too"),
        Private(_MODEL, "_can_set_experts_implementation", "()", "it would read the class's source"),
    ),
    "probes": (
        Private(f"{_MOE}:batched_mm_experts_forward", "_apply_gate", SET, "must gate as the forward does"),
    ),
    "building": (
        Private(
            "transformers.modeling_utils",
            "local_torch_dtype",
            "(dtype, model_class_name=None)",
            "one model is built at a time",
        ),
    ),
    "ending": (Private(_MODULE, "_wrapped_call_impl", THERE, "a frame of it is a forward"),),
}


@functools.cache
def support(feature: str) -> Support:
    """Whether this version of transformers and torch has what a feature needs, as it is needed."""
    return _support_of(PRIVATE[feature])


def expected_support(feature: str) -> Support:
    """`support`, but without importing transformers' models, which takes seconds, if the version is a tested one.

    What tests have shown of that version is taken as true. What it needs of torch is looked at.
    """
    if "transformers.modeling_utils" in sys.modules or metadata.version("transformers") not in TESTED:
        return support(feature)
    return _support_of(private for private in PRIVATE[feature] if private.owner.startswith("torch"))


def _support_of(needed: Iterable[Private]) -> Support:
    faults = [fault for private in needed if (fault := private.fault())]
    if not faults:
        return SUPPORTED
    versions = " and ".join(
        f"{name} {importlib.import_module(name).__version__}" for name in ("transformers", "torch")
    )
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    return Support.no(f"in {versions}, {faults[0]}{more}")


def require(*features: str) -> None:
    """Raises PlanError for the first feature that cannot be had."""
    for feature in features:
        if not (found := support(feature)):
            raise PlanError(
                f"{feature.replace('_', ' ')}: {found.reason}. Supported is {VERSIONS}, tested with "
                f"{' and '.join(TESTED)}. Install one of those: pip install 'transformers=={TESTED[-1]}'."
            )


def __getattr__(name: str) -> Any:
    """What a module of the list has under a name, here without a leading underscore."""
    for private in itertools.chain(*PRIVATE.values()):
        if ":" not in private.owner and private.name.lstrip("_") == name:
            found = globals()[name] = getattr(importlib.import_module(private.owner), private.name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
