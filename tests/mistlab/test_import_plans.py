"""Launch lines and configurations of other frameworks become plans; what is wrong is said."""

from pathlib import Path
from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import Given, Imported
from mistlab.export.megatron.megatron_model import model_options
from mistlab.export.nearest import nearest
from mistlab.export.targets import TARGETS
from mistlab.shell.launch import launch_of
from mistlab.shell.session import LaunchFile

LINES = Path(__file__).parents[2] / "examples" / "launch"
L4 = catalog.hardware("l4-24gb")
SHAPE = (
    "--num-layers 32 --hidden-size 2560 --num-attention-heads 32 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 50304 --make-vocab-size-divisible-by 1 "
    "--untie-embeddings-and-output-weights --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0"
)
RUN = "--micro-batch-size 1 --global-batch-size 16 --bf16"
STARTED = "torchrun --nnodes 2 --nproc-per-node 4 pretrain_gpt.py"


def imported(more: str = "", **given: Any) -> Imported:
    line = f"{STARTED} {SHAPE} {RUN} {more}"
    return TARGETS["megatron"].read(line, Given(**{"hardware": L4, **given}))


def said(found: Imported, kind: str) -> dict[str, str]:
    return {remark.choice: remark.text for remark in found.remarks if remark.kind == kind}


def test_a_launch_line_is_a_plan() -> None:
    found = imported(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --attention-backend flash "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3"
    )
    job = found.job
    assert found.remarks == ()
    assert job.workload.model == catalog.model("gpt3-2.7b")
    assert (job.cluster.nodes, job.cluster.gpus_per_node) == (2, 4)
    assert (job.plan.engine, job.plan.micro_batches) == ("megatron", 8)
    for stage in job.plan.stages:
        assert (stage.layers, stage.data_parallel, stage.tensor_parallel) == (16, 2, 2)
        assert (stage.zero, stage.checkpointed_layers, stage.micro_batch) == (1, 3, 1)


SCRIPT = """\
#!/bin/bash
# a comment with a 'quote and --fake-option 3
GPUS=${GPUS:-4}  # of a node
NODES=2
WORLD=$(($GPUS * NODES))
LAUNCH="--nproc_per_node $GPUS --nnodes=$NODES"
MODEL_ARGS=(
    --num-layers 32   # blocks
    --hidden-size "2560" --num-attention-heads 32
)
MODEL_ARGS+=(--seq-length 2048)
export OTHERS="
    --bf16 --micro-batch-size 2 \\
    --global-batch-size $((WORLD*4))
"
if [ -n "$DEBUG" ]; then echo debugging; fi
torchrun $LAUNCH pretrain_gpt.py "${MODEL_ARGS[@]}" \\
    ${OTHERS} \\
    --data-path $1 2>&1 | tee log.txt
"""


def test_a_script_has_variables_arrays_sums_and_comments() -> None:
    launch = launch_of(LaunchFile(text=SCRIPT))
    started = ("torchrun", "--nproc_per_node", "4", "--nnodes=2")
    assert tuple(word.text for word in launch.started) == started
    assert " ".join(word.text for word in launch.arguments) == (
        "--num-layers 32 --hidden-size 2560 --num-attention-heads 32 --seq-length 2048 "
        "--bf16 --micro-batch-size 2 --global-batch-size 32 --data-path $1"
    )
    job = TARGETS["megatron"].read(SCRIPT, Given(hardware=L4)).job
    assert (job.plan.micro_batches, job.plan.stages[0].data_parallel) == (2, 8)
    # Megatron-LM's own defaults: biases, tied tables, dropout, GPT-2's tokens padded.
    model = job.workload.model
    assert (model.biases, model.tied_embeddings, model.dropout) == (True, True, 0.1)
    assert model.vocab == 50304


@pytest.mark.parametrize(
    ("more", "choice", "words"),
    [
        ("--fp16", "precision", "--bf16 and --fp16 are both given: bf16 is used"),
        ("--optimizer-cpu-offload", "offload.optimizer", "which is not given"),
        ("--overlap-param-gather", "overlap_communication", "predicted without overlap"),
        ("--data-parallel-sharding-strategy optim", "zero", "without --use-megatron-fsdp"),
        ("--num-query-groups 8", "model.kv_heads", "every head has keys and values of its own"),
        ("--recompute-granularity full", "checkpointed_layers", "Megatron-LM refuses"),
        ("--recompute-num-layers 2", "checkpointed_layers", "without --recompute-granularity"),
        (
            "--hidden-size 1024 --hidden-size 2560",
            "--hidden-size",
            "2560, 1024, 2560: the last value, 2560",
        ),
        (
            "--world-size 4",
            "gpus_per_node",
            "but the launcher starts 2 x 4 processes",
        ),
        ("--attention-backend local --use-flash-attn", "attention", "--attention-backend is used"),
    ],
)
def test_contradictions_are_named(more: str, choice: str, words: str) -> None:
    assert words in said(imported(more), "contradicting")[choice]


