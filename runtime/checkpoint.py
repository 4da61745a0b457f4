"""Checkpoints that any plan can resume: torch.distributed.checkpoint of the whole model's tensors.

Each rank writes the boxes of master weights and moments that it steps, and reads those that it
needs, however they were written; the model is beside them, in YAML. A checkpoint is complete when
its folder has its name: it is written beside it, and renamed when every rank is done.
"""

import io
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    create_default_global_load_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from mistlab.datafile import read_yaml, write_yaml
from mistlab.errors import InputError
from mistlab.model import ModelSpec
from mistlab.value import to_mapping
from runtime.comm.group import RankLostError
from runtime.comm.processes import heard_from, meet
from runtime.engine.executor import Executor
from runtime.engine.modules import TABLE, TIED

KINDS = ("master", "moment1", "moment2")
MODEL = "model.yaml"
_NAME = re.compile(r"step-(\d+)")
# Everything besides tensors: so many numbers.
_COUNTS = "counts"
_Box = tuple[tuple[int, ...], tuple[int, ...]]


class UnsavedError(RuntimeError):
    """A checkpoint cannot be written."""


def save(executor: Executor, folder: Path) -> Path:
    """Do what is still to do, and write ``folder/step-N``."""
    executor.flush()
    path = folder / f"step-{executor.steps}"
    try:
        _write(executor, path)
    except (OSError, CheckpointException) as error:
        message = (
            f"{path}: cannot be written ({_last_line(error)}): free space, or give another --out"
        )
        raise UnsavedError(message) from error
    return path


def _write(executor: Executor, path: Path) -> None:
    unfinished = path.with_suffix(".part")
    is_first = executor.connections.rank == 0
    if is_first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write_yaml(to_mapping(executor.model), unfinished / MODEL)
    meet()
    with _together(executor):
        save_state(
            {}, checkpoint_id=unfinished, planner=_Saver(executor), no_dist=not _is_distributed()
        )
    meet()
    if is_first:
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)
    meet()


def latest(folder: Path) -> Path | None:
    """The last complete checkpoint in a folder, if it has one."""
    steps = [
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name))
    ]
    return max(steps)[1] if steps else None


def load(executor: Executor, path: Path) -> None:
    """Go on from a checkpoint; what is wrong with it is said."""
    if not (path / MODEL).is_file():
        message = (
            f"--resume {path}: there is no checkpoint: give a folder step-N, or the one it is in"
        )
        raise InputError(message)
    _check_model(executor, path)
    loader = _Loader(executor)
    try:
        with _together(executor):
            # Whatever is wrong with it, torch would log a traceback before it raises.
            FileSystemReader(path).read_metadata()
            load_state({}, checkpoint_id=path, planner=loader, no_dist=not _is_distributed())
    except RankLostError:
        raise
    except (
        CheckpointException,
        OSError,
        EOFError,
        AttributeError,
        ImportError,
        LookupError,
        ValueError,
        RuntimeError,
        pickle.UnpicklingError,
    ) as error:
        message = (
            f"--resume {path}: cannot be read ({_last_line(error)}): "
            "it is damaged, or of another sequence_length: give another checkpoint"
        )
        raise InputError(message) from error
    loader.apply()


def _check_model(executor: Executor, path: Path) -> None:
    """Refuse another model, even one whose tensors have the shapes of this one's."""
    # What a checkpoint does not say was not to be chosen when it was written.
    stored = to_mapping(ModelSpec.from_mapping(read_yaml(path / MODEL), str(path / MODEL)))
    own = to_mapping(executor.model)
    for name, value in own.items():
        if name != "name" and stored.get(name) != value:
            message = (
                f"--resume {path}: its model has {name} {stored.get(name)}, the plan's {value}: "
                "give a checkpoint of the plan's model"
            )
            raise InputError(message)


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


