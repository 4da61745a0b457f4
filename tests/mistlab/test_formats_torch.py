"""torchtitan and nanotron: keys that cost, and what is refused."""

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import Imported
from tests.mistlab.launch_files import imported, imported_from, source_of

TITAN = """
[model]
name = "{kind}"
flavor = "{flavour}"
{model}
[job]
dump_folder = "out"
[training]
seq_len = 4096
local_batch_size = 4
[parallelism]
data_parallel_shard_degree = -1
{more}
"""


def titan(kind: str = "llama3", flavour: str = "8B", model: str = "", more: str = "") -> Imported:
    text = TITAN.format(kind=kind, flavour=flavour, model=model, more=more)
    return imported(text, "run.toml", nodes=2, gpus_per_node=8)


def test_a_misspelt_key_of_a_section_is_told_with_the_right_one() -> None:
    remarks = titan(more="tensor_paralel_degree = 2").remarks
    told = {one.choice: one.text for one in remarks if one.kind == "ignored"}
    assert told["parallelism.tensor_paralel_degree"] == (
        "is not supported here (did you mean tensor_parallel_degree?): the prediction leaves it out"
    )


@pytest.mark.parametrize(
    ("kind", "flavour", "name"),
    [
        ("llama3", "8B", "llama3-8b"),
        ("llama3", "405B", "llama3-405b"),
        ("llama3_ft", "8B_flex", "llama3-8b"),
        ("llama4", "17bx16e", "llama4-scout"),
        ("deepseek_v3", "16B", "deepseek-v2-lite"),
        ("deepseek_v3", "671B", "deepseek-v3"),
        ("qwen3", "0.6B", "qwen3-0.6b"),
        ("qwen3", "30B-A3B", "qwen3-30b-a3b"),
    ],
)
def test_flavours_of_torchtitan_are_models_of_the_catalogue(
    kind: str, flavour: str, name: str
) -> None:
    assert titan(kind, flavour).job.workload.model == catalog.model(name)


def test_compilation_and_converters_of_torchtitan_choose_the_engine() -> None:
    assert titan(more="[compile]\nenable = true").job.plan.engine == "fsdp-compiled"
    blocks = '[compile]\nenable = true\ncomponents = ["model"]'
    assert titan(more=blocks).job.plan.engine == "fsdp-compiled-blocks"
    assert titan(more="[compile]\nenable = false").job.plan.engine == "fsdp-eager"
    rows = '[compile]\nenable = true\n[quantize.linear.float8]\nrecipe_name = "rowwise"'
    job = titan(model='converters = ["quantize.linear.float8"]', more=rows).job
    assert (job.workload.precision, job.plan.engine) == ("fp8", "fsdp-compiled-rowwise")
    with pytest.raises(InputError, match="lora trains adapters only"):
        titan(model='converters = ["lora"]')


def test_keys_of_the_first_torchtitan_are_read_where_they_stood() -> None:
    text = """
        [job]
        dump_folder = "out"
        [model]
        name = "llama3"
        flavor = "8B"
        [training]
        batch_size = 8
        seq_len = 8192
        data_parallel_degree = -1
        tensor_parallel_degree = 2
        compile = true
        [experimental]
        pipeline_parallel_degree = 2
        pipeline_parallel_microbatches = 4
        [activation_checkpoint]
        mode = "full"
    """
    job = imported(text, "run.toml", nodes=2, gpus_per_node=8).job
    first, _ = job.plan.stages
    assert (first.tensor_parallel, first.data_parallel, first.micro_batch) == (2, 4, 2)
    assert (job.plan.micro_batches, first.checkpointed_layers, job.plan.engine) == (
        4,
        16,
        "fsdp-compiled",
    )


REGISTRY = '''
from torchtitan.trainer import Trainer
from . import model_registry


def llama3_8b() -> Trainer.Config:
    """A configuration."""
    model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(emulate=False)])
    return Trainer.Config(
        model_spec=model_spec,
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192
        ),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
        compile=CompileConfig(enable=True),
    )


def llama3_8b_long() -> Trainer.Config:
    config = llama3_8b()
    config.training.max_context_length = 16384
    return config


def llama3_strange() -> Trainer.Config:
    for size in range(3):
        print(size)
    return llama3_8b()
'''


def of_registry(name: str | None) -> Imported:
    source = source_of(REGISTRY, "torchtitan/models/llama3/config_registry.py")
    if name is not None:
        object.__setattr__(source, "settings", {"CONFIG": name})
    given = {"nodes": 1, "gpus_per_node": 8}
    return imported_from(source, **given)


