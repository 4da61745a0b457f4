"""Models of Megatron-LM's options: hybrids, experts in turns, names of relatives, vocabularies."""

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import Given
from mistlab.export.megatron.megatron_parts import segments_of, shortest
from mistlab.export.megatron.megatron_read import read_options
from mistlab.plan.model_parts import Experts, StateSpace
from mistlab.plan.workload import ModelSpec
from tests.mistlab.launched import H100, SHAPE, imported, texts

NO_VOCAB = SHAPE.replace("--vocab-size 32000 --make-vocab-size-divisible-by 1", "")
GPT = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size "
    "50304 --attention-dropout 0 --hidden-dropout 0"
)
HYBRID = (
    "--hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 21504 --kv-channels 128 --seq-length 8192 --squared-relu "
    "--normalization RMSNorm --position-embedding-type none --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--vocab-size 131072 --mamba-num-heads 128"
)
NEMOTRON_H = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def model_of(more: str = "", shape: str = SHAPE, program: str = "pretrain_gpt.py") -> ModelSpec:
    return imported(more, shape=shape, program=program).job.workload.model


@pytest.mark.parametrize("option", ["--hybrid-override-pattern", "--hybrid-layer-pattern"])
def test_a_pattern_is_nemotron_h(option: str) -> None:
    found = imported(
        f"{option} {NEMOTRON_H} --is-hybrid-model", shape=HYBRID, program="pretrain_mamba.py"
    )
    assert found.job.workload.model == catalog.model("nemotron-h-8b")
    assert found.remarks == ()


def test_bars_of_a_pattern_are_stages_and_chunks() -> None:
    two = "--pipeline-model-parallel-size 2 --hybrid-layer-pattern"
    plan = imported(f"{two} M-M-*-|M-M-", shape=HYBRID).job.plan
    assert [one.layers for one in plan.stages] == [6, 4]
    chunks = imported(f"{two} M-|M-|M*|M-", shape=HYBRID).job.plan
    assert ([one.layers for one in chunks.stages], chunks.order) == ([4, 4], "interleaved-2")
    even = imported(f"{two} M-M-M-M-", shape=HYBRID).job.plan
    assert [one.layers for one in even.stages] == [4, 4]


def test_a_state_space_has_megatron_s_defaults() -> None:
    shape = HYBRID.replace("--mamba-num-heads 128", "")
    space = model_of("--hybrid-layer-pattern M-*-", shape).state_space
    assert space == StateSpace(heads=128, channels=64, groups=8, states=128)
    sizes = "--mamba-head-dim 32 --mamba-num-groups 4 --mamba-state-dim 64"
    space = model_of(f"--hybrid-layer-pattern M-*- {sizes}", shape).state_space
    assert space == StateSpace(heads=256, channels=32, groups=4, states=64)


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        # What Megatron-LM's own code makes of these shares (hybrid_layer_allocation.py).
        ("--num-layers 10 --hybrid-attention-ratio 0.2", "MMM*MM*MMM"),
        ("--num-layers 8 --hybrid-attention-ratio 0.0 --hybrid-mlp-ratio 0.5", "M-"),
        ("--num-layers 4 --is-hybrid-model", "M"),
    ],
)
def test_shares_make_a_pattern(more: str, pattern: str) -> None:
    assert model_of(more, HYBRID).pattern == pattern


def test_a_hybrid_s_program_is_enough() -> None:
    assert model_of("--num-layers 4", HYBRID, "pretrain_mamba.py").pattern == "M"
    assert model_of("--num-layers 4", HYBRID, "pretrain_gpt.py").pattern == ""


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("MM/M/M", "has blocks for multi-token prediction"),
        ("MGM", "'G' is a gated delta network, which hybrid models here cannot have"),
        ("M+M", r"'\+' is latent attention"),
        ("MxM", "'x' is not a kind of block"),
        ("||", "has no blocks"),
    ],
)
def test_patterns_that_no_model_has_are_refused(pattern: str, words: str) -> None:
    with pytest.raises(InputError, match=f"--hybrid-layer-pattern: line 40: .*{words}"):
        model_of(f"--hybrid-layer-pattern '{pattern}'", HYBRID)


def test_the_shortest_pattern_makes_the_same_blocks() -> None:
    assert [shortest(text) for text in ("M", "MM", "M-M-", "M-M", "DADA")] == [
        *("M", "M", "M-", "M-M", "DA")
    ]
    assert segments_of is not None


