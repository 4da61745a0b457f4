"""Imports llm-foundry's YAML, whose runs Composer trains with FSDP, and that of Composer's
benchmarks of BERT.

Values may stand under ``variables``, and refer to one another. A model is an MPT
(``mpt_causal_lm``) with sizes in the file, a checkpoint of Hugging Face, or a BERT (``hf_bert``,
``mosaic_bert``). Left-out keys take the defaults of llmfoundry/models/mpt/configuration_mpt.py and
llmfoundry/utils/config_utils.py (0.22).
"""

from collections.abc import Mapping
from typing import Any

from mistlab.core.files import parse_yaml
from mistlab.core.values import reject
from mistlab.engines.engine import Precision
from mistlab.export.accelerate import STRATEGIES, strategy_of
from mistlab.export.found import Found, Section, harmless_names
from mistlab.export.given import Given, Imported
from mistlab.export.nearest import ENGINES, STATES
from mistlab.formats.checkpoints import needed_model
from mistlab.formats.content import settings_of
from mistlab.formats.hf_adapters import read_adapters
from mistlab.formats.launched import (
    assignments,
    command_of,
    named_text,
    resolved,
    take_ranks,
    with_dotted,
)
from mistlab.plan.workload import ROTARY_BASE, ModelSpec
from mistlab.shell.session import LaunchFile

HARMLESS = harmless_names("llm_foundry")
_PRECISIONS: Mapping[str, Precision] = {
    "amp_bf16": "bf16",
    "bf16": "bf16",
    "amp_fp16": "fp16",
    "fp32": "fp32",
    "amp_fp8": "fp8",
}
_KEYS = {
    *("device_train_microbatch_size", "device_train_batch_size", "global_train_batch_size"),
    *("max_duration", "device_train_grad_accum"),
}
# A file with a data loader and one of these keys is llm-foundry's, even if it states no batch
# sizes.
_OTHER_KEYS = {*_KEYS, "max_seq_len", "fsdp_config", "eval_first", "eval_interval", "algorithms"}


def recognises(source: LaunchFile) -> bool:
    """Whether a file has a model and Composer's batch sizes or data loader, or is a script that
    starts Composer.
    """
    settings = _inner(settings_of(source))
    if isinstance(settings.get("model"), Mapping) and "base_model" not in settings:
        is_loaded = "train_loader" in settings and bool(_OTHER_KEYS & settings.keys())
        return len(_KEYS & settings.keys()) > 1 or is_loaded
    return _file(source) is not None


