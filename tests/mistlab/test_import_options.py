"""Options of Megatron-LM are read as its own parser reads them, each with its line."""

import pytest

from mistlab.core.values import InputError
from mistlab.export.given import Given
from mistlab.export.megatron.megatron_flags import Options
from mistlab.export.megatron.megatron_read import nearest_name, read_launch
from mistlab.shell.session import LaunchFile
from tests.mistlab.launched import H100, LINE, RUN, SHAPE, imported, launch, texts, word, words


def of(text: str) -> Options:
    return Options.of(words(text))


@pytest.mark.parametrize(
    ("line", "is_on"),
    [
        ("--swiglu", True),
        ("--swiglu true", True),
        ("--swiglu True", True),
        ("--swiglu=1", True),
        ("--swiglu False", False),
        ("--swiglu=0", False),
        ("--no-swiglu", False),
        ("--disable-swiglu", False),
        ("--swiglu --no-swiglu", False),
        ("--no-swiglu --swiglu", True),
        ("--no-swiglu false", True),
        ("--no-swiglu true", False),
        ("", False),
    ],
)
def test_switches_may_have_values_and_negations(line: str, is_on: bool) -> None:
    assert of(line).has("--swiglu") is is_on


def test_names_are_read_as_argparse_reads_them() -> None:
    options = of("--num_layers 4 --tensor-model-parallel 2 --hidden-size=64 --num-layers 8 --foo 1")
    assert options.whole("--num-layers") == 8
    assert options.whole("--tensor-model-parallel-size") == 2
    assert options.whole("--hidden-size") == 64
    assert options.repeated == {"--num-layers": ["4"]}
    assert options.unknown == ["--foo"]


def test_a_beginning_of_several_options_stands_for_none() -> None:
    options = of("--hidden 64 --pipeline-model-parallel 2")
    assert options.unknown == ["--hidden", "--pipeline-model-parallel"]


def test_an_abbreviation_is_told() -> None:
    found = imported("--tensor-model-parallel 2")
    assert found.job.plan.stages[0].tensor_parallel == 2
    assert "--tensor-model-parallel-size" in texts(found, "assumed")["--tensor-model-parallel"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--hidden-size 2048", "--hidden-size $HIDDEN"),
        ("--hidden-size 2048", "--hidden-size=$HIDDEN"),
        ("--hidden-size 2048", "--hidden-size 20$HIDDEN"),
        ("--num-layers 8", "--num-layers $L"),
        ("--micro-batch-size 1", "--micro-batch-size $M"),
        ("--swiglu", "--swiglu=$S"),
    ],
)
def test_an_unknown_value_that_costs_is_refused_with_its_line(old: str, new: str) -> None:
    name = new.replace("=", " ").split(maxsplit=1)[0]
    with pytest.raises(
        InputError, match=rf"^{name}: line {LINE}: \$\w+ is set nowhere: give --set"
    ):
        imported(shape=SHAPE.replace(old, new), run=RUN.replace(old, new))


def test_an_unknown_value_that_costs_nothing_is_no_matter() -> None:
    found = imported("--lr $LR --data-path $DATA 0.5 $OTHER --save $SAVE/here --log-interval 1")
    assert [one.choice for one in found.remarks] == ["options"]


def test_what_is_given_beside_the_file_replaces_unknown_values() -> None:
    run = "--micro-batch-size $M --global-batch-size $G --bf16 --use-flash-attn"
    shape = SHAPE.replace("--seq-length 4096", "--seq-length $S")
    found = imported(shape=shape, run=run, sequence_length=2048, micro_batch=2, global_batch=64)
    workload, (stage,) = found.job.workload, found.job.plan.stages
    assert (workload.sequence_length, workload.global_batch, stage.micro_batch) == (2048, 64, 2)


@pytest.mark.parametrize(
    "line", ["$EXTRA_ARGS --bf16", "--bf16 $EXTRA_ARGS", "--lr 1e-4 $EXTRA_ARGS"]
)
def test_unknown_words_between_options_are_told_first(line: str) -> None:
    found = imported(f"--hidden-dropout 0.1 {line}")
    first = found.remarks[0]
    assert (first.kind, first.choice) == ("assumed", "$EXTRA_ARGS")
    assert first.text.startswith(f"line {LINE}: is set nowhere: taken as empty; give --set")