def test_squared_relu_is_read() -> None:
    plain = model_of("--squared-relu", GPT)
    assert (plain.mlp_type, plain.activation) == ("mlp", "relu2")


def test_blocks_with_and_without_experts_take_turns() -> None:
    more = "--num-experts 16 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
    turns = model_of(f"{more} --moe-layer-freq 2")
    assert (turns.pattern, turns.experts) == ("AD", Experts(count=16, active=2, ffn=5440))
    listed = model_of(f"{more} --moe-layer-freq '([0]*1+[1]*3)*2'")
    assert listed.pattern == "DAAA"
    first = model_of(f"{more} --moe-layer-freq '([0]*2+[1]*6)'")
    assert first.experts is not None
    assert (first.pattern, first.experts.dense_blocks) == ("", 2)
    replaced = model_of(f"{more} --first-k-dense-replace 3 --moe-layer-freq 1").experts
    assert replaced is not None
    assert replaced.dense_blocks == 3
    with pytest.raises(InputError, match="--multi-latent-attention: is not supported together"):
        model_of(f"{more} --moe-layer-freq 2 --multi-latent-attention --qk-layernorm")


def test_gated_delta_nets_are_qwen3_next() -> None:
    shape = (
        "--num-layers 48 --hidden-size 2048 --num-attention-heads 16 --group-query-attention "
        "--num-query-groups 2 --kv-channels 256 --ffn-hidden-size 512 --seq-length 4096 --swiglu "
        "--normalization RMSNorm --position-embedding-type rope --rotary-percent 0.25 "
        "--rotary-base 10000000 --qk-layernorm --attention-output-gate --disable-bias-linear "
        "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
        "--padded-vocab-size 151936 --num-experts 512 --moe-router-topk 10 "
        "--moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512 "
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 4"
    )
    assert model_of("--expert-model-parallel-size 8", shape) == catalog.model("qwen3-next-80b-a3b")
    with pytest.raises(InputError, match="dsa is not supported"):
        model_of("--experimental-attention-variant dsa")


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ("--group-query-attention", "kv_heads", 1),
        ("--group-query-attention --num-query-groups 4", "kv_heads", 4),
        ("--num_attention_heads_kv 2", "kv_heads", 2),
        ("--attention-head-type multiquery", "kv_heads", 1),
        ("--normalization rmsnorm", "norm", "rmsnorm"),
        ("--normalization layernorm", "norm", "layernorm"),
        ("--use_rms_norm", "norm", "rmsnorm"),
        ("--RMSNorm", "norm", "rmsnorm"),
        ("--glu-activation swiglu", "mlp_type", "gated_mlp"),
        ("--glu-activation geglu", "mlp_type", "gated_mlp"),
        ("--glu-activation swiglu", "ffn", 4096),
        ("--swiglu", "ffn", 2688),
        ("--no-tie-embed-logits", "tied_embeddings", False),
        ("--position-embedding-type rotary", "position_embedding", "rotary"),
        ("--position-embedding-type yarn", "position_embedding", "rotary"),
        ("--position-embedding-type alibi", "position_embedding", "none"),
        ("--no-position-embedding", "position_embedding", "none"),
        ("--position-embedding-type rope --rope-theta 500000", "rotary_base", 500_000.0),
        ("--model_name llama2", "biases", False),
        ("--model_name falcon --use_bias", "biases", True),
        ("--parallel-attn", "parallel_block", True),
        ("--apply-layernorm-rms", "norm", "rmsnorm"),
        ("--swiglu --multiple-of 256", "ffn", 2816),
        # Two thirds of 4096 are 2730, with 1.3 of them 3549.
        ("--swiglu --multiple-of 512 --hidden-dim-multiplier 1.3", "ffn", 3584),
        ("--disable-bias-linear-fc --disable-bias-attn-fc", "biases", False),
        ("--disable-bias-linear-fc", "biases", True),
        ("--add-bias-linear false", "biases", False),
        ("--encoder-num-layers 4", "layers", 8),
        ("--intermediate-size 2048", "ffn", 2048),
    ],
)
def test_names_of_relatives_are_read(more: str, field: str, value: object) -> None:
    assert getattr(model_of(more, GPT), field) == value


def test_a_gate_of_another_kind_is_told() -> None:
    said = texts(imported("--glu-activation geglu", shape=GPT), "assumed")
    assert said["--glu-activation geglu"] == "is predicted as SwiGLU, which costs as much"


def test_images_positions_are_refused() -> None:
    with pytest.raises(InputError, match="mrope is for models of images"):
        model_of("--position-embedding-type mrope")