def test_a_registry_of_torchtitan_is_read_and_never_run() -> None:
    job = of_registry("llama3_8b").job
    (stage,) = job.plan.stages
    assert job.workload.model == catalog.model("llama3-8b")
    assert (job.workload.sequence_length, stage.micro_batch) == (8192, 2)
    assert (stage.tensor_parallel, stage.data_parallel, stage.checkpointed_layers) == (2, 4, 32)
    assert (job.workload.precision, job.plan.engine) == ("fp8", "fsdp-compiled")
    longer = of_registry("llama3_8b_long").job
    assert (longer.workload.sequence_length, longer.plan.stages[0].micro_batch) == (16384, 1)


def test_a_registry_asks_which_and_refuses_what_it_cannot_follow() -> None:
    with pytest.raises(InputError, match="by --set CONFIG=NAME, where NAME is one of llama3_8b, "):
        of_registry(None)
    with pytest.raises(InputError, match="has no configuration 'llama3_9b'"):
        of_registry("llama3_9b")
    with pytest.raises(InputError, match="line 27: llama3_strange does more than build"):
        of_registry("llama3_strange")


NANOTRON = """
parallelism: {dp: 2, tp: 2, pp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER, recompute_layer: true}
model:
  dtype: bfloat16
  model_config:
    is_llama_config: true
    hidden_size: 1024
    num_hidden_layers: 8
    num_attention_heads: 8
    num_key_value_heads: 4
    intermediate_size: 4096
    vocab_size: 49152
    tie_word_embeddings: true
tokens: {sequence_length: 2048, micro_batch_size: 4, batch_accumulation_per_replica: 8}
optimizer: {zero_stage: 1}
"""


def test_nanotron_s_file_is_a_plan() -> None:
    job = imported(NANOTRON).job
    model, (first, _) = job.workload.model, job.plan.stages
    assert (model.layers, model.kv_heads, model.tied_embeddings) == (8, 4, True)
    assert (first.data_parallel, first.tensor_parallel, first.sequence_parallel) == (2, 2, 1)
    assert (first.zero, first.checkpointed_layers, first.micro_batch) == (1, 4, 4)
    assert (job.plan.micro_batches, job.workload.global_batch, job.plan.order) == (8, 64, "1f1b")
    assert job.plan.engine == "nanotron"
    # Without a word nanotron runs all passes forward, then all backward.
    assert imported(NANOTRON.replace("pp_engine: 1f1b, ", "")).job.plan.order == "gpipe"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("hidden_size: 1024", "x: 1", "model.model_config.hidden_size: is missing"),
        ("is_llama_config", "is_starcoder2_config", "StarCoder 2 of nanotron is not supported"),
        (
            "zero_stage: 1",
            "zero_stage: 3",
            "optimizer.zero_stage: 3 is unknown .*: give 0 or 1",
        ),
        ("dtype: bfloat16", "dtype: int8", "model.dtype: 'int8' is unknown"),
        ("pp_engine: 1f1b", "pp_engine: zb", "parallelism.pp_engine: 'zb' is unknown"),
        (
            "dp: 2",
            "dp: 2, expert_parallel_size: 2",
            "the model has no experts: give 1, or a --model",
        ),
    ],
)
def test_what_nanotron_cannot_be_is_refused(old: str, new: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(NANOTRON.replace(old, new))


def test_a_key_that_stands_twice_is_told_and_the_last_counts() -> None:
    twice = "micro_batch_size: 4, micro_batch_size: 2"
    found = imported(NANOTRON.replace("micro_batch_size: 4", twice))
    assert found.job.plan.stages[0].micro_batch == 2
    (remark,) = (one for one in found.remarks if one.kind == "contradicting")
    assert remark.choice == "micro_batch_size (line 14)"
    assert remark.text == "is given twice in one mapping: the last value is used"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NANOTRON, "hidden (2560 instead of 1024)"),
        (NANOTRON.replace("hidden_size", "width"), "because the file's model cannot be read"),
        (
            '[model]\nname = "llama3"\nflavor = "8B"\n[job]\n[training]\nseq_len = 4096\n',
            "hidden (2560 instead of 4096)",
        ),
    ],
)
def test_a_given_model_is_held_against_the_file_s_own(text: str, words: str) -> None:
    given = {"model": catalog.model("gpt3-2.7b"), "nodes": 1, "gpus_per_node": 8}
    found = imported(text, "run.toml" if text.startswith("[") else "run.yaml", **given)
    (told,) = [remark.text for remark in found.remarks if remark.choice == "model"]
    assert words in told
    assert found.job.workload.model == catalog.model("gpt3-2.7b")
