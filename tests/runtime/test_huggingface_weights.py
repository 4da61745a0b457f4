"""Checkpoints of Hugging Face: the same logits as transformers' models, in and out of any plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from mistlab.core.values import InputError  # noqa: E402
from mistlab.job.job import model_from  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from runtime.checkpoints.huggingface_weights import (  # noqa: E402
    TensorFolder,
    check_checkpoint,
    load_weights,
    rewrite,
    sources_of,
)
from runtime.checkpoints.tensor_files import write_tensors  # noqa: E402
from runtime.comm.topology import connected  # noqa: E402
from runtime.engine.executor import Executor  # noqa: E402
from runtime.engine.streams.device_streams import SimulatedStreams  # noqa: E402
from runtime.models.families import model_of  # noqa: E402
from runtime.runnable import check_model  # noqa: E402
from tests.runtime.thread_ranks import Meeting, run_threads  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    CPU,
    TRAINING,
    sequences,
    stage,
    thread_groups,
    whole_weights,
)

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GROUPED = {"num_key_value_heads": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {**GROUPED, "rms_norm_eps": 1e-5}),
    "Llama with one table": (
        "LlamaConfig",
        {**GROUPED, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    ),
    "Qwen3": ("Qwen3Config", {**GROUPED, "rms_norm_eps": 1e-6, "head_dim": 16}),
    "Mixtral": (
        "MixtralConfig",
        {
            **GROUPED,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    ),
    "DeepSeek with plain networks": (
        "DeepseekV3Config",
        {
            **LATENT,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "first_k_dense_replace": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "DeepSeek V3": (
        "DeepseekV3Config",
        {
            **LATENT,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_group": 4,
            "topk_group": 2,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
    ),
    "Qwen3 with experts": (
        "Qwen3MoeConfig",
        {
            **GROUPED,
            "rms_norm_eps": 1e-6,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            **GROUPED,
            "rms_norm_eps": 1e-5,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "swiglu_limit": 1.0,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "Llama 3.1": (
        "LlamaConfig",
        {
            **GROUPED,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "Llama with slower turns": (
        "LlamaConfig",
        {
            **GROUPED,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "Llama with a larger base for longer sequences": (
        "LlamaConfig",
        {
            **GROUPED,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    **{
        f"Llama with longrope, trained with {positions} tokens first": (
            "LlamaConfig",
            {
                **GROUPED,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0, 1.1, 1.3, 1.7],
                    "long_factor": [1.0, 2.5, 6.0, 30.0],
                    "original_max_position_embeddings": positions,
                },
            },
        )
        for positions in (8, 32)
    },
    "GPT-2": ("GPT2Config", {"n_inner": 48, "max_position_embeddings": 16}),
    "Falcon": (
        "FalconConfig",
        {
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "num_kv_heads": 2,
            "ffn_hidden_size": 48,
        },
    ),
    "Falcon with biases, one part after the other": (
        "FalconConfig",
        {
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "ffn_hidden_size": 48,
            "tie_word_embeddings": False,
        },
    ),
}


@pytest.fixture(params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A model of transformers with random weights, and the folder that it was saved in."""
    kind, fields = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**(SIZES | fields))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():  # norms and biases too, which begin as ones and zeros
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.add_(torch.randn_like(buffer), alpha=0.1)
    folder = tmp_path / "given"
    model.save_pretrained(folder)
    return model, folder


def workload_in(folder: Path) -> Workload:
    spec = model_from(str(folder / "config.json"), Path())
    return Workload(
        model=spec, sequence_length=16, global_batch=8, attention="flash", precision="fp32"
    )


def logits_here(work: Workload, folder: TensorFolder, tokens: Any) -> Any:
    model, sources = model_of(work), sources_of(work.model, folder)
    for name, parameter in (*model.named_parameters(), *model.named_corrections()):
        parameter.data.copy_(sources[name].made(folder))
    with torch.no_grad():
        return model(tokens)


def test_logits_are_those_of_transformers_before_and_after_a_plan(
    checkpoint: tuple[Any, Path], tmp_path: Path
) -> None:
    model, given = checkpoint
    work, folder = workload_in(given), TensorFolder(given)
    check_checkpoint(work, folder)
    tokens = sequences(work, 0)[:, :-1]
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(logits_here(work, folder, tokens), expected, rtol=1e-5, atol=1e-5)

    experts = {"expert_parallel": 2} if work.model.experts else {}
    sharded = {"tensor_parallel": 2, "data_parallel": 2, "micro_batch": 2, "zero": 3, **experts}
    plan = Plan(micro_batches=2, stages=(stage(2, **sharded), stage(2, **sharded)))
    weights = through(work, plan, folder)

    exported = tmp_path / "exported.safetensors"
    kinds = {name: (tuple(one.shape), torch.float32) for name, one in weights.items()}
    write_tensors(exported, iter(weights.items()), kinds)
    out = tmp_path / "again"
    rewrite(exported, work.model, folder, out)
    again = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, expected, rtol=0, atol=0)