def test_a_number_that_is_none_is_refused_with_its_line() -> None:
    with pytest.raises(InputError, match=f"^--num-layers: line {LINE}: 'many' is not a whole"):
        imported("--num-layers many")


def test_options_without_effect_are_one_count() -> None:
    found = imported("--lr 1 --min-lr 0 --save x --log-interval 1 --inference-max-requests 2")
    (remark,) = found.remarks
    assert str(remark) == (
        "noted: options: 5 options without effect on a step's predicted time or memory: "
        "--lr --min-lr --save --log-interval --inference-max-requests"
    )


def test_an_unknown_option_is_no_relative_s_by_its_beginning_alone() -> None:
    found = imported(
        "--data-parallel-size 4 --train-foo 3 --moe-router-xyz 4 --zero-hpz 2 --fp8-all "
        "--train-data-exact-num-epochs 1 --moe-router-dtype fp32 --log-foo 1"
    )
    assert [one.choice for one in found.remarks] == [
        "--data-parallel-size 4 --moe-router-xyz 4 --zero-hpz 2 --fp8-all",
        "--train-foo 3",
        "options",
    ]
    assert texts(found)["options"].startswith("3 options")


def test_what_costs_comes_before_what_is_unknown_and_the_count_is_last() -> None:
    found = imported(
        "--foo 1 --bar --llm-ep 2 --mega-expert-groups 4 --micro-bath-size 3 --lr 1 "
        "--tp-comm-overlap --window-size 128,0 --window-attn-skip-freq 1"
    )
    assert [one.choice for one in found.remarks] == [
        "--window-size 128,0",
        "--tp-comm-overlap",
        "--micro-bath-size 3",
        "--mega-expert-groups 4",
        "--foo 1 --bar --llm-ep 2",
        "options",
    ]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("--llm-ep", None),
        ("--epochs-per-run", None),
        ("--micro-bath-size", "--micro-batch-size"),
        ("--tensor-model-paralel-size", "--tensor-model-parallel-size"),
    ],
)
def test_only_near_names_are_suggested(name: str, near: str | None) -> None:
    assert nearest_name(name) == near


@pytest.mark.parametrize(
    ("more", "check"),
    [
        ("--activations-checkpoint-method uniform", 8),
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 3", 3),
        ("--recompute-granularity full --recompute-method uniform", 8),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 5", 5),
        ("--recompute-granularity full --recompute-method block", 1),
        ("--checkpoint-activations", 8),
        ("--activations-checkpoint-granularity full --activations-checkpoint-method uniform", 8),
        ("--recompute-method uniform", 0),
    ],
)
def test_recomputation_has_names_of_all_versions(more: str, check: int) -> None:
    assert imported(more).job.plan.stages[0].checkpointed_layers == check


@pytest.mark.parametrize(
    "more", ["--cp-comm-type a2a a2a", "--context-parallel-algo ulysses_cp_algo"]
)
def test_exchanges_of_context_parallelism_have_several_names(more: str) -> None:
    (stage,) = imported(f"--context-parallel-size 2 {more}").job.plan.stages
    assert (stage.context_parallel, stage.context_exchange) == (2, 2)


def test_torch_s_sharding_and_replicas_of_states_are_read() -> None:
    assert imported("--use-torch-fsdp2").job.plan.stages[0].zero == 3
    kept = imported("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward")
    assert kept.job.plan.stages[0].zero == 2
    twice = imported("--use-distributed-optimizer --num-distributed-optimizer-instances 2")
    assert (twice.job.plan.stages[0].state_replicas, twice.job.plan.stages[0].zero) == (2, 1)


def test_a_sharded_optimizer_is_read_where_each_expert_has_one_replica() -> None:
    # Two tensor-parallel ranks, whose experts are whole: they share the experts' states.
    found = imported(
        "--tensor-model-parallel-size 8 --sequence-parallel --num-experts 8 --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 "
        "--expert-tensor-parallel-size 1 --use-distributed-optimizer"
    )
    assert found.job.plan.stages[0].data_parallel == 1