class _Saver(SavePlanner):
    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.tensors: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing is taken from a state dict."""

    def create_local_plan(self) -> SavePlan:
        """The boxes of this rank that no other writes."""
        items = []
        for name, whole, (offsets, sizes), tensor in _writable(self.executor):
            index = MetadataIndex(name, torch.Size(offsets))
            self.tensors[index] = tensor
            chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            data = TensorWriteData(
                chunk=chunk,
                properties=TensorProperties.create_from_tensor(tensor),
                size=torch.Size(whole),
            )
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """All ranks' boxes together."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """A box's values."""
        return self.tensors[write_item.index]


class _Loader(LoadPlanner):
    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.wholes: dict[str, torch.Size] = {}
        self.targets: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        for name, whole, (offsets, _), tensor in _readable(executor):
            self.wholes[name] = torch.Size(whole)
            self.targets[name, offsets] = tensor

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Note what there is."""
        assert metadata is not None
        self.stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """The boxes that this rank needs."""
        items = []
        for (name, offsets), target in self.targets.items():
            # Of two tied tables the embedding's alone is written.
            kept = name.replace(TIED, TABLE) if self.executor.parameters.tied else name
            stored = self.stored.get(kept)
            if not isinstance(stored, TensorStorageMetadata) or stored.size != self.wholes[name]:
                message = f"it has no {name} of {tuple(self.wholes[name])}"
                raise ValueError(message)
            chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=target.shape)
            items += [
                replace(item, storage_index=replace(item.storage_index, fqn=kept))
                for item in create_read_items_for_chunk_list(name, stored, [chunk])
            ]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """All ranks' needs together."""
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """There are tensors only."""
        raise AssertionError

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where to put what is read."""
        index = read_item.dest_index
        assert index.offset is not None
        target = self.targets[index.fqn, tuple(index.offset)]
        for axis, (begin, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(axis, begin, size)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is in its place already."""

    def apply(self) -> None:
        """Put everything where the executor has it."""
        parameters = self.executor.parameters
        for layer in self.executor.layers:
            for number, kind in enumerate(KINDS):
                flat = parameters.stepped(layer, number)
                for piece in parameters.pieces(layer):
                    box = self.targets[f"{kind}.{piece.name}", piece.offsets]
                    flat[piece.begin : piece.begin + piece.numel] = box.flatten()
                parameters.set_stepped(layer, number, flat)
        self.executor.set_counts(self.targets[_COUNTS, (0,)])


# A box of a whole tensor: its name, the whole shape, offsets and sizes, and values.
_Boxes = Iterator[tuple[str, tuple[int, ...], _Box, Tensor]]


def _writable(executor: Executor) -> _Boxes:
    parameters = executor.parameters
    for layer, one in executor.layers.items():
        written = [piece for piece in parameters.pieces(layer) if parameters.writes(piece)]
        for number, kind in enumerate(KINDS):
            flat = parameters.stepped(layer, number)
            for piece in written:
                tensor = flat[piece.begin : piece.begin + piece.numel].view(piece.sizes)
                whole = one.whole_shape(piece.name)
                yield f"{kind}.{piece.name}", whole, (piece.offsets, piece.sizes), tensor
    if executor.connections.rank == 0:
        yield _counts_box(executor)


def _readable(executor: Executor) -> _Boxes:
    for layer, one in executor.layers.items():
        for piece in executor.parameters.pieces(layer):
            for kind in KINDS:
                box, whole = (piece.offsets, piece.sizes), one.whole_shape(piece.name)
                yield f"{kind}.{piece.name}", whole, box, torch.empty(piece.sizes)
    yield _counts_box(executor)


def _counts_box(executor: Executor) -> tuple[str, tuple[int, ...], _Box, Tensor]:
    counts = executor.counts()
    shape = tuple(counts.shape)
    return _COUNTS, shape, ((0,), shape), counts


@contextmanager
def _together(executor: Executor) -> Iterator[None]:
    """Around what all ranks do with torch.distributed.checkpoint.

    It warns of its own calls, which is of no use to anybody; what goes wrong on a rank it wraps, so
    that errors of collectives are ranks that are gone.
    """
    ranks = range(executor.connections.world.size)
    with (
        warnings.catch_warnings(action="ignore"),
        heard_from(ranks) if _is_distributed() else nullcontext(),
    ):
        yield


def _is_distributed() -> bool:
    return bool(distributed.is_initialized())
