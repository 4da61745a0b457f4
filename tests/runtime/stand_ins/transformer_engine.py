"""Stands in for Transformer Engine 2.11 on CPUs: the same arguments, plain torch behind them.

Signatures are those of the wheel ``transformer_engine==2.11.0``, so a caller that gives an argument
which it does not have fails here as it would on a GPU. Arguments that only choose kernels, buffers
and overlap are taken and change nothing. Found where ``tests/runtime/stand_ins`` is on the path.
"""

import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

__version__ = "2.11.0"
__path__: list[str] = []


class Linear(nn.Module):
    """A product, split over tensor-parallel ranks by rows or columns as ``parallel_mode`` says."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        ranks = tp_size if parallel_mode in ("row", "column") else 1
        self.parallel_mode, self.return_bias = parallel_mode, return_bias
        self.sequence_parallel, self.ranks = sequence_parallel and ranks > 1, ranks
        if parallel_mode == "row":
            in_features //= ranks
        elif parallel_mode == "column":
            out_features //= ranks
        made = {"device": "cpu", "dtype": params_dtype}
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, **made))
        # As in Transformer Engine, a product without a bias has an empty one.
        self.bias = nn.Parameter(torch.zeros(out_features, **made)) if bias else Tensor()

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        return self._product(inp)

    def _product(self, x: Tensor) -> Any:
        from megatron.core import tensor_parallel as ranks  # noqa: PLC0415 (imports this module)

        is_split = self.ranks > 1
        if is_split and self.parallel_mode == "column":
            x = (
                ranks.gather_from_sequence_parallel_region(x)
                if self.sequence_parallel
                else ranks.copy_to_tensor_model_parallel_region(x)
            )
        y = x @ self.weight.t()
        if is_split and self.parallel_mode == "row":
            y = (
                ranks.reduce_scatter_to_sequence_parallel_region(y)
                if self.sequence_parallel
                else ranks.reduce_from_tensor_model_parallel_region(y)
            )
        if self.return_bias:
            return y, self.bias
        return y + self.bias if self.bias.numel() else y


class LayerNormLinear(Linear):
    """A norm, then a product split over tensor-parallel ranks by columns."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            sequence_parallel=sequence_parallel,
            tp_size=tp_size,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
        )
        norm = _norm_of(normalization)(
            in_features, eps, sequence_parallel=sequence_parallel, params_dtype=params_dtype
        )
        self.layer_norm_weight = norm.weight
        self.layer_norm_bias = getattr(norm, "bias", None)
        self.eps, self.normalization = eps, normalization

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        shape, weight = inp.shape[-1:], self.layer_norm_weight
        if self.normalization == "RMSNorm":
            return self._product(F.rms_norm(inp, shape, weight, self.eps))
        return self._product(F.layer_norm(inp, shape, weight, self.layer_norm_bias, self.eps))


class LayerNorm(nn.LayerNorm):
    """A layer norm by Transformer Engine's arguments."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        width = normalized_shape if hidden_size is None else hidden_size
        super().__init__(width or 0, eps, device="cpu", dtype=params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(nn.RMSNorm):
    """A norm by root mean square by Transformer Engine's arguments."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        width = normalized_shape if hidden_size is None else hidden_size
        super().__init__(width or 0, eps, device="cpu", dtype=params_dtype)
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


def _norm_of(name: str) -> Any:
    return RMSNorm if name == "RMSNorm" else LayerNorm


class DotProductAttention(nn.Module):
    """Causal attention, (tokens, batch, heads, channels); heads may share keys and values."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Any = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        super().__init__()
        if attention_dropout or attn_mask_type != "causal" or qkv_format != "sbhd":
            message = "the stand-in has causal attention without dropout alone"
            raise NotImplementedError(message)
        self.scale = softmax_scale

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
        cu_seqlens_q_padded: Any = None,
        cu_seqlens_kv_padded: Any = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Any = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Any = None,
        alibi_slopes: Any = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        num_splits: int | None = 1,
    ) -> Tensor:
        heads = [part.permute(1, 2, 0, 3) for part in (query_layer, key_layer, value_layer)]
        out = F.scaled_dot_product_attention(
            *heads, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)


class FusedAdam(torch.optim.AdamW):
    """AdamW by the arguments of Transformer Engine's."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if not (adam_w_mode and bias_correction):
            message = "the stand-in is AdamW with its usual correction alone"
            raise NotImplementedError(message)
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Any = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Any = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Heads turned by their positions' angles, halves against halves."""
    if interleaved or cu_seqlens is not None or tensor_format != "sbhd":
        message = "the stand-in turns halves of whole sequences alone"
        raise NotImplementedError(message)
    angles = freqs[: t.shape[0]]
    turned, rest = t.split([angles.shape[-1], t.shape[-1] - angles.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
    return torch.cat((turned, rest), dim=-1).to(t.dtype)


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    _input: Tensor | None = None,
) -> Tensor:
    """Losses of tokens over logits whose vocabulary is split over ranks."""
    from megatron.core.tensor_parallel import (  # noqa: PLC0415 (imports this module)
        vocab_parallel_cross_entropy,
    )

    losses: Tensor = vocab_parallel_cross_entropy(inp.float(), target, label_smoothing)
    return losses


class CudaRNGStatesTracker:
    """Random states by name; the stand-in draws nothing."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.states: dict[str, Any] = {}

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states

    def add(self, name: str, seed: int) -> None:
        self.states[name] = seed


class Absent:
    """A class that Megatron-core derives from or names, and that no model here uses."""


def _module(name: str, **members: Any) -> ModuleType:
    """A module of this package that has some members, where imports find it."""
    whole = f"{__name__}.{name}"
    made = ModuleType(whole)
    made.__path__ = []
    vars(made).update(members)
    sys.modules[whole] = made
    parent, _, last = whole.rpartition(".")
    setattr(sys.modules[parent], last, made)
    return made


_module("common")
_module("common.recipe", DelayedScaling=Absent, Format=Absent)
_module(
    "pytorch",
    Linear=Linear,
    LayerNormLinear=LayerNormLinear,
    LayerNorm=LayerNorm,
    RMSNorm=RMSNorm,
    DotProductAttention=DotProductAttention,
    GroupedLinear=Absent,
)
_module("pytorch.fp8", FP8GlobalStateManager=Absent, fp8_autocast=None)
_module("pytorch.ops", Sequential=Absent, FusibleOperation=Absent)
_module(
    "pytorch.distributed",
    CudaRNGStatesTracker=CudaRNGStatesTracker,
    activation_recompute_forward=Absent,
)
_module("pytorch.attention")
_module(
    "pytorch.router",
    fused_compute_score_for_moe_aux_loss=None,
    fused_moe_aux_loss=None,
    fused_topk_with_score_function=None,
)
_module("pytorch.tensor", QuantizedTensor=Absent)
_module("pytorch.attention.rope", apply_rotary_pos_emb=apply_rotary_pos_emb)
_module("pytorch.optimizers", FusedAdam=FusedAdam, FusedSGD=Absent)
_module("pytorch.cross_entropy", parallel_cross_entropy=parallel_cross_entropy)
