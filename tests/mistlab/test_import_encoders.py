"""BERT in launch files: read as model family ``bert``, with remarks on what the family leaves out;
multi-query attention over tensor-parallel ranks.
"""

from dataclasses import replace

import pytest

from mistlab.core.values import InputError
from mistlab.export.given import MissingError
from mistlab.formats.checkpoints import model_named
from tests.mistlab.launch_files import imported as imported_file
from tests.mistlab.launched import imported, texts

BERT = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 "
    "--max-position-embeddings 512"
)
PROGRAM = "pretrain_bert.py"


@pytest.mark.parametrize(
    "program", [PROGRAM, "../../pretrain_bert.py", "examples/bert/pretrain_bert.py"]
)
def test_bert_is_read_as_an_encoder_with_word_pieces(program: str) -> None:
    found = imported(shape=BERT, program=program)
    model = found.job.workload.model
    assert (model.is_encoder, model.layers, model.hidden) == (True, 24, 1024)
    assert (model.tied_embeddings, model.biases, model.norm) == (True, True, "layernorm")
    # Megatron-LM pads the vocabulary of bert-large-uncased to a multiple of 128.
    assert (model.vocab, model.dropout) == (30592, 0.1)
    assert "program" not in texts(found)


def test_what_the_family_leaves_out_of_bert_is_told() -> None:
    found = imported(shape=BERT, program=PROGRAM)
    assert texts(found, "assumed")["model.family"].startswith("bert, whose norms follow")
    # Segments, pooler and next-sentence head: 2 x 1024, 1024 x 1025 and 2 x 1025.
    assert "1,053,698 parameters" in texts(found, "ignored")["--bert-no-binary-head"]
    without = imported("--bert-no-binary-head", shape=BERT, program=PROGRAM)
    assert "--bert-no-binary-head" not in texts(without, "ignored")


@pytest.mark.parametrize(
    ("more", "vocab"),
    [
        ("--vocab-file bert-large-cased-vocab.txt", 28996),
        ("--tokenizer-type BertWordPieceCase --vocab-file vocab.txt", 28996),
        ("--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt", 30522),
        ("--vocab-file bert-base-chinese/vocab.txt", 21128),
        ("--vocab-size 1000", 1000),
        ("--vocab-size 1000 --tokenizer-type BertWordPieceCase --vocab-file vocab.txt", 1000),
    ],
)
def test_word_pieces_are_known_by_type_and_path(more: str, vocab: int) -> None:
    more += " --make-vocab-size-divisible-by 1"
    assert imported(more, shape=BERT, program=PROGRAM).job.workload.model.vocab == vocab


def test_other_word_pieces_are_asked_for() -> None:
    with pytest.raises(InputError, match=r"--vocab-size: is missing.*my\.txt"):
        imported("--vocab-file my.txt", shape=BERT, program=PROGRAM)


def test_a_tokenizer_of_encoders_needs_a_known_program() -> None:
    more = "--tokenizer-type BertWordPieceLowerCase"
    with pytest.raises(InputError, match=r"tokenizer of encoders, but mine\.py is not known to"):
        imported(more, shape=BERT, program="mine.py")
    model = imported(more, shape=BERT).job.workload.model
    assert (model.family, model.vocab) == ("gpt", 30592)


TEST = """
MODEL_ARGS:
  --num-layers: 24
  --hidden-size: 1024
  --num-attention-heads: 16
  --micro-batch-size: 4
  --global-batch-size: 128
  --seq-length: 512
  --vocab-file: ${DATA_PATH}/vocab.txt
  --pipeline-model-parallel-size: 2
"""


def test_a_test_of_megatron_is_bert_s_by_its_folder_or_options() -> None:
    family = imported_file(TEST, "test_cases/bert/a/model_config.yaml").job.workload.model.family
    assert family == "bert"
    by_option = f"{TEST}  --bert-no-binary-head: true\n"
    assert imported_file(by_option, "a.yaml").job.workload.model.family == "bert"
    assert imported_file(TEST, "test_cases/gpt/a/a.yaml").job.workload.model.family == "gpt"


NEMO = """
name: megatron_bert
trainer: {devices: 8, num_nodes: 1, precision: bf16}
model:
  micro_batch_size: 4
  global_batch_size: 64
  tensor_model_parallel_size: 2
  encoder_seq_length: 512
  num_layers: 12
  hidden_size: 768
  num_attention_heads: 12
  bert_binary_head: false
  tokenizer: {library: megatron, type: BertWordPieceLowerCase, vocab_file: vocab.txt}
"""


def test_nemo_s_bert_is_read() -> None:
    found = imported_file(NEMO)
    model = found.job.workload.model
    assert (model.family, model.vocab, found.job.workload.sequence_length) == ("bert", 30720, 512)
    assert "--bert-no-binary-head" not in texts(found, "ignored")
    with pytest.raises(InputError, match="name: bert_embedding trains embedding"):
        imported_file(NEMO.replace("megatron_bert", "bert_embedding"))


MASKED = """
torchrun --nproc_per_node 8 run_mlm.py --model_name_or_path bert-large-uncased \\
  --per_device_train_batch_size 8 --max_seq_length 512 --mlm_probability 0.15 --output_dir out
"""


