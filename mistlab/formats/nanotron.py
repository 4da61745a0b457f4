"""Imports nanotron's YAML, which holds model, parallel degrees and batch.

Left-out keys take the defaults of nanotron/config/*.py (2025-08): passes in the order all forward,
all backward; tensor parallelism without dividing sequences; a Llama of 7 billion parameters.
"""

from collections.abc import Mapping

from mistlab.core.files import parse_yaml
from mistlab.core.values import reject
from mistlab.engines.engine import Precision
from mistlab.export.found import Found, Section, harmless_names
from mistlab.export.given import Given, Imported, ask_for
from mistlab.formats.content import settings_of
from mistlab.formats.launched import command_of, named_text, take_ranks
from mistlab.plan.workload import ModelSpec
from mistlab.shell.session import LaunchFile

ENGINES = ("nanotron", "mistlab")
HARMLESS = harmless_names("nanotron")
_UNSAID_MODEL: Mapping[str, str] = {
    "no_rope_layer": "all blocks are predicted with rotary embedding",
    "flex_attention_mask": "attention is predicted as causal over whole sequences",
    "_use_doc_masking": "attention is predicted over whole sequences",
}
_FLASH = (
    *("flash_attention_2", "flex_attention", "sdpa", "ring_flash_triton"),
    *("llama3_ring_attention",),
)
_ORDERS = {"1f1b": "1f1b", "afab": "gpipe"}
_DTYPES: Mapping[str, Precision] = {
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "float32": "fp32",
    "fp32": "fp32",
}
_CONFIGS = ("is_llama_config", "is_qwen2_config", "is_mistral_config")
_OTHER_CONFIGS = {
    "is_starcoder2_config": "StarCoder 2",
    "is_mamba_config": "Mamba",
    "is_llamoe_config": "LlaMoE",
    "is_gpt2_config": "GPT-2",
}


def recognises(source: LaunchFile) -> bool:
    """Whether a file has nanotron's sections, or is a script that starts nanotron with a
    configuration.
    """
    settings = settings_of(source)
    parallelism, model = settings.get("parallelism"), settings.get("model")
    if isinstance(parallelism, Mapping) and isinstance(model, Mapping):
        return {"dp", "tp", "pp"} <= parallelism.keys()
    return _file(source) is not None


def _file(source: LaunchFile) -> str | None:
    command = command_of(source)
    if command is None or not command.launch.program.endswith("run_train.py"):
        return None
    return command.text("config_file")


def read(source: LaunchFile, given: Given) -> Imported:
    """Import a nanotron configuration, or the one that a script names, as a job."""
    draft = Found()
    path, settings = _file(source), settings_of(source)
    command = command_of(source)
    if path is not None and command is not None:
        settings = parse_yaml(named_text(path, command, source, "configures nanotron's run"), path)
    top = Section(settings, "", draft)
    section = top.section("model")
    _precision(section, draft)
    model = draft.settled_model(given, lambda: _model(section, draft))
    if given.model is not None:
        section.take_all()
    _mesh(top.section("parallelism"), draft, given, model)
    if command is not None and path is not None:
        _check_ranks(draft, command_ranks(source, given))
    tokens = top.section("tokens")
    draft.sequence_length = tokens.whole("sequence_length")
    draft.micro_batch = tokens.whole("micro_batch_size")
    draft.micro_batches = tokens.whole("batch_accumulation_per_replica")
    _optimizer(top.section("optimizer"), draft)
    top.tell_of_rest(HARMLESS)
    return draft.job(given, ENGINES)


def command_ranks(source: LaunchFile, given: Given) -> Found:
    """Return how many ranks the launcher in a script starts."""
    ranks = Found()
    command = command_of(source)
    if command is not None:
        take_ranks(command, source, ranks, given)
    return ranks


def _check_ranks(draft: Found, launched: Found) -> None:
    draft.nodes, draft.gpus_per_node = launched.nodes, launched.gpus_per_node
    if draft.nodes and draft.gpus_per_node and draft.data_parallel:
        ranks, needed = (
            draft.nodes * draft.gpus_per_node,
            draft.data_parallel * draft.ranks_of_replica,
        )
        if ranks != needed:
            reject(
                f"parallelism: dp x pp x tp x cp is {needed}, but the script starts {ranks} "
                f"processes: give degrees whose product is {ranks}, or start {needed} processes"
            )