@pytest.mark.parametrize(
    ("more", "tokens", "shares"),
    [
        ("--hidden-dropout 0.1", 0.1, 0.0),
        ("--hidden-dropout 0.1 --attention-dropout 0.1", 0.1, 0.1),
    ],
)
def test_tokens_and_shares_drop_by_probabilities_of_their_own(
    more: str, tokens: float, shares: float
) -> None:
    model = imported(more).job.workload.model
    assert (model.dropout, model.dropped_shares) == (tokens, shares)
    options = " ".join(model_options(model, 1))
    assert f"--attention-dropout {shares!r} --hidden-dropout {tokens!r}" in options


def test_shares_alone_are_dropped_by_no_model_here() -> None:
    found = imported("--attention-dropout 0.1")
    assert "predicted as 0" in said(found, "ignored")["--attention-dropout"]
    assert found.job.workload.model.dropped_shares == 0


def test_unknown_options_are_named_with_near_ones() -> None:
    found = imported("--tensor-model-paralel-size 2 --sequence-paralel --frobnicate --lr 1e-4")
    ignored = said(found, "ignored")
    near = "is unknown: did you mean '--tensor-model-parallel-size'?"
    assert ignored["--tensor-model-paralel-size 2"].startswith(near[:-1].rsplit("'", 1)[0])
    assert ignored["--sequence-paralel"].startswith(
        "is unknown: did you mean '--sequence-parallel'"
    )
    assert (
        ignored["--frobnicate"]
        == "is an unknown option: the prediction assumes no effect on time or memory"
    )
    assert (
        said(found, "noted")["options"]
        == "1 option without effect on a step's predicted time or memory: --lr"
    )


def test_what_plans_cannot_say_is_named() -> None:
    ignored = said(imported("--fp8-format hybrid"), "ignored")
    told = ignored["--fp8-format hybrid"]
    assert told == "GEMMs are predicted in 16 bits: hardware l4-24gb has no rate of fp8"
    skipped = said(imported("--window-size 128,0 --window-attn-skip-freq 1"), "ignored")
    told = skipped["--window-size 128,0"]
    assert told.endswith("is not supported: attention is predicted over the whole sequence")


def test_what_is_given_wins() -> None:
    found = imported(
        model=catalog.model("gpt3-1.3b"), sequence_length=4096, nodes=1, precision="fp16"
    )
    told = said(found, "contradicting")
    assert (
        told["sequence_length"] == "the file has 2048, but --sequence-length is 4096: 4096 is used"
    )
    assert told["nodes"] == "the file has 2, but --nodes is 1: 1 is used"
    assert told["precision"] == "the file has bf16, but --precision is fp16: fp16 is used"
    assert "hidden (2048 instead of 2560)" in told["model"]
    assert found.job.workload.model == catalog.model("gpt3-1.3b")
    assert found.job.cluster.num_gpus == 4


