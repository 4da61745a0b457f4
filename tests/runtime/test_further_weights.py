"""Heads for tokens after the next come from DeepSeek V3's checkpoints, and go back into them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from mistlab.core.values import InputError  # noqa: E402
from mistlab.job.job import model_from  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from runtime.checkpoints.huggingface_weights import (  # noqa: E402
    TensorFolder,
    check_checkpoint,
    rewrite,
    sources_of,
)
from runtime.checkpoints.tensor_files import write_tensors  # noqa: E402
from runtime.models.families import model_of  # noqa: E402
from tests.runtime.test_huggingface_weights import (  # noqa: E402
    MODELS,
    SIZES,
    through,
    workload_in,
)
from tests.runtime.worlds import sequences, stage  # noqa: E402

LAYERS = 4
LATER = f"model.layers.{LAYERS}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Any, Path]:
    """A model of transformers with a block too many, and a checkpoint that has it as DeepSeek's own
    have theirs: behind the others, with norms, a product, and copies of table and head."""
    kind, fields = MODELS["DeepSeek V3"]
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": LAYERS + 1}
    config = getattr(transformers, kind)(**(sizes | fields))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    folder = tmp_path / "given"
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    hidden = config.hidden_size
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{LATER}.{name}.weight"] = 1 + 0.2 * torch.randn(hidden)
    tensors[f"{LATER}.eh_proj.weight"] = 0.2 * torch.randn(hidden, 2 * hidden)
    tensors[f"{LATER}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{LATER}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    config.num_hidden_layers = LAYERS
    config.num_nextn_predict_layers = 1
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model, folder


def workload_with_later(folder: Path) -> Any:
    spec = model_from(f"{folder}/config.json#num_nextn_predict_layers", Path())
    return replace(workload_in(folder), model=spec)


def losses_of(model: Any, folder: Path, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of the next token and of the one after it, by transformers' blocks and DeepSeek's
    paper (arXiv 2412.19437, equations 21 to 24)."""
    own, block = load_file(folder / "model.safetensors"), model.model.layers[LAYERS]
    made: list[Tensor] = []
    last = model.model.layers[LAYERS - 1]
    hook = last.register_forward_hook(lambda _module, _given, output: made.append(output))
    model.model(tokens)
    hook.remove()
    (before,) = made
    logits = model.lm_head(model.model.norm(before))
    vectors = functional.embedding(targets, own["model.embed_tokens.weight"])
    both = [norm(vectors, own[f"{LATER}.enorm.weight"]), norm(before, own[f"{LATER}.hnorm.weight"])]
    joint = torch.cat(both, -1) @ own[f"{LATER}.eh_proj.weight"].T
    angles = model.model.rotary_emb(joint, torch.arange(tokens.shape[1])[None])
    mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)[None, None]
    later = block(joint, attention_mask=mask, position_embeddings=angles)
    later = later[0] if isinstance(later, tuple) else later
    further = model.lm_head(norm(later, own[f"{LATER}.shared_head.norm.weight"]))
    return (
        functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        functional.cross_entropy(further[:, :-1].flatten(0, 1), targets[:, 1:].flatten()),
    )


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def test_the_loss_of_later_tokens_is_deepseek_s_before_and_after_a_plan(
    checkpoint: tuple[Any, Path], tmp_path: Path
) -> None:
    model, given = checkpoint
    work, folder = workload_with_later(given), TensorFolder(given)
    assert work.model.further_tokens == 1
    assert not any("left out" in one for one in work.model.remarks)
    check_checkpoint(work, folder)
    rows = sequences(work, 0)
    tokens, targets = rows[:, :-1], rows[:, 1:]
    here, sources = model_of(work), sources_of(work.model, folder)
    for name, parameter in (*here.named_parameters(), *here.named_corrections()):
        parameter.data.copy_(sources[name].made(folder))
    with torch.no_grad():
        next_one, later = losses_of(model, given, tokens, targets)
        torch.testing.assert_close(here(tokens, targets), next_one + 0.3 * later)

    sharded = {"tensor_parallel": 2, "data_parallel": 2, "micro_batch": 2, "zero": 3}
    one = stage(2, **sharded, expert_parallel=2)
    weights = through(work, Plan(micro_batches=2, stages=(one, one)), folder)
    exported = tmp_path / "exported.safetensors"
    kinds = {name: (tuple(one.shape), torch.float32) for name, one in weights.items()}
    write_tensors(exported, iter(weights.items()), kinds)
    rewrite(exported, work.model, folder, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    before = load_file(given / "model.safetensors")
    assert again.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(again[name], tensor), name


def test_copies_that_are_none_are_refused(checkpoint: tuple[Any, Path]) -> None:
    _, given = checkpoint
    tensors = load_file(given / "model.safetensors")
    tensors[f"{LATER}.shared_head.head.weight"][0, 0] += 1
    save_file(tensors, given / "model.safetensors")
    folder = TensorFolder(given)
    words = r"4.shared_head.head.weight differs from lm_head.weight, .*: give workload.model"
    with pytest.raises(InputError, match=words):
        check_checkpoint(workload_with_later(given), folder)
    check_checkpoint(workload_in(given), folder)


def test_a_file_without_later_blocks_has_none_to_name(checkpoint: tuple[Any, Path]) -> None:
    _, given = checkpoint
    text = (given / "config.json").read_text("utf-8")
    (given / "config.json").write_text(
        text.replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 0'), "utf-8"
    )
    with pytest.raises(InputError, match=r"num_nextn_predict_layers: the file has no blocks for m"):
        workload_with_later(given)
