"""Launch lines of Megatron-LM with experts, latent attention and few bits become plans."""

from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import Given, Imported
from mistlab.export.megatron.megatron_parts import pattern_of
from mistlab.export.targets import TARGETS
from mistlab.plan.model_parts import Experts, LatentAttention, Window
from tests.mistlab.test_import_plans import said

STARTED = "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py"
RUN = "--micro-batch-size 1 --global-batch-size 16 --seq-length 4096 --bf16"
SHAPE = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
    "--vocab-size 32000 --make-vocab-size-divisible-by 1 --attention-backend fused "
    "--attention-dropout 0 --hidden-dropout 0"
)
EXPERTS = (
    "--num-experts 16 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 1e-2"
)
SHARDED = (
    "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy "
    "optim_grads_params"
)
LATENT = "--multi-latent-attention --q-lora-rank 512 --kv-lora-rank 256 --qk-layernorm"


def imported(more: str = "", hardware: str = "h100-80gb", **given: Any) -> Imported:
    line = f"{STARTED} {SHAPE} {RUN} {more}"
    return TARGETS["megatron"].read(line, Given(hardware=catalog.hardware(hardware), **given))


SCRIPT = """\
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"2"}
MODEL_ARGS=(
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
    --no-position-embedding --rotary-base 1000000 --vocab-size 32000 --use-flash-attn
    --make-vocab-size-divisible-by 1
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    # --moe-token-dispatcher-type flex
    --moe-token-dispatcher-type alltoall
    --moe-layer-freq "([1]*32)"
    --overlap-param-gather --overlap-grad-reduce
)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --bf16)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 4
    --use-distributed-optimizer --sequence-parallel
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \\
    ${MODEL_ARGS[@]} ${MOE_ARGS[@]} ${TRAINING_ARGS[@]} ${PARALLEL_ARGS[@]}
"""


def test_a_script_of_mixtral_is_a_plan() -> None:
    found = TARGETS["megatron"].read(SCRIPT, Given(hardware=catalog.hardware("h100-80gb")))
    assert found.job.workload.model == catalog.model("mixtral-8x7b")
    assert found.job.workload.model.name == "mixtral-8x7b"
    assert [(one.data_parallel, one.expert_parallel) for one in found.job.plan.stages] == [
        (4, 4)
    ] * 4
    assert not said(found, "ignored")
    assert set(said(found, "noted")) == {"options"}
    assert found.job.plan.engine == "megatron-core"


def test_experts_have_the_defaults_of_megatron() -> None:
    found = imported(f"{EXPERTS} --ffn-hidden-size 4096 --tensor-model-parallel-size 2")
    model, (stage,) = found.job.workload.model, found.job.plan.stages
    assert model.experts == Experts(count=16, active=2, ffn=4096)
    # Tensor-parallel ranks divide each expert unless they are told otherwise.
    assert (stage.expert_parallel, stage.expert_tensor_parallel) == (1, 2)
    assert stage.sequence_parallel == 1
    assert "predicted with it" in said(found, "contradicting")["sequence_parallel"]


@pytest.mark.parametrize(
    ("switch", "degrees"),
    [("", (4, 2)), ("--moe-tp-extend-ep", (8, 1)), ("--moe-extended-tp", (1, 8))],
)
def test_tensor_parallel_ranks_divide_experts_as_two_switches_say(
    switch: str, degrees: tuple[int, int]
) -> None:
    found = imported(
        f"{EXPERTS} --moe-ffn-hidden-size 512 --tensor-model-parallel-size 2 --sequence-parallel "
        f"--expert-model-parallel-size 4 {switch}"
    )
    (stage,) = found.job.plan.stages
    assert (stage.expert_parallel, stage.expert_tensor_parallel) == degrees


def test_experts_degrees_sizes_and_capacity_are_read() -> None:
    found = imported(
        f"{EXPERTS} --moe-router-topk 4 --moe-ffn-hidden-size 512 --moe-latent-size 1024 "
        "--moe-shared-expert-intermediate-size 768 --moe-layer-freq '([0]*1+[1]*7)' "
        "--expert-model-parallel-size 4 --expert-tensor-parallel-size 2 "
        "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity"
    )
    # No graph has experts of short tokens beside shared ones, and the import says so.
    assert [(one.kind, one.choice) for one in found.remarks] == [("noted", "prediction")]
    workload, (stage,) = found.job.workload, found.job.plan.stages
    assert workload.model.experts == Experts(
        count=16, active=4, ffn=512, shared_ffn=768, hidden=1024, dense_blocks=1
    )
    assert (stage.expert_parallel, stage.expert_tensor_parallel) == (4, 2)
    assert (workload.expert_capacity, workload.expert_padding) == (1.5, True)


def test_a_gated_network_is_as_wide_as_megatron_makes_it() -> None:
    assert imported().job.workload.model.ffn == 5440
    assert imported(SHAPE.replace("--swiglu", "--quick-geglu")).job.workload.model.ffn == 5440


def test_latent_attention_has_the_defaults_of_megatron() -> None:
    found = imported(LATENT)
    model = found.job.workload.model
    assert found.remarks == ()
    assert model.latent == LatentAttention(query_rank=512, key_rank=256, value_dim=128)
    assert (model.head_dim, model.rotated_channels, model.qk_norm) == (192, 64, False)
    bare = imported(LATENT.replace("--qk-layernorm", "--kv-lora-rank 64 --v-head-dim 32"))
    assert bare.job.workload.model.latent == LatentAttention(
        query_rank=512, key_rank=64, value_dim=32
    )
    assert "predicted as normalised" in said(bare, "assumed")["model.latent"]
    whole = imported(LATENT.replace("--q-lora-rank 512", "")).job.workload.model
    assert whole.latent == LatentAttention(query_rank=None, key_rank=256, value_dim=128)