def _inner(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a run, which a job file for MosaicML's clusters has in a section of
    its own.
    """
    parameters = settings.get("parameters")
    return parameters if isinstance(parameters, Mapping) and "compute" in settings else settings


def _file(source: LaunchFile) -> str | None:
    command = command_of(source)
    if command is None:
        return None
    started = {word.text.rpartition("/")[2] for word in command.launch.started}
    if command.launch.launcher != "composer" and "composer" not in started:
        return None
    words = (word.text for word in command.launch.arguments)
    return next((text for text in words if text.endswith((".yaml", ".yml"))), None)


def read(source: LaunchFile, given: Given) -> Imported:
    """Import an llm-foundry configuration, or the one that a script names with the script's
    overrides, as a job.
    """
    draft = Found()
    path, command = _file(source), command_of(source)
    settings = settings_of(source)
    _of_cluster(settings, draft)
    settings = _inner(settings)
    if path is not None and command is not None:
        text = named_text(path, command, source, "configures llm-foundry's run")
        settings = with_dotted(parse_yaml(text, path), dict(assignments(command)))
        take_ranks(command, source, draft, given)
    plain = resolved({**_variables(settings), **settings}, source.settings)
    top = Section(plain, "", draft)
    _adapters(top.section("model"), draft)
    model = draft.settled_model(given, lambda: _model(top.section("model"), source, draft))
    draft.sequence_length = top.whole("max_seq_len") or top.section("model").whole("max_seq_len")
    _precision(top, draft)
    _sharding(top.section("fsdp_config"), draft, given, model)
    _tensor(top.section("tp_config"), draft)
    _optimizer(top.section("optimizer"), draft)
    _loader(top.section("train_loader"), draft)
    _batch(top, draft, given)
    compiled = top.get("compile_config") is not None
    for key in ("model", "fsdp_config"):
        top.section(key)
    top.tell_of_rest(HARMLESS)
    return draft.job(given, ("fsdp-compiled", *ENGINES) if compiled else ENGINES)


def _variables(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``variables``; older files refer to its entries without naming the
    section.
    """
    variables = settings.get("variables")
    return dict(variables) if isinstance(variables, Mapping) else {}


def _of_cluster(settings: Mapping[str, Any], draft: Found) -> None:
    """Read how many GPUs a job for MosaicML's clusters requests."""
    compute = settings.get("compute")
    gpus = compute.get("gpus") if isinstance(compute, Mapping) else settings.get("gpu_num")
    if isinstance(gpus, int) and not isinstance(gpus, bool) and gpus > 0:
        nodes = -(-gpus // 8)
        if gpus % nodes == 0:
            draft.nodes, draft.gpus_per_node = nodes, gpus // nodes


def _adapters(section: Section, draft: Found) -> None:
    """Read the settings of PEFT that a model of Hugging Face trains adapters by."""
    peft = section.section("peft_config")
    if not peft.content:
        return
    kind = peft.text("peft_type", "LORA")
    if kind.upper() != "LORA":
        reject(f"{peft.path('peft_type')}: {kind} is not supported: give LORA")
    names = [f"{name}_proj" if name in _JOINT else name for name in peft.words("target_modules")]
    settings = {"lora_r": peft.get("r", 8), "target_modules": names or None}
    read_adapters(Section(settings, peft.name, draft), draft)
    peft.take_all()


# Products of queries, keys and values in one, as MPT and DBRX have them.
_JOINT = ("Wqkv", "query_key_value", "qkv")
# Changes of a checkpoint's configuration that leave its sizes as they are.
_POSITIONS = {"max_seq_len", "n_positions", "max_position_embeddings", "attn_config"}


def _model(section: Section, source: LaunchFile, draft: Found) -> ModelSpec:
    kind = section.text("name", "mpt_causal_lm")
    if kind in ("hf_bert", "mosaic_bert"):
        return _bert(section, source, draft, is_mosaic=kind == "mosaic_bert")
    if kind in ("hf_causal_lm", "hf_prefix_lm"):
        path = section.text("pretrained_model_name_or_path")
        changes = section.section("config_overrides")
        if changes.content.keys() - _POSITIONS:
            text = "the model is predicted as in the checkpoint's config.json"
            draft.remark("ignored", section.path("config_overrides"), text)
        if changes.section("attn_config").text("attn_impl") == "torch":
            draft.attention = "math"
        changes.section("attn_config").take_all()
        changes.take_all()
        if section.switch("use_flash_attention_2") or section.get("attention_patch_type"):
            draft.attention = "flash"
        return needed_model(path, section.path("pretrained_model_name_or_path"), source)
    if kind != "mpt_causal_lm":
        reject(
            f"model.name: {kind} is not supported: give mpt_causal_lm, hf_causal_lm or hf_bert, or "
            "the model by --model"
        )
    return _mpt(section, draft)


# Names of sizes in BERT's configuration, each with the field that it sets.
_OF_BERT: Mapping[str, str] = {
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn",
    "hidden_dropout_prob": "dropout",
}


def _bert(section: Section, source: LaunchFile, draft: Found, *, is_mosaic: bool) -> ModelSpec:
    """Return the BERT that a run trains on masked tokens: the named one with the changes of its
    ``model_config``, and a vocabulary padded to a multiple of 8.
    """
    if section.has("num_labels"):
        reject(
            f"{section.path('num_labels')}: trains a classifier, which is not supported: give a "
            "run that trains on masked tokens"
        )
    key, config = "pretrained_model_name", section.section("model_config")
    path = section.text(key) or "bert-base-uncased"
    model = needed_model(path, section.path(key), source)
    changes = {name: config.get(key) for key, name in _OF_BERT.items() if config.has(key)}
    vocab = config.whole("vocab_size") or model.vocab
    config.take_all()
    fields = {name: getattr(model, name) for name in _OF_BERT.values()} | changes
    draft.attention = "flash" if is_mosaic else "math"
    if is_mosaic:
        fields["ffn"] += fields["ffn"] // 2
        text = (
            "gated networks are predicted as ones without gates of half as much again, which have "
            "as many weights; ALiBi as learned positions; padding as computed"
        )
        draft.remark("ignored", section.path("name"), f"mosaic_bert: {text}")
    if section.switch("gradient_checkpointing"):
        draft.values["checkpointed_layers"] = fields["layers"]
    text = "an encoder: predicted as trained on masked tokens, with logits of all tokens"
    draft.remark("assumed", "model.family", text)
    section.get("use_pretrained")
    return ModelSpec.of(family="bert", vocab=-(-vocab // 8) * 8, context=model.context, **fields)


def _mpt(section: Section, draft: Found) -> ModelSpec:
    attention, network = section.section("attn_config"), section.section("ffn_config")
    hidden, heads = section.whole("d_model") or 2048, section.whole("n_heads") or 16
    kind = network.text("ffn_type", "mptmlp")
    if kind not in ("mptmlp", "mptglu", "te_ln_mlp"):
        reject(f"model.ffn_config.ffn_type: {kind} is not supported: give --model")
    ratio = section.number("expansion_ratio", 4, maximum=1000)
    width = network.whole("ffn_hidden_size") or int(ratio * hidden)
    draft.attention = "math" if attention.text("attn_impl", "flash") == "torch" else "flash"
    position = _position(section, attention, draft)
    window = attention.get("sliding_window_size")
    if window not in (None, -1):
        text = "attention is predicted over the whole sequence"
        draft.remark("ignored", attention.path("sliding_window_size"), text)
    section.unsaid(
        {
            "block_overrides": "all blocks are predicted alike",
            "final_logit_softcapping": "logits are predicted without soft-capping",
        }
    )
    norm = section.text("norm_type", "low_precision_layernorm")
    gated = kind == "mptglu"
    return ModelSpec.of(
        family="llama" if gated and position == "rotary" else "gpt",
        hidden=hidden,
        heads=heads,
        layers=section.whole("n_layers") or 24,
        kv_heads=_groups(attention, heads),
        ffn=width,
        mlp_type="gated_mlp" if gated else "mlp",
        activation="silu" if gated else "gelu_tanh",
        norm="rmsnorm" if "rms" in norm else "layernorm",
        position_embedding=position,
        rotary_base=attention.number("rope_theta", ROTARY_BASE, maximum=1e12)
        if position == "rotary"
        else ROTARY_BASE,
        qk_norm=attention.switch("qk_ln") or attention.switch("qk_gn"),
        vocab=section.whole("vocab_size") or 50368,
        tied_embeddings=section.switch("tie_word_embeddings", default=True),
        biases=not section.switch("no_bias"),
        dropout=section.number("resid_pdrop", 0.0),
    )


def _groups(attention: Section, heads: int) -> int:
    kind = attention.text("attn_type", "multihead_attention")
    groups = attention.whole("kv_n_heads")
    return {"multihead_attention": heads, "multiquery_attention": 1}.get(kind, groups or heads)


def _position(section: Section, attention: Section, draft: Found) -> str:
    if attention.switch("rope"):
        return "rotary"
    if attention.switch("alibi"):
        draft.remark("ignored", attention.path("alibi"), "predicted without position biases")
        return "none"
    learned = section.switch("learned_pos_emb", default=True)
    return "absolute" if learned else "none"


def _precision(top: Section, draft: Found) -> None:
    word = top.text("precision", "amp_bf16").lower()
    if word not in _PRECISIONS:
        reject(f"precision: {word!r} is unknown: give one of {', '.join(_PRECISIONS)}")
    draft.precision = _PRECISIONS[word]


def _sharding(section: Section, draft: Found, given: Given, model: ModelSpec) -> None:
    """Read how FSDP shards the model; without a section for FSDP, replicas all-reduce whole
    gradients.
    """
    if not section.content:
        draft.values["zero"] = 0
        return
    where = section.path("sharding_strategy")
    name = strategy_of(section.text("sharding_strategy", "FULL_SHARD"), where)
    draft.values["zero"] = STRATEGIES[name]
    nodes = given.nodes or draft.nodes or 1
    replicas = section.whole("data_parallel_replicate_degree")
    section.get("data_parallel_shard_degree")
    if replicas and replicas > 1:
        draft.values["state_replicas"] = replicas
    elif name.startswith("HYBRID") and nodes > 1:
        draft.values["state_replicas"] = nodes
    if section.switch("activation_checkpointing"):
        draft.values["checkpointed_layers"] = model.layers
    if section.switch("activation_cpu_offload"):
        draft.values["offload_activations"] = 1.0
    if section.switch("cpu_offload"):
        draft.values |= dict.fromkeys(STATES, 1.0)
    if section.text("mixed_precision").upper() == "FULL":
        text = "FULL: gradients and gathered weights are predicted in the precision of GEMMs"
        draft.remark("ignored", section.path("mixed_precision"), text)


def _tensor(section: Section, draft: Found) -> None:
    degree = section.whole("tensor_parallel_degree") or 1
    draft.values["tensor_parallel"] = degree
    section.get("strategy")
    replicas = section.whole("tensor_parallel_replicate_degree") or 1
    if replicas > 1:
        draft.values["state_replicas"] = replicas


def _optimizer(section: Section, draft: Found) -> None:
    name = section.text("name", "decoupled_adamw")
    if "adam" not in name:
        draft.remark("ignored", "optimizer.name", f"{name} is predicted as AdamW")
    if "8bit" in name:
        draft.optimizer = "adamw-8bit"


def _loader(section: Section, draft: Found) -> None:
    """Add a remark if fine-tuning data are not packed, so that sequences are padded although all
    are assumed to be full.
    """
    dataset = section.get("dataset")
    packs = isinstance(dataset, Mapping) and dataset.get("packing_ratio")
    if section.text("name") == "finetuning" and not packs:
        text = "all are predicted at full length, but without packing_ratio short ones are padded"
        draft.remark("assumed", "sequences", text)
    section.take_all()


def _batch(top: Section, draft: Found, given: Given) -> None:
    draft.global_batch = top.whole("global_train_batch_size")
    device = top.whole("device_train_batch_size")
    accumulated = top.get("device_train_grad_accum")
    if top.get("device_train_microbatch_size") is not None:
        draft.micro_batch = top.whole("device_train_microbatch_size")
    ranks = (given.nodes or draft.nodes or 1) * (given.gpus_per_node or draft.gpus_per_node or 0)
    if draft.micro_batch is None and isinstance(accumulated, int) and ranks and draft.global_batch:
        draft.micro_batch = max(draft.global_batch // ranks // accumulated, 1)
    if draft.global_batch is None and device:
        draft.micro_batches = max(device // (draft.micro_batch or device), 1)
    _cap(draft, given, ranks)


def _cap(draft: Found, given: Given, ranks: int) -> None:
    """Limit the micro-batch size to a GPU's share of the batch, as Composer does."""
    micro_batch = given.micro_batch or draft.micro_batch
    if draft.global_batch and ranks and micro_batch and draft.micro_batch:
        share = draft.global_batch // (ranks // draft.values.get("tensor_parallel", 1))
        if share and draft.micro_batch > share:
            text = (
                f"{draft.micro_batch} is more than the {share} sequences of the global batch that "
                f"each device gets: predicted with {share}"
            )
            draft.remark("contradicting", "device_train_microbatch_size", text)
            draft.micro_batch = share