def test_the_trainer_trains_encoders_on_masked_tokens() -> None:
    found = imported_file(MASKED, "a.sh")
    assert found.job.workload.model.name == "bert-large"
    assert "model.family" not in texts(found)
    unsaid = MASKED.replace("run_mlm.py", "train.py").replace("--mlm_probability 0.15", "")
    assert "predicted as trained on masked" in texts(imported_file(unsaid, "a.sh"))["model.family"]


@pytest.mark.parametrize(
    ("program", "field"), [("run_mlm.py", r"run_mlm\.py"), ("train.py", "mlm")]
)
def test_masked_tokens_of_a_decoder_are_refused(program: str, field: str) -> None:
    text = MASKED.replace("bert-large-uncased", "gpt2").replace("run_mlm.py", program)
    with pytest.raises(InputError, match=f"{field}: trains on masked tokens, which is not"):
        imported_file(text, "a.sh")


def test_values_of_options_are_no_programs() -> None:
    line = "deepspeed --num_gpus 8 train.py --deepspeed_config ds.json --model gpt2"
    given = {"sequence_length": 512, "global_batch": 32}
    files = {"ds__json": CONFIGURED}
    found = imported_file(f"{line} --data prepare_mlm.py\n", "a.sh", files, **given)
    assert found.job.workload.model.name == "gpt2"
    with pytest.raises(InputError, match=r"train_mlm\.py: trains on masked tokens"):
        imported_file(line.replace("train", "train_mlm"), "a.sh", files, **given)


@pytest.mark.parametrize(
    ("name", "layers", "vocab"),
    [
        ("google-bert/bert-base-uncased", 12, 30522),
        ("bert-large-cased", 24, 28996),
        ("FacebookAI/roberta-large", 24, 50265),
    ],
)
def test_encoders_are_known_by_name(name: str, layers: int, vocab: int) -> None:
    model = model_named(name)
    assert model is not None
    assert (model.is_encoder, model.layers, model.vocab) == (True, layers, vocab)


def test_ranks_that_copy_keys_have_a_head_each() -> None:
    found = imported("--attention-head-type multiquery --tensor-model-parallel-size 4")
    assert found.job.workload.model.kv_heads == 4
    assert texts(found, "assumed")["model.kv_heads"].startswith("1 for 4 tensor-parallel ranks")
    grouped = "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size"
    assert imported(f"{grouped} 4").job.workload.model.kv_heads == 4
    plain = imported(f"{grouped} 2")
    assert plain.job.workload.model.kv_heads == 2
    assert "model.kv_heads" not in texts(plain)


CONFIGURED = '{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4}'


@pytest.mark.parametrize("program", ["train_mlm.py", "train_bert.py"])
def test_a_configuration_of_deepspeed_does_not_hide_masks(program: str) -> None:
    line = f"deepspeed --num_gpus 8 {program} --deepspeed_config ds.json --model"
    given = {"sequence_length": 512, "global_batch": 32}
    files = {"ds__json": CONFIGURED}
    with pytest.raises(InputError, match=rf"{program}: trains on masked tokens, which"):
        imported_file(f"{line} gpt2\n", "a.sh", files, **given)
    with pytest.raises(MissingError, match=rf"{program}: .* give an encoder by --model"):
        imported_file(f"{line} mine\n", "a.sh", files, **given)
    found = imported_file(f"{line} bert-base-uncased\n", "a.sh", files, **given)
    assert found.job.workload.model.is_encoder


def test_megatron_core_gathers_where_forks_copy() -> None:
    ranks = "--tensor-model-parallel-size 4"
    copied = imported(f"--attention-head-type multiquery {ranks}")
    assert "which keep copies" in texts(copied, "assumed")["model.kv_heads"]
    found = imported(f"--group-query-attention --num-query-groups 2 {ranks}")
    model, text = found.job.workload.model, texts(found, "assumed")["model.kv_heads"]
    more = 2 * 2 * model.head_dim * model.hidden
    assert f"with {more:,} more parameters in a block" in text
    assert "gathers queries, keys and values of all ranks" in text


def test_a_model_by_name_has_a_key_head_for_each_rank_too() -> None:
    model = model_named("Qwen/Qwen2.5-0.5B")
    assert model is not None
    assert (model.heads, model.kv_heads) == (14, 2)
    model = replace(model, name="", heads=16, head_dim=64, hidden=1024)
    options = "--tensor-model-parallel-size 4 --seq-length 512"
    found = imported(options, shape="", model=model)
    assert found.job.workload.model.kv_heads == 4
    assert texts(found, "assumed")["model.kv_heads"].startswith("2 for 4 tensor-parallel")
    # A line that describes the model too makes no second remark of it.
    groups = "--group-query-attention --num-query-groups 2"
    sizes = f"--num-layers 24 --hidden-size 1024 --num-attention-heads 16 {groups}"
    described = imported(options, shape=sizes, model=model)
    assert described.job.workload.model.kv_heads == 4
    assert [remark.choice for remark in described.remarks].count("model.kv_heads") == 1
