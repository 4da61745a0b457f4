"""Weights of Hugging Face checkpoints: reads them for a plan's ranks, and writes a run's weights in
their format.

A checkpoint is a folder with ``config.json`` and safetensors files. It stores the matrices of a
model separately. The runtime fuses queries, keys and values into one matrix, gates with the values
beside them, and all experts of a block into one tensor.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from mistlab.core.values import reject
from mistlab.huggingface.rotary_keys import SCALINGS
from mistlab.huggingface.type_keys import UNSCALED, scaling_kind
from mistlab.job.job import model_from
from mistlab.plan.model_parts import Experts
from mistlab.plan.workload import ModelSpec, Workload
from runtime.checkpoints.tensor_files import TensorPlace, tensors_of, write_tensors
from runtime.engine.executor import Executor
from runtime.engine.work.stage_modules import initial_tensor
from runtime.models.experts import CORRECTION
from runtime.models.families import is_adapter, shapes_of_model

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
_GIVE_FOLDER = "give the folder of a Hugging Face checkpoint"


# Reads the tensors in a folder of safetensors files.


class TensorFolder:
    """The tensors in the safetensors files of a folder, by name; each is read when it is needed."""

    def __init__(
        self, folder: Path, option: str = "--weights", *, files: Sequence[Path] = ()
    ) -> None:
        self.folder, self.option, self._given = folder, option, files

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of the folder's ``config.json``."""
        try:
            content = json.loads((self.folder / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reject(
                f"{self.option} {self.folder}: {CONFIG} cannot be read "
                f"({getattr(error, 'strerror', None) or error}): {_GIVE_FOLDER}"
            )
        if not isinstance(content, dict):
            reject(f"{self.option} {self.folder}: {CONFIG} is no JSON object: {_GIVE_FOLDER}")
        return content

    @cached_property
    def _places(self) -> dict[str, TensorPlace]:
        return {name: place for file in self._files() for name, place in tensors_of(file)}

    def _files(self) -> list[Path]:
        if self._given:
            return list(self._given)
        index = self.folder / INDEX
        try:
            if index.exists():
                names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
                return [self.folder / name for name in dict.fromkeys(names)]
        except (OSError, ValueError, KeyError, AttributeError) as error:
            reject(
                f"{self.option} {self.folder}: {INDEX} cannot be read "
                f"({getattr(error, 'strerror', None) or error}): copy the checkpoint again"
            )
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            reject(f"{self.option} {self.folder}: has no *.safetensors: {_GIVE_FOLDER}")
        return files

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors in the folder's files."""
        return tuple(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of the folder; raises an error for an unknown name."""
        return self._place(name).shape

    def kind(self, name: str) -> torch.dtype:
        """The data type of a tensor of the folder."""
        return self._place(name).kind

    def read(self, name: str) -> Tensor:
        """A tensor of the folder, converted to 32 bits."""
        tensor_place = self._place(name)
        whole = (
            torch.from_numpy(np.array(_mapped(tensor_place)))
            .view(tensor_place.kind)
            .view(tensor_place.shape)
        )
        return whole.float()

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors have equal bits; they are compared in parts."""
        first, two = self._place(name), self._place(other)
        alike = (first.shape, first.kind) == (two.shape, two.kind)
        return alike and np.array_equal(_mapped(first), _mapped(two))

    def _place(self, name: str) -> TensorPlace:
        if name not in self._places:
            reject(
                f"{self.option} {self.folder}: has no tensor {name}: give a checkpoint of the "
                "model that the plan names"
            )
        return self._places[name]


def _mapped(tensor_place: TensorPlace) -> np.ndarray:
    """The bytes of a tensor, mapped into memory."""
    size = (tensor_place.size_bytes,)
    return np.memmap(tensor_place.file, np.uint8, "r", offset=tensor_place.begin, shape=size)


# Says of which tensors of a checkpoint each parameter of the runtime is made.


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """The tensors of a checkpoint that make up one parameter of the runtime.

    Their rows are concatenated (``stacked`` is the number of tensors per expert); then row i of the
    parameter is row ``order[i]``. A single tensor may be ``transposed``; if it holds the weights
    ``of_all`` experts, it is reordered and transposed expert by expert. If ``turned``, the second
    half of the columns comes first.
    """

    tensors: tuple[str, ...]
    stacked: int = 0
    order: tuple[int, ...] | None = None
    transposed: bool = False
    of_all: bool = False
    turned: bool = False

    @classmethod
    def of(cls, *tensors: str) -> Self:
        """The source of a parameter: these tensors, their rows concatenated in this order."""
        return cls(tensors=tensors)

    def made(self, folder: TensorFolder) -> Tensor:
        """The parameter, made from the tensors of a checkpoint."""
        parts = [folder.read(name) for name in self.tensors]
        if self.of_all:
            whole = parts[0].mT if self.transposed else parts[0]
            return whole if self.order is None else whole[:, list(self.order)]
        if self.transposed:
            return parts[0].T
        if self.turned:
            return _turned(parts[0])
        if self.stacked:
            groups = [parts[at : at + self.stacked] for at in range(0, len(parts), self.stacked)]
            return torch.stack([torch.cat(group) for group in groups])
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole if self.order is None else whole[list(self.order)]

    def shape(self, folder: TensorFolder) -> tuple[int, ...]:
        """The shape of the parameter that these tensors make up."""
        shapes = [folder.shape(name) for name in self.tensors]
        if self.of_all:
            count, *sizes = shapes[0]
            return (count, *(sizes[::-1] if self.transposed else sizes))
        if self.transposed:
            return shapes[0][::-1]
        count = len(shapes) // self.stacked if self.stacked else 1
        rows = sum(shape[0] for shape in shapes) // count
        stacked_shape = (rows, *shapes[0][1:])
        return (count, *stacked_shape) if self.stacked else stacked_shape

    def taken_apart(self, whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """A trained parameter split into the checkpoint's tensors, which have ``sizes`` rows."""
        if self.of_all:
            if self.order is not None:
                back = torch.empty_like(whole)
                back[:, list(self.order)] = whole
                whole = back
            return [whole.mT if self.transposed else whole]
        if self.transposed:
            return [whole.T]
        if self.turned:
            return [_turned(whole)]
        if self.stacked:
            stacked_sizes = sizes[: self.stacked]
            return [part for expert in whole for part in expert.split(list(stacked_sizes))]
        if self.order is not None:
            back = torch.empty_like(whole)
            back[list(self.order)] = whole
            whole = back
        return list(whole.split(list(sizes)))


def _turned(matrix: Tensor) -> Tensor:
    """The matrix with the second half of its columns first."""
    return torch.cat(matrix.chunk(2, 1)[::-1], 1)


def sources_of(spec: ModelSpec, folder: TensorFolder) -> dict[str, TensorSource]:
    """For each parameter of a model, the tensors of the checkpoint that make it up; raises an error
    for a model type whose tensor names are unknown.
    """
    model_type = str(folder.config.get("model_type", ""))
    if model_type in FUSED:
        return dict(_of_fused(spec, folder, model_type))
    if model_type not in NAMED_LIKE_LLAMA:
        known = ", ".join(sorted((*NAMED_LIKE_LLAMA, *FUSED)))
        reject(
            f"{folder.option} {folder.folder}: names of tensors of model_type "
            f"{model_type or 'nothing'} are unknown: give a checkpoint of {known}, or start from "
            "random weights"
        )
    sources = {
        "embedding.tokens.weight": TensorSource.of("model.embed_tokens.weight"),
        "head.norm.weight": TensorSource.of("model.norm.weight"),
        "head.projection.weight": TensorSource.of(
            "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
        ),
    }
    for block in range(spec.layers):
        for name, source in _of_block(spec, block, model_type, f"model.layers.{block}"):
            sources[f"blocks.{block}.{name}"] = source
    for number in range(spec.further_tokens):
        sources |= _of_further(spec, number, model_type)
    if spec.further_tokens and not spec.tied_embeddings:
        sources[TABLE_OF_HEAD] = sources["embedding.tokens.weight"]
    return sources


TABLE_OF_HEAD = "head.table.weight"
# Tensors of a multi-token prediction block that only copy a parameter, with the copied parameter.
COPIES: Mapping[str, str] = {
    "embed_tokens.weight": "embedding.tokens.weight",
    "shared_head.head.weight": "head.projection.weight",
}


def _of_further(spec: ModelSpec, number: int, model_type: str) -> dict[str, TensorSource]:
    """The checkpoint's tensors for a multi-token prediction head. DeepSeek stores the head as a
    further block, and concatenates the token's vector and the previous hidden state in this order.
    """
    path, prefix = f"model.layers.{spec.layers + number}", f"head.further.{number}"
    norms = {"norm": "hnorm", "token_norm": "enorm", "last_norm": "shared_head.norm"}
    sources = {
        f"{prefix}.{name}.weight": TensorSource.of(f"{path}.{its}.weight")
        for name, its in norms.items()
    }
    sources[f"{prefix}.joint.weight"] = TensorSource(
        tensors=(f"{path}.eh_proj.weight",), turned=True
    )
    block = _of_block(spec, spec.layers - 1, model_type, path)
    return sources | {f"{prefix}.block.{name}": source for name, source in block}


def copies_in(spec: ModelSpec, folder: TensorFolder) -> dict[str, str]:
    """The tensors of a checkpoint that copy other tensors, each with the copied parameter."""
    paths = [f"model.layers.{spec.layers + number}" for number in range(spec.further_tokens)]
    table = "embedding.tokens.weight"
    own_of = {name: table if spec.tied_embeddings else own for name, own in COPIES.items()}
    pairs = {f"{path}.{name}": own for path in paths for name, own in own_of.items()}
    return {name: own for name, own in pairs.items() if name in folder}


def _check_copies(
    spec: ModelSpec, folder: TensorFolder, sources: Mapping[str, TensorSource]
) -> None:
    """Raise an error if a copy differs from its original, since only the original is trained."""
    for name, source_name in copies_in(spec, folder).items():
        (whole,) = sources[source_name].tensors
        if not folder.equal(name, whole):
            reject(
                f"{folder.option} {folder.folder}: {name} differs from {whole}, which it copies in "
                f"DeepSeek's checkpoints: give workload.model: {folder.folder / CONFIG}, which "
                "leaves blocks for tokens after the next out"
            )


NAMED_LIKE_LLAMA = (
    *("llama", "mistral", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"),
)

# Model types that fuse queries, keys and values, with their names for the parts of a block.
FUSED: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    "falcon": {
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attention.query_key_value",
        "attention.output": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
}


def _of_fused(
    spec: ModelSpec, folder: TensorFolder, model_type: str
) -> Iterator[tuple[str, TensorSource]]:
    """The checkpoint's tensors for GPT-2, whose matrices are transposed, or for Falcon, which
    stores each key head after its query heads. Early files of GPT-2 omit the prefix of names.
    """
    is_gpt2 = model_type == "gpt2"
    tokens = "wte" if is_gpt2 else "word_embeddings"
    bare = f"{tokens}.weight" in folder
    first = "" if bare else "transformer."
    yield "embedding.tokens.weight", TensorSource.of(f"{first}{tokens}.weight")
    if is_gpt2:
        yield "embedding.positions", TensorSource.of(f"{first}wpe.weight")
    for kind in ("weight", "bias"):
        yield f"head.norm.{kind}", TensorSource.of(f"{first}ln_f.{kind}")
    head = f"{first}{tokens}" if spec.tied_embeddings else "lm_head"
    yield "head.projection.weight", TensorSource.of(f"{head}.weight")
    order = None if is_gpt2 else _by_heads_of_keys(spec)
    for block in range(spec.layers):
        for part_name, its in FUSED[model_type].items():
            if part_name == "mlp_norm" and spec.parallel_block:
                continue
            is_norm = part_name.endswith("norm")
            for kind in ("weight", "bias") if is_norm or spec.biases else ("weight",):
                yield (
                    f"blocks.{block}.{part_name}.{kind}",
                    TensorSource(
                        tensors=(f"{first}h.{block}.{its}.{kind}",),
                        order=order if part_name == "attention.qkv" else None,
                        transposed=is_gpt2 and not is_norm and kind == "weight",
                    ),
                )


def _by_heads_of_keys(spec: ModelSpec) -> tuple[int, ...]:
    """The row order that puts all queries first, then all keys, then all values, of a matrix that
    has for each key head its query heads, its key and its value.
    """
    group = spec.heads // spec.kv_heads
    count = (group + 2) * spec.kv_heads * spec.head_dim
    rows = np.arange(count).reshape(spec.kv_heads, group + 2, spec.head_dim)
    parts = (rows[:, :group], rows[:, group], rows[:, group + 1])
    return tuple(np.concatenate([part.reshape(-1) for part in parts]).tolist())


def _of_block(
    spec: ModelSpec, block: int, model_type: str, path: str
) -> Iterator[tuple[str, TensorSource]]:
    """The checkpoint's tensors at ``path`` for a block of the same kind as ``block``."""
    yield "attention_norm.weight", TensorSource.of(f"{path}.input_layernorm.weight")
    yield "mlp_norm.weight", TensorSource.of(f"{path}.post_attention_layernorm.weight")
    attention = f"{path}.self_attn"
    kinds = ("weight", "bias") if spec.biases else ("weight",)
    for kind in kinds:
        yield f"attention.output.{kind}", TensorSource.of(f"{attention}.o_proj.{kind}")
    if spec.latent is not None:
        yield from _of_latent(spec, attention)
    else:
        for kind in kinds:
            parts = [f"{attention}.{name}_proj.{kind}" for name in "qkv"]
            yield f"attention.qkv.{kind}", TensorSource.of(*parts)
    if spec.sinks:
        yield "attention.sinks", TensorSource.of(f"{attention}.sinks")
    if spec.qk_norm:
        yield "attention.query_norm.weight", TensorSource.of(f"{attention}.q_norm.weight")
        yield "attention.key_norm.weight", TensorSource.of(f"{attention}.k_norm.weight")
    experts = spec.experts
    if experts is None or not spec.has_experts_in(block):
        yield from _of_network("mlp", f"{path}.mlp")
        return
    if model_type == "gpt_oss":
        yield from _of_gpt_oss(experts, f"{path}.mlp")
        return
    is_mixtral = model_type == "mixtral"
    mlp = f"{path}.block_sparse_moe" if is_mixtral else f"{path}.mlp"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    each = [f"{mlp}.experts.{expert}" for expert in range(experts.count)]
    ups = tuple(f"{one}.{name}.weight" for one in each for name in (gate, up))
    yield "experts.router.weight", TensorSource.of(f"{mlp}.gate.weight")
    if experts.router.correction:
        yield CORRECTION, TensorSource.of(f"{mlp}.gate.e_score_correction_bias")
    yield "experts.up.weight", TensorSource(tensors=ups, stacked=2)
    downs = tuple(f"{one}.{down}.weight" for one in each)
    yield "experts.down.weight", TensorSource(tensors=downs, stacked=1)
    if experts.shared_ffn:
        yield from _of_network("shared", f"{mlp}.shared_experts")


def _of_gpt_oss(experts: Experts, path: str) -> Iterator[tuple[str, TensorSource]]:
    """The tensors of gpt-oss's experts: one holds all experts, and gates and values alternate."""
    for kind in ("weight", "bias"):
        yield f"experts.router.{kind}", TensorSource.of(f"{path}.router.{kind}")
    turns = (*range(0, 2 * experts.ffn, 2), *range(1, 2 * experts.ffn, 2))
    for name, its, order in (("up", "gate_up_proj", turns), ("down", "down_proj", None)):
        tensor_name = f"{path}.experts.{its}"
        yield (
            f"experts.{name}.weight",
            TensorSource(tensors=(tensor_name,), order=order, transposed=True, of_all=True),
        )
        yield (
            f"experts.{name}.bias",
            TensorSource(tensors=(f"{tensor_name}_bias",), order=order, of_all=True),
        )


def _of_network(name: str, path: str) -> Iterator[tuple[str, TensorSource]]:
    parts = [f"{path}.{part}_proj.weight" for part in ("gate", "up")]
    yield f"{name}.up.weight", TensorSource.of(*parts)
    yield f"{name}.down.weight", TensorSource.of(f"{path}.down_proj.weight")


def _of_latent(spec: ModelSpec, path: str) -> Iterator[tuple[str, TensorSource]]:
    """The checkpoint's tensors for latent attention. They have a head's rotary channels last and
    pairs adjacent; the runtime has rotary channels first, and all pairs' first channels before the
    second.
    """
    latent = spec.latent
    assert latent is not None
    rotated = round(spec.head_dim * spec.rotary_fraction)
    pairs = [*range(0, rotated, 2), *range(1, rotated, 2)]
    plain = spec.head_dim - rotated
    head = [*(plain + at for at in pairs), *range(plain)]
    heads = tuple(own * spec.head_dim + at for own in range(spec.heads) for at in head)
    key = (*range(latent.key_rank), *(latent.key_rank + at for at in pairs))
    if latent.query_rank is None:
        yield (
            "attention.query_up.weight",
            TensorSource(tensors=(f"{path}.q_proj.weight",), order=heads),
        )
    else:
        yield "attention.query_down.weight", TensorSource.of(f"{path}.q_a_proj.weight")
        yield "attention.query_norm.weight", TensorSource.of(f"{path}.q_a_layernorm.weight")
        up = (f"{path}.q_b_proj.weight",)
        yield "attention.query_up.weight", TensorSource(tensors=up, order=heads)
    down = (f"{path}.kv_a_proj_with_mqa.weight",)
    yield "attention.key_down.weight", TensorSource(tensors=down, order=key)
    yield "attention.key_norm.weight", TensorSource.of(f"{path}.kv_a_layernorm.weight")
    yield "attention.key_up.weight", TensorSource.of(f"{path}.kv_b_proj.weight")


# Loads a checkpoint's weights into a run, and writes a run's weights as a checkpoint.


def check_checkpoint(workload: Workload, folder: TensorFolder) -> None:
    """Raise an error, before memory is allocated, if a checkpoint is of another model."""
    spec, where = workload.model, f"{folder.option} {folder.folder}"
    sources = sources_of(spec, folder)
    configured = model_from(str(folder.folder / CONFIG), Path())
    _check_rotary(folder)
    for name in _COMPARED:
        mine, its = (_of_structure(getattr(one, name)) for one in (spec, configured))
        if mine != its:
            reject(
                f"{where}: {CONFIG} has {name} {its}, but the plan's model has {mine}: give "
                f"workload.model: {folder.folder / CONFIG}"
            )
    for path, shape in shapes_of_model(workload).items():
        if is_adapter(path):
            continue
        if path not in sources:
            reject(f"{where}: it has no tensor for {path}: start from random weights")
        if (made_shape := sources[path].shape(folder)) != shape:
            is_positions = path == "embedding.positions"
            made, remedy = sources[path].tensors[0], f"model: {folder.folder / CONFIG}"
            reject(
                f"{where}: {made} makes {path} of shape {made_shape}, the plan's model has "
                f"{shape}: give "
                f"workload.{f'sequence_length: {made_shape[0]}' if is_positions else remedy}"
            )
    _check_unused(folder, sources, copies_in(spec, folder))
    _check_copies(spec, folder, sources)


def _of_structure(value: Any) -> Any:
    """A part of a model's description without routers' losses, which only training uses."""
    if isinstance(value, Experts):
        value = replace(value, router=replace(value.router, **_OF_TRAINING))
    return repr(value)


_OF_TRAINING: Mapping[str, Any] = dict.fromkeys(("correction_rate", "balance_loss", "z_loss"), 0.0)


def _check_rotary(folder: TensorFolder) -> None:
    """Raise an error if the checkpoint has a rotary scaling that the runtime does not support."""
    for holder in ("rope_parameters", "rope_scaling"):
        mapping = folder.config.get(holder)
        kind = scaling_kind(mapping) if isinstance(mapping, Mapping) else UNSCALED
        if kind != UNSCALED and kind not in SCALINGS:
            reject(
                f"{folder.option} {folder.folder}: {holder}.rope_type {kind} is not supported "
                f"here: give a checkpoint with {', '.join(SCALINGS)} or without it"
            )


# Matches the names of tensors that follow from the configuration, or that no pass uses.
HARMLESS = re.compile(
    r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|self_attention\.(masked_)?bias$"
    r"|rotary_emb\.(cos|sin)_cached$"
)


def _check_unused(
    folder: TensorFolder, sources: Mapping[str, TensorSource], copies: Mapping[str, str]
) -> None:
    """Raise an error for tensors that no parameter uses, without which the model would differ."""
    used = {name for source in sources.values() for name in source.tensors}
    # A tied embedding table may be stored a second time, as the head's.
    used |= {"lm_head.weight"} if _is_tied(folder) else set()
    used |= {*copies}
    unused = [name for name in folder.names if name not in used and not _is_left_out(name, folder)]
    if unused:
        further = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        reject(
            f"{folder.option} {folder.folder}: no parameter of the plan's model is loaded from "
            f"{unused[0]}{further}: give the checkpoint of a model that has no such part"
        )


def _is_tied(folder: TensorFolder) -> bool:
    return bool(folder.config.get("tie_word_embeddings"))


def _is_left_out(name: str, folder: TensorFolder) -> bool:
    """Whether a tensor need not be read: it is harmless, or in a multi-token prediction block that
    the model's description omits.
    """
    of_block = re.match(r"model\.layers\.(\d+)\.", name)
    layers, later = (folder.config.get(key) or 0 for key in (LAYERS, LATER))
    is_later = of_block is not None and layers <= int(of_block[1]) < layers + later
    return is_later or HARMLESS.search(name) is not None


LAYERS, LATER = "num_hidden_layers", "num_nextn_predict_layers"


_COMPARED = (
    *("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "norm", "activation"),
    *("tied_embeddings", "biases", "rotary_fraction", "rotary_base", "norm_epsilon", "qk_norm"),
    *("latent", "experts", "window", "rotary_scaling"),
)


def load_weights(executor: Executor, folder: TensorFolder, seed: int = 0) -> None:
    """Load this rank's weights from a checked checkpoint; missing adapters are drawn by seed."""
    sources = sources_of(executor.model, folder)
    for layer, module in executor.layers.items():
        made = {
            name: initial_tensor(module.prefix + name, shape, seed, tied=False)
            if is_adapter(name)
            else sources[module.prefix + name].made(folder)
            for name, shape in module.whole_shapes.items()
        }
        executor.parameters.set_masters(layer, made)
    for name, correction in executor.routers.corrections().items():
        correction.copy_(sources[name].made(folder))


def rewrite(exported: Path, spec: ModelSpec, folder: TensorFolder, out: Path) -> None:
    """Write a run's exported weights with the tensor names and shapes of the checkpoint
    ``folder``.
    """
    exported_folder = TensorFolder(exported.parent, "--export", files=(exported,))
    sources = sources_of(spec, folder)
    twins = (TABLE_OF_HEAD, *(("head.projection.weight",) if spec.tied_embeddings else ()))
    written = [(path, source) for path, source in sources.items() if path not in twins]
    written += [(path, TensorSource.of(name)) for name, path in copies_in(spec, folder).items()]
    kinds = {
        name: (folder.shape(name), exported_folder.kind(path))
        for path, source in written
        for name in source.tensors
    }

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for path, source in written:
            sizes = [folder.shape(name)[0] for name in source.tensors]
            parts = source.taken_apart(exported_folder.read(path), sizes)
            for name, part in zip(source.tensors, parts, strict=True):
                yield name, part.to(exported_folder.kind(path))

    out.mkdir(parents=True, exist_ok=True)
    write_tensors(out / SINGLE, tensors(), kinds)
    (out / CONFIG).write_text((folder.folder / CONFIG).read_text("utf-8"), "utf-8")