def test_windows_and_sinks_are_read() -> None:
    found = imported("--window-size 128,0 --window-attn-skip-freq 4 --softmax-type learnable")
    assert [(one.kind, one.choice) for one in found.remarks] == [("noted", "prediction")]
    assert found.job.workload.model.window == Window(size=128, full_every=4)
    assert found.job.workload.model.sinks
    everywhere = imported("--window-size 128,0")
    assert everywhere.remarks == ()
    assert everywhere.job.workload.model.window == Window(size=128, full_every=0)


@pytest.mark.parametrize(
    ("more", "engine"),
    [
        ("", "megatron"),
        ("--qk-layernorm", "megatron"),
        (EXPERTS, "megatron-core"),
        (LATENT, "megatron-core"),
        ("--fp8-format hybrid --fp8-recipe tensorwise", "megatron-core"),
        ("--mtp-num-layers 1", "megatron-core"),
        (f"{EXPERTS} {SHARDED}", "megatron-fsdp"),
    ],
)
def test_lines_of_today_are_predicted_by_the_engine_of_today(more: str, engine: str) -> None:
    assert imported(more).job.plan.engine == engine


@pytest.mark.parametrize(
    ("more", "hardware", "precision"),
    [
        ("--fp8-format hybrid --fp8-recipe tensorwise", "h100-80gb", "fp8"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "b200-180gb", "fp8"),
        ("--fp4-format e2m1", "b200-180gb", "fp4"),
        ("--fp4-format e2m1", "h100-80gb", "bf16"),
        ("--fp8-format hybrid", "a100-80gb", "bf16"),
    ],
)
def test_products_have_the_bits_that_the_machine_has(
    more: str, hardware: str, precision: str
) -> None:
    found = imported(more, hardware)
    assert found.job.workload.precision == precision
    assert bool(said(found, "ignored")) == (precision == "bf16")


@pytest.mark.parametrize(
    ("more", "kind", "choice", "words"),
    [
        ("--fp8-format hybrid", "ignored", "--fp8-recipe", "delayed: GEMMs are predicted as those"),
        (f"{EXPERTS} --moe-aux-loss-coeff 0", "assumed", "expert_imbalance", "no option balances"),
        (
            f"{EXPERTS} --moe-token-dispatcher-type flex",
            "ignored",
            "--moe-token-dispatcher-type",
            "--engine megatron-bridge for fused kernels",
        ),
        ("--num-experts 4", "ignored", "--moe-token-dispatcher-type", "allgather"),
        ("--num-experts 4", "assumed", "--moe-grouped-gemm", "one grouped GEMM"),
        (
            f"{EXPERTS} --moe-layer-recompute",
            "ignored",
            "--moe-layer-recompute",
            "predicted as kept",
        ),
        (
            f"{EXPERTS} --recompute-granularity selective --recompute-modules core_attn moe",
            "ignored",
            "checkpointed_layers",
            "--recompute-modules moe: their outputs are predicted as kept",
        ),
        (
            f"{EXPERTS} --moe-pad-expert-input-to-capacity",
            "contradicting",
            "expert_padding",
            "without --moe-expert-capacity-factor",
        ),
        ("--exp-avg-dtype bf16", "ignored", "optimizer", "predicted in 32 bits"),
        (
            "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
            "contradicting",
            "optimizer",
            "which is not given",
        ),
        ("--softmax-type off-by-one", "ignored", "--softmax-type", "costs as much"),
        (
            "--fp8-format hybrid --fp4-format e2m1",
            "contradicting",
            "precision",
            "--fp4-format is used",
        ),
    ],
)
def test_what_plans_cannot_say_of_today_is_named(
    more: str, kind: str, choice: str, words: str
) -> None:
    assert words in said(imported(more), kind)[choice]


def test_the_core_of_attention_is_recomputed_beside_other_modules() -> None:
    found = imported("--recompute-granularity selective --recompute-modules core_attn mlp")
    assert found.job.plan.stages[0].value("core_recomputed_layers") == 8


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--expert-model-parallel-size 2", "the model has no experts: give --num-experts N, or 1"),
        (f"{EXPERTS} --expert-model-parallel-size 3", "3 does not divide experts 16"),
        (f"{EXPERTS} --moe-layer-freq '[1]*7'", "has entries for 7 blocks, but the model has 8"),
        (f"{EXPERTS} --moe-layer-freq '[x]*8'", "is not a list of blocks: give 0 or 1"),
        (f"{EXPERTS} --moe-layer-freq '[1]*99999999'", "is not a list of blocks"),
        (f"{EXPERTS} --moe-layer-freq 0", "--moe-layer-freq: line 1: 0 is too small"),
        (f"{EXPERTS} --moe-token-dispatcher-type all", "'all' is unknown: did you mean"),
        (
            "--window-size x,0 --window-attn-skip-freq 2",
            "--window-size: line 1: 'x' is not a whole number",
        ),
        ("--fp8-format e5m2", "--fp8-format: line 1: 'e5m2' is unknown"),
    ],
)
def test_what_no_model_can_be_is_refused(more: str, words: str) -> None:
    with pytest.raises(InputError, match=words.replace("[", r"\[")):
        imported(more)


def test_a_pattern_of_blocks_is_worked_out_without_running_it() -> None:
    assert pattern_of("[0,1,1]") == [0, 1, 1]
    assert pattern_of("([0]*1+[1]*2)*2") == [0, 1, 1, 0, 1, 1]
    for text in ("__import__('os')", "[1]*[1]", "1", "[1", "[[1]]", "[1]*True*9999999", ""):
        with pytest.raises(InputError):
            pattern_of(text)