def test_pipelines_may_be_listed_or_counted_with_embedding_and_loss() -> None:
    listed = imported("--pipeline-model-parallel-size 2 --num-layer-list 5,3")
    assert [one.layers for one in listed.job.plan.stages] == [5, 3]
    counted = imported(
        "--pipeline-model-parallel-size 4 --num-layers 10 "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    )
    assert [one.layers for one in counted.job.plan.stages] == [2, 3, 3, 2]
    parted = imported(
        "--pipeline-model-parallel-size 4 --num-layers 10 "
        "--pp-partition-method type:transformer|embedding"
    )
    assert [one.layers for one in parted.job.plan.stages] == [2, 3, 3, 2]
    with pytest.raises(InputError, match="7 blocks in 2 stages, but the model has 8 blocks"):
        imported("--pipeline-model-parallel-size 2 --num-layer-list 4,3")


def test_a_stage_without_blocks_is_refused_in_words() -> None:
    with pytest.raises(
        InputError, match="one of 4 stages would have embedding or loss but no blocks"
    ):
        imported(
            "--pipeline-model-parallel-size 4 --num-layers 2 "
            "--pp-partition-method type:transformer|embedding"
        )


def test_what_is_missing_may_stand_in_an_unknown_word() -> None:
    with pytest.raises(
        InputError, match=r"--num-layers: is missing, or in a part .*\$GPT_ARGS is set no"
    ):
        imported("$GPT_ARGS", shape="--hidden-size 64 --num-attention-heads 4", run="--bf16")


@pytest.mark.parametrize(
    "more",
    [
        "--mtp-num-layers 99999999999999999999",
        "--pipeline-model-parallel-layout t*99999999999999",
        "--pipeline-model-parallel-layout (t|)*1001",
        "--window-size \u00b2,0 --window-attn-skip-freq \u00b2",
        "--moe-layer-freq [1]*99999999 --num-experts 8",
    ],
)
def test_numbers_without_measure_are_refused(more: str) -> None:
    with pytest.raises(InputError):
        imported(more)


@pytest.mark.parametrize(
    ("variables", "backend", "attention"),
    [
        ({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}, "", "math"),
        ({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1"}, "", "flash"),
        ({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}, "--attention-backend flash", "flash"),
        ({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}, "--attention-backend auto", "math"),
        ({"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "$X"}, "", "flash"),
    ],
)
def test_variables_of_transformer_engine_choose_attention(
    variables: dict[str, str], backend: str, attention: str
) -> None:
    run = RUN.replace("--use-flash-attn", backend)
    environment = {name: word(text) for name, text in variables.items()}
    command = launch(f"{SHAPE} {run}", environment=environment)
    found = read_launch(command, LaunchFile(text=""), Given(hardware=H100))
    assert found.job.workload.attention == attention


@pytest.mark.parametrize("name", ["--data-parallel-size", "--train-foo", "--moe-router-xyz"])
def test_unknown_options_are_not_counted_as_harmless_by_their_beginning(name: str) -> None:
    (told,) = [one for one in imported(f"{name} 4").remarks if one.choice != "options"]
    assert (told.kind, told.choice.split()[0]) == ("ignored", name)


@pytest.mark.parametrize(
    ("more", "attention"),
    [
        ("", "math"),
        ("--transformer-impl transformer_engine --attention-backend auto", "math"),
        ("--transformer-impl local", "flash"),
        ("--use-legacy-models", "flash"),
    ],
)
def test_variables_of_transformer_engine_decide_over_its_relative_s_switch(
    more: str, attention: str
) -> None:
    off = {name: word("0") for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")}
    command = launch(f"{SHAPE} {RUN} {more}", environment=off)
    found = read_launch(command, LaunchFile(text=""), Given(hardware=H100))
    assert found.job.workload.attention == attention
    told = texts(found, "contradicting").get("attention", "")
    assert ("predicted as unfused" in told) == (attention == "math")