def through(work: Workload, plan: Plan, folder: TensorFolder) -> dict[str, Any]:
    """The weights that a plan's ranks hold after they have read a checkpoint, put together."""

    def rank_of(rank: int, meeting: Meeting) -> Executor:
        tied = work.model.tied_embeddings
        has_experts = work.model.experts is not None
        groups = thread_groups(meeting, rank)
        connections = connected(plan, rank, groups, tied=tied, experts=has_experts)
        executor = Executor(
            work, plan, connections, SimulatedStreams(), TRAINING, device=CPU, seed=None
        )
        load_weights(executor, folder)
        return executor

    return whole_weights(work, run_threads(plan.num_gpus, rank_of))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, **GROUPED, rms_norm_eps=1e-5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    work, folder = workload_in(tmp_path), TensorFolder(tmp_path)
    larger = Workload(
        model=model_from({"family": "llama", "hidden": 64, "layers": 4, "heads": 4}, Path()),
        sequence_length=16,
        global_batch=8,
        attention="flash",
        precision="fp32",
    )
    with pytest.raises(
        InputError, match=r"has hidden 32, but the plan's model has 64: give workload.model"
    ):
        check_checkpoint(larger, folder)
    with pytest.raises(InputError, match=r"config.json cannot be read"):
        check_checkpoint(work, TensorFolder(tmp_path / "nowhere"))
    file = next(tmp_path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-400])
    with pytest.raises(InputError, match=r"reaches beyond the end of the file, which is truncated"):
        check_checkpoint(work, TensorFolder(tmp_path))


def test_types_without_known_names_are_refused(tmp_path: Path) -> None:
    config = transformers.GPTNeoXConfig(**SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"names of tensors of model_type gpt_neox"):
        sources_of(workload_in(tmp_path).model, TensorFolder(tmp_path))


def test_learned_positions_say_the_length_of_sequences(tmp_path: Path) -> None:
    config = transformers.GPT2Config(**SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"give workload.sequence_length: 64"):
        check_checkpoint(workload_in(tmp_path), TensorFolder(tmp_path))


def saved(folder: Path, **changes: Any) -> Workload:
    """A tiny Llama in a folder, whose configuration has some other content."""
    config = transformers.LlamaConfig(**SIZES, **GROUPED, rms_norm_eps=1e-5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")
    return workload_in(folder)


def with_tensor(folder: Path, name: str) -> None:
    """One more tensor in a folder's file."""
    (file,) = folder.glob("*.safetensors")
    tensors = {**load_file(file), name: torch.zeros(3)}
    save_file(tensors, file)


def test_a_tensor_that_nothing_is_made_of_is_refused_by_name(tmp_path: Path) -> None:
    work = saved(tmp_path)
    with_tensor(tmp_path, "model.layers.0.self_attn.rotary_emb.inv_freq")
    check_checkpoint(work, TensorFolder(tmp_path))
    with_tensor(tmp_path, "model.layers.1.self_attn.q_proj.bias")
    with pytest.raises(
        InputError,
        match=r"no parameter of the plan's model is loaded from model.layers.1.self_attn.q_proj",
    ):
        check_checkpoint(work, TensorFolder(tmp_path))


def test_blocks_for_later_tokens_may_be_left_out(tmp_path: Path) -> None:
    work = saved(tmp_path, num_nextn_predict_layers=1)
    with_tensor(tmp_path, "model.layers.4.eh_proj.weight")
    check_checkpoint(work, TensorFolder(tmp_path))
    with_tensor(tmp_path, "model.layers.5.eh_proj.weight")
    with pytest.raises(InputError, match=r"is loaded from model.layers.5.eh_proj.weight: give"):
        check_checkpoint(work, TensorFolder(tmp_path))


def test_rotary_embedding_that_is_rescaled_otherwise_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "proportional", "rope_theta": 10000.0, "factor": 4.0}
    work = saved(tmp_path, rope_parameters=rope)
    with pytest.raises(
        InputError, match=r"rope_type proportional is not supported here: give .* yarn"
    ):
        check_checkpoint(work, TensorFolder(tmp_path))
    with pytest.raises(InputError, match=r"not trained yet: rotary_scaling is other, .*: give an"):
        check_model(work)


def test_a_plan_without_the_checkpoint_s_scaling_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    work = saved(tmp_path, rope_parameters=rope)
    plain = replace(work, model=replace(work.model, rotary_scaling=None))
    with pytest.raises(InputError, match=r"has rotary_scaling .*the plan's model has None: give"):
        check_checkpoint(plain, TensorFolder(tmp_path))