def test_an_engine_may_be_given_for_predictions() -> None:
    assert imported().job.plan.engine == "megatron"
    assert imported(engine="megatron-core").job.plan.engine == "megatron-core"
    # Aceso's runtime shards nothing, so the launch line's own engine takes its place.
    sharded = imported("--use-distributed-optimizer", engine="aceso")
    assert sharded.job.plan.engine == "megatron"
    assert "aceso cannot run this plan (" in said(sharded, "assumed")["engine"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--tensor-model-parallel-size 3", r"8 GPUs are not a multiple of the 3 GPUs of a copy"),
        ("--pipeline-model-parallel-size 5", "--num-layers 32: 5 stages do not divide the blocks"),
        (
            "--global-batch-size 12",
            "global_batch: 12 sequences are not a multiple of micro_batch 1",
        ),
        (
            "--micro-batch-size x",
            "--micro-batch-size: line 1: 'x' is not a whole number: give one of at least 1",
        ),
        ("--micro-batch-size 0", "--micro-batch-size: line 1: 0 is too small: give at least 1"),
        (
            "--attention-backend flush",
            "--attention-backend: line 1: 'flush' is unknown: did you mean",
        ),
        (
            "--optimizer-offload-fraction 2",
            "--optimizer-offload-fraction: line 1: 2 is out of range",
        ),
        ("--pipeline-model-parallel-layout 'Et|tQ'", "layout: 'Q' is not supported"),
        ("--micro-batch-size", "--micro-batch-size: line 1: its value is missing"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|t|tL'",
            "3 parts are not a multiple of 2 stages",
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6",
            "26 blocks do not divide over 3 stages",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 5",
            "32 blocks on 2 stages do not divide into chunks of 5, which Megatron-LM refuses",
        ),
    ],
)
def test_what_no_plan_can_be_is_refused(more: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(more)


def test_stages_may_have_layouts_and_ends_of_their_own() -> None:
    pipeline = "--pipeline-model-parallel-size 4"
    layout = f'--pipeline-model-parallel-layout "Et*6|(t*8|)*2,t*10L" {pipeline}'
    assert [stage.layers for stage in imported(layout).job.plan.stages] == [6, 8, 8, 10]
    ends = f"--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 6 {pipeline}"
    assert [stage.layers for stage in imported(ends).job.plan.stages] == [6, 10, 10, 6]


@pytest.mark.parametrize(
    "text", ["", "#!/bin/bash\n", "torchrun 'unclosed", "x=(", "\0\0", "()" * 50, "$((1/0)) --a"]
)
def test_what_is_no_launch_line_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        TARGETS["megatron"].read(text, Given(hardware=L4))


CONFIG = """{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2,
 "gradient_accumulation_steps": 4, "bf16": {"enabled": true}, "zero_optimization": %s %s}"""


def of_deepspeed(zero: str, more: str = "", **given: Any) -> Imported:
    everything = {"model": catalog.model("gpt3-2.7b"), "sequence_length": 2048, **given}
    text = CONFIG % (zero, f", {more}" if more else "")
    return TARGETS["deepspeed"].read(text, Given(hardware=L4, **everything))


def test_a_deepspeed_configuration_is_a_plan() -> None:
    found = of_deepspeed(
        '{"stage": 3, "overlap_comm": true, "offload_optimizer": {"device": "cpu", "ratio": 0.25}}',
        '"activation_checkpointing": {"number_checkpoints": 32}',
    )
    (stage,) = found.job.plan.stages
    assert (stage.data_parallel, stage.micro_batch, stage.zero) == (4, 2, 3)
    assert (stage.offload.optimizer, stage.checkpointed_layers) == (0.25, 32)
    assert found.job.plan.micro_batches == 4


def test_a_fraction_counts_under_zero_3_alone() -> None:
    found = of_deepspeed('{"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.25}}')
    assert "has effect with ZeRO-3 only" in said(found, "contradicting")["offload.optimizer"]
    assert found.job.plan.stages[0].offload.optimizer == 1


def test_settings_that_nobody_reads_are_named() -> None:
    found = of_deepspeed('{"stage": 1, "mystery": 3}', '"fp8": {}, "scheduler": {}')
    ignored = said(found, "ignored")
    assert "the prediction leaves it out" in ignored["zero_optimization.mystery"]
    assert "the prediction leaves it out" in ignored["fp8"]
    assert said(found, "noted")["settings"].startswith("scheduler: no effect")


@pytest.mark.parametrize(
    ("zero", "more", "words"),
    [
        ('{"stage": 4}', "", "zero_optimization.stage: 4 is unknown"),
        ('{"stage": "x"}', "", "zero_optimization.stage: 'x' is not a whole number"),
        ("3", "", "zero_optimization: 3 is not a section"),
        ("{}", '"train_batch_size": 30', "train_batch_size: 30 is not a multiple"),
        ("{}", '"bf16": {"enabled": 1}', "bf16.enabled: 1 is neither true nor false"),
        ("{", "", "correct the JSON"),
    ],
)
def test_a_broken_configuration_is_refused(zero: str, more: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        of_deepspeed(zero, more)


def test_a_configuration_without_a_model_asks_for_it() -> None:
    with pytest.raises(InputError, match="model: the file does not describe it"):
        of_deepspeed("{}", model=None)


TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
global_batch_size = 64
seq_len = 4096
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "4"
"""


def test_a_torchtitan_configuration_is_a_plan() -> None:
    given = Given(hardware=catalog.hardware("h100-80gb"), nodes=2, gpus_per_node=8)
    found = TARGETS["torchtitan"].read(TOML, given)
    assert found.job.workload.model == catalog.model("llama3-8b")
    first, last = found.job.plan.stages
    # Embedding and head count as a block each, and kept gathered weights are ZeRO-2.
    assert (first.layers, last.layers, first.zero) == (16, 16, 2)
    assert (first.data_parallel, first.tensor_parallel, first.micro_batch) == (4, 2, 1)
    assert first.checkpointed_layers == 4
    # Four replicas take 16 sequences before their pipelines are drained, of 64.
    assert "torchtitan fills it anew for every" in said(found, "assumed")["micro_batches"]


def test_replicas_of_a_torchtitan_configuration_are_read_and_written() -> None:
    given = Given(hardware=catalog.hardware("h100-80gb"), nodes=2, gpus_per_node=8)
    text = TOML.replace(
        "shard_degree = -1", "shard_degree = -1\ndata_parallel_replicate_degree = 2"
    )
    job = TARGETS["torchtitan"].read(text, given).job
    assert {(one.data_parallel, one.state_replicas) for one in job.plan.stages} == {(4, 2)}
    toml = TARGETS["torchtitan-toml"]
    written = toml.write(nearest(job, toml).job)
    assert "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 2\n" in str(written)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('flavor = "8B"', 'flavor = "9B"', "model.flavor: '9B' of llama3 is not a known model"),
        ("seq_len = 4096", "seq_len = true", "training.seq_len: true is not a whole number"),
        ("[training]", "[training", "correct the TOML"),
    ],
)
def test_a_broken_toml_is_refused(old: str, new: str, words: str) -> None:
    given = Given(hardware=catalog.hardware("h100-80gb"), nodes=2, gpus_per_node=8)
    with pytest.raises(InputError, match=words):
        TARGETS["torchtitan"].read(TOML.replace(old, new), given)


YAML = """
distributed_type: FSDP
mixed_precision: {precision}
num_processes: 8
fsdp_config:
  fsdp_version: 2
"""


def of_accelerate(precision: str) -> Imported:
    given = Given(
        hardware=L4,
        model=catalog.model("gpt3-1.3b"),
        sequence_length=2048,
        global_batch=16,
        micro_batch=1,
    )
    return TARGETS["accelerate"].read(YAML.format(precision=precision), given)


def test_precisions_of_accelerate_are_read_or_named() -> None:
    for precision, read in (("fp16", "fp16"), ("bf16", "bf16"), ("'no'", "fp32"), ("fp8", "bf16")):
        assert of_accelerate(precision).job.workload.precision == read
    ignored = said(of_accelerate("fp8"), "ignored")
    assert ignored["mixed_precision"] == "fp8: GEMMs are predicted in 16 bits"
    with pytest.raises(InputError, match="mixed_precision: 'fp4' is unknown: give one of no, bf16"):
        of_accelerate("fp4")


# Hand-made lines of published runs: what their plans must be, row by row.
RUNS = {
    "megatron-l4-gpt2-1.3b-False": ("gpt3-1.3b", "math", 2, 1, 2, 8, 32),
    "megatron-l4-gpt2-1.3b-True": ("gpt3-1.3b", "flash", 2, 1, 2, 8, 32),
    "megatron-l4-gpt2-2.7b-False": ("gpt3-2.7b", "math", 4, 1, 16, 1, 64),
    "megatron-l4-gpt2-2.7b-True": ("gpt3-2.7b", "flash", 4, 1, 16, 1, 64),
    "megatron-l4-llama-1.3b-True": ("llama-1.3b", "flash", 2, 1, 2, 8, 32),
    "megatron-l4-llama-2.7b-True": ("llama-2.7b", "flash", 4, 1, 16, 1, 64),
}


@pytest.mark.parametrize("run", RUNS)
def test_launch_lines_of_published_runs_are_their_plans(run: str) -> None:
    text = (LINES / f"{run}.sh").read_text(encoding="utf-8")
    job = TARGETS["megatron"].read(text, Given(hardware=L4)).job
    model, attention, gpus, stages, batches, micro_batch, batch = RUNS[run]
    assert job.workload.model == catalog.model(model)
    assert (job.workload.attention, job.workload.global_batch) == (attention, batch)
    (stage,) = job.plan.stages
    assert (len(job.plan.stages), job.plan.micro_batches, stage.micro_batch) == (
        stages,
        batches,
        micro_batch,
    )
    assert (stage.data_parallel, stage.zero, stage.checkpointed_layers) == (gpus, 1, stage.layers)
