"""Parts of models of today as fields of Megatron-core's configurations, from Megatron-LM's options.

Fields of options that are not given keep the configuration's defaults.
"""

from collections.abc import Mapping
from typing import Any

from mistlab.export.megatron_flags import Options
from mistlab.export.megatron_parts import pattern_of

_WHOLE: Mapping[str, str] = {
    "--num-experts": "num_moe_experts",
    "--moe-router-topk": "moe_router_topk",
    "--moe-ffn-hidden-size": "moe_ffn_hidden_size",
    "--moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size",
    "--moe-latent-size": "moe_latent_size",
    "--expert-model-parallel-size": "expert_model_parallel_size",
    "--expert-tensor-parallel-size": "expert_tensor_parallel_size",
    "--window-attn-skip-freq": "window_attn_skip_freq",
    "--mtp-num-layers": "mtp_num_layers",
    "--mamba-num-heads": "mamba_num_heads",
    "--mamba-head-dim": "mamba_head_dim",
    "--mamba-num-groups": "mamba_num_groups",
    "--mamba-state-dim": "mamba_state_dim",
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
}
_TEXT: Mapping[str, str] = {
    "--moe-token-dispatcher-type": "moe_token_dispatcher_type",
    "--moe-router-load-balancing-type": "moe_router_load_balancing_type",
    "--softmax-type": "softmax_type",
    "--fp8-format": "fp8",
    "--fp8-recipe": "fp8_recipe",
    "--fp4-format": "fp4",
    "--fp4-recipe": "fp4_recipe",
}
_SWITCHES: Mapping[str, str] = {
    "--moe-grouped-gemm": "moe_grouped_gemm",
    "--moe-router-pre-softmax": "moe_router_pre_softmax",
    "--moe-pad-expert-input-to-capacity": "moe_pad_expert_input_to_capacity",
    "--qk-layernorm": "qk_layernorm",
    "--is-hybrid-model": "is_hybrid_model",
}
_NUMBERS: Mapping[str, str] = {
    "--moe-aux-loss-coeff": "moe_aux_loss_coeff",
    "--moe-expert-capacity-factor": "moe_expert_capacity_factor",
}
_LATENT: Mapping[str, str] = {
    "--q-lora-rank": "q_lora_rank",
    "--kv-lora-rank": "kv_lora_rank",
    "--qk-head-dim": "qk_head_dim",
    "--qk-pos-emb-head-dim": "qk_pos_emb_head_dim",
    "--v-head-dim": "v_head_dim",
}


def parts_of(options: Options) -> dict[str, Any]:
    """The fields that options of experts, windows, later tokens and few bits set."""
    found: dict[str, Any] = {name: options.has(option) for option, name in _SWITCHES.items()}
    for table, read in ((_WHOLE, options.whole), (_TEXT, options.text)):
        found |= {name: read(option) for option, name in table.items() if option in options.words}
    for option, name in _NUMBERS.items():
        if option in options.words:
            found[name] = options.number(option, 0.0)
    if (pattern := options.text("--moe-layer-freq")) is not None:
        found["moe_layer_freq"] = pattern_of(pattern)
    if (window := options.text("--window-size")) is not None:
        found["window_size"] = tuple(int(side) for side in window.split(","))
    return found


def latent_of(options: Options) -> dict[str, Any]:
    """The fields of latent attention; none for attention without it."""
    if not options.has("--multi-latent-attention"):
        return {}
    return {"multi_latent_attention": True} | {
        name: options.whole(option) for option, name in _LATENT.items() if option in options.words
    }