@pytest.mark.parametrize(
    ("more", "vocab"),
    [
        ("", 50304),
        ("--tokenizer-type GPT2BPETokenizer", 50304),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file $DATA/gpt2-vocab.json", 50304),
        ("--vocab-file /x/gpt-neox-20b-tokenizer/vocab.json", 50304),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /x/tokenizer.model", 32000),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model $MODEL", 32000),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B",
            128256,
        ),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model /m/Llama-3.1-8B/tok.json",
            128256,
        ),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen2.5-7B", 151680),
        (
            "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path bigscience/tokenizer-bloom",
            250752,
        ),
        ("--tokenizer-type TikTokenizer --tokenizer-model x", 131072),
        ("--patch-tokenizer-type Qwen2Tokenizer --extra-vocab-size 293", 151936),
        ("--patch-tokenizer-type LLama3Tokenizer --extra-vocab-size 256", 128256),
        ("--padded-vocab-size 152064 --tokenizer-type PretrainedFromHF", 152064),
        ("--pad-vocab-size-to 250880 --tokenizer-type PretrainedFromHF", 250880),
        ("--vocab-size 1000 --make-vocab-size-divisible-by 64", 1024),
        ("--vocab-size 1000 --tokenizer-type NullTokenizer", 1024),
        ("--vocab-size 1024 --tokenizer-type NullTokenizer", 1152),
        ("--vocab-size 1000 --tokenizer-type SentencePieceTokenizer", 1024),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model t.model --vocab-size 64000", 64000),
    ],
)
def test_vocabularies_are_those_of_the_tokenizer(more: str, vocab: int) -> None:
    assert model_of(more, NO_VOCAB).vocab == vocab


@pytest.mark.parametrize(
    "more",
    [
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model my/own-model",
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model /x/tokenizer.model",
        "--tokenizer-type Llama2Tokenizer --tokenizer-model llm-jp/v4_alpha_1.0.model",
        "--tokenizer-type GPT2BPETokenizer --vocab-file /x/nordic_131072/vocab.json",
        "--tokenizer-type TokenizerFromFile --tokenizer-file x.json",
        "--patch-tokenizer-type BaichuanTokenizer --extra-vocab-size 0",
    ],
)
def test_an_unknown_tokenizer_is_asked_for_by_name(more: str) -> None:
    name = more.split()[1]
    with pytest.raises(InputError, match=f"--vocab-size: is missing, and the vocab.*{name}"):
        model_of(more, NO_VOCAB)
    given = imported(more, shape=NO_VOCAB, vocab_size=1000).job.workload.model
    assert given.vocab == 1024


def test_a_tokenizer_of_another_size_than_the_option_is_told() -> None:
    more = "--tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json --vocab-size 32000"
    found = imported(more, shape=NO_VOCAB)
    assert found.job.workload.model.vocab == 50304
    assert "has 50257 tokens: 50257 is used" in texts(found, "contradicting")["model.vocab"]


def test_a_null_tokenizer_s_further_token_is_told() -> None:
    found = imported("--vocab-size 1024 --tokenizer-type NullTokenizer", shape=NO_VOCAB)
    assert texts(found, "assumed")["model.vocab"].startswith(
        "1025 tokens, as NullTokenizer adds one"
    )


def test_sequences_of_a_decoder_beside_an_encoder_are_read() -> None:
    found = imported("--decoder-seq-length 8192 --max-position-embeddings 8192")
    assert found.job.workload.sequence_length == 8192
    assert ": 8192 is used" in texts(found, "contradicting")["sequence_length"]
    encoder = SHAPE.replace("--seq-length", "--encoder-seq-length")
    assert imported(shape=encoder).job.workload.sequence_length == 4096


def test_options_may_stand_alone() -> None:
    line = (
        f"{SHAPE} --micro-batch-size 1 --global-batch-size 8 --bf16 true --sequence-parallel false"
    )
    given = Given(hardware=H100, nodes=1, gpus_per_node=8)
    found = read_options(line.split(), given)
    assert found.job.plan.stages[0].data_parallel == 8
    assert found.job.workload.precision == "bf16"


def test_a_model_without_a_graph_is_told_first() -> None:
    found = imported("--squared-relu --lr 1", shape=GPT)
    assert (found.remarks[0].kind, found.remarks[0].choice) == ("noted", "prediction")
    assert found.remarks[0].text.startswith("this plan cannot be predicted as it is")