def _precision(section: Section, draft: Found) -> None:
    dtype = section.text("dtype", "bfloat16")
    if dtype not in _DTYPES:
        reject(f"model.dtype: {dtype!r} is unknown: give bfloat16, float16 or float32")
    draft.precision = _DTYPES[dtype]


def _model(section: Section, draft: Found) -> ModelSpec:
    config = section.section("model_config")
    if "hidden_size" not in config.content:
        text = "model.model_config.hidden_size: is missing: add it, or give the model by --model"
        ask_for("model", text)
    if kind := next((name for key, name in _OTHER_CONFIGS.items() if config.get(key)), ""):
        reject(f"model.model_config: {kind} of nanotron is not supported: give --model")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        reject(
            f"model.model_config.hidden_act: {activation} is not supported, only silu is: give "
            "--model"
        )
    if config.get("moe_config"):
        reject("model.model_config.moe_config: experts are not supported: give --model")
    for key in _CONFIGS:
        config.get(key)
    heads = config.whole("num_attention_heads") or 32
    window = config.whole("sliding_window_size")
    config.unsaid(_UNSAID_MODEL)
    if window:
        text = "attention is predicted over the whole sequence"
        draft.remark("ignored", config.path("sliding_window_size"), text)
    kind = config.text("_attn_implementation", "flash_attention_2")
    draft.attention = "flash" if kind in _FLASH else "math"
    vocab = config.whole("vocab_size") or 32000
    multiple = section.whole("make_vocab_size_divisible_by") or 1
    return ModelSpec.of(
        family="llama",
        hidden=config.whole("hidden_size") or 4096,
        layers=config.whole("num_hidden_layers") or 32,
        heads=heads,
        kv_heads=config.whole("num_key_value_heads") or heads,
        ffn=config.whole("intermediate_size") or 11008,
        vocab=-(-vocab // multiple) * multiple,
        rotary_base=config.number("rope_theta", 10000.0, maximum=1e12),
        tied_embeddings=config.switch("tie_word_embeddings"),
        biases=config.switch("attention_bias"),
    )


def _mesh(section: Section, draft: Found, given: Given, model: ModelSpec) -> None:
    draft.data_parallel = section.whole("dp")
    tensor = section.whole("tp") or 1
    draft.num_stages = section.whole("pp") or 1
    draft.values["tensor_parallel"] = tensor
    draft.values["context_parallel"] = section.whole("context_parallel_size") or 1
    experts = section.whole("expert_parallel_size") or 1
    if experts > 1:
        if model.experts is None:
            reject(
                f"parallelism.expert_parallel_size: {experts}, but the model has no experts: give "
                "1, or a --model with experts"
            )
        draft.values["expert_parallel"] = experts
    divides = section.choice("tp_mode", ("all_reduce", "reduce_scatter"), "all_reduce")
    draft.values["sequence_parallel"] = int(divides == "reduce_scatter" and tensor > 1)
    word = section.choice("pp_engine", tuple(_ORDERS), "afab")
    if draft.num_stages > 1:
        draft.order = _ORDERS[word]
    if section.switch("recompute_layer"):
        draft.values["checkpointed_layers"] = model.layers
    section.unsaid(
        {"tp_linear_async_communication": "tensor communication is predicted as in engine nanotron"}
        if tensor > 1
        else {}
    )
    section.get("tp_linear_async_communication")


def _optimizer(section: Section, draft: Found) -> None:
    level = section.whole("zero_stage", minimum=0) or 0
    if level > 1:
        reject(f"optimizer.zero_stage: {level} is unknown to nanotron: give 0 or 1")
    draft.values["zero"] = level
    if not section.switch("accumulate_grad_in_fp32", default=True):
        text = "gradients are predicted as accumulated in 32 bits"
        draft.remark("ignored", "optimizer.accumulate_grad_in_fp32", text)
    kind = section.section("optimizer_factory").text("name", "adamW")
    if kind.lower() != "adamw":
        draft.remark("ignored", "optimizer.optimizer_factory.name", f"{kind} is predicted as AdamW")
