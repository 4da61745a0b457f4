"""Writes and reads checkpoints of a training run, which a run with any plan can resume."""

import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from mistlab.core.files import read_yaml, write_yaml
from mistlab.core.values import InputError, reject, to_mapping
from mistlab.plan.workload import ModelSpec
from runtime.checkpoints.boxes import (
    Box,
    Loader,
    Reader,
    Saver,
    UnlikeError,
    UnreadableError,
    Writer,
    boxes_of,
    boxes_of_averages,
    read_alone,
    scales_of,
    write_alone,
)
from runtime.comm.group import RankLostError
from runtime.comm.processes import gathered, heard_from, is_distributed, meet
from runtime.engine.executor import Executor
from runtime.engine.storage.moment_codes import CODES
from runtime.engine.work.stage_modules import TABLE

# Finds the checkpoints in a folder; a complete checkpoint is a folder called ``step-N``.


_NAME = re.compile(r"step-(\d+)")


def checkpoint_path(folder: Path, steps: int) -> Path:
    """The path of the checkpoint after ``steps`` steps."""
    return folder / f"step-{steps}"


def complete(folder: Path) -> list[Path]:
    """The paths of all complete checkpoints, the newest first."""
    steps = [
        (int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(steps, reverse=True)]


def latest(folder: Path) -> Path | None:
    """The path of the newest complete checkpoint, if there is one."""
    return next(iter(complete(folder)), None)


# Writes checkpoints of a training run, and resumes from one with the same or another plan.
#
# A checkpoint holds the tensors of the whole model in the format of torch.distributed.checkpoint,
# and the model's description in YAML. Each rank writes the parts of master weights and moments that
# its optimizer steps, and reads the parts that it needs, whichever rank wrote them. Files are
# written into a folder named ``.part``, which is renamed when every rank has finished. So a folder
# with a checkpoint's name is complete.


MODEL = "model.yaml"
# The name of the tensor that holds all counters, such as the number of steps.
_COUNTS = "counts"
Kinds = type[Exception] | tuple[type[Exception], ...]


class UnsavedError(RuntimeError):
    """A checkpoint cannot be written."""


class DamagedError(InputError):
    """The files of a checkpoint are damaged."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return (
            f"--resume {self.path}: cannot be read ({self.problem}): it is damaged: "
            "give another checkpoint"
        )


def save(executor: Executor, folder: Path) -> Path:
    """Wait for all work of the rank, run the deferred optimizer step, and write the checkpoint
    ``folder/step-N``.
    """
    executor.flush()
    path = checkpoint_path(folder, executor.steps)
    try:
        _write(executor, path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        message = f"{path}: cannot be written ({reason}): free space, or give another --out"
        raise UnsavedError(message) from error
    return path


def load(executor: Executor, path: Path) -> None:
    """Load a checkpoint into the executor. If its files are damaged, all ranks raise the same
    error.

    After that error the state may be loaded in part, and is unusable until another checkpoint is
    loaded.
    """
    problem = next((one for one in gathered(_problem_of(executor, path)) if one is not None), None)
    if problem is not None:
        raise problem
    counts = _counts_of(executor)
    boxes = [*boxes_of(executor, written=False), *boxes_of_averages(executor), counts]
    try:
        with _hearing_all_errors((UnlikeError, UnreadableError)):
            if executor.state.types.moments == CODES:
                _read(executor, path, scales_of(boxes), scales_only=True)
            _read(executor, path, boxes)
    except UnreadableError as error:
        raise DamagedError(path, str(error)) from error
    except UnlikeError as error:
        message = (
            f"--resume {path}: {error}: it was written with another workload.sequence_length: "
            "give a checkpoint with the plan's, or change the plan's sequence_length"
        )
        raise InputError(message) from error
    executor.set_counts(counts.values)


def _read(
    executor: Executor, path: Path, boxes: Sequence[Box], *, scales_only: bool = False
) -> None:
    loader = Loader(boxes, lambda name: _stored_name(executor, name), scales_only=scales_only)
    if is_distributed():
        load_state({}, storage_reader=Reader(path), planner=loader)
    else:
        read_alone(Reader(path), loader)


def load_latest(executor: Executor, folder: Path, tell: Callable[[str], None]) -> Path | None:
    """Load the newest readable checkpoint of a folder; None if the folder has no checkpoint.

    Only the first rank lists the folder, because on a shared disk other ranks may see files later.
    """
    paths = gathered(complete(folder))[0]
    for path in paths:
        try:
            load(executor, path)
        except DamagedError as error:
            tell(f"{path}: cannot be read ({error.problem}): it is damaged, and left out")
        else:
            return path
    if paths:
        reject(
            f"{folder}: none of the checkpoints in this folder can be read: move the folder away, "
            "to begin a new run"
        )
    return None


def _write(executor: Executor, path: Path) -> None:
    unfinished = path.with_suffix(".part")
    is_first = executor.connections.is_first
    if is_first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write_yaml(to_mapping(executor.model), unfinished / MODEL)
    meet()
    counts = [_counts_of(executor)] if is_first else []
    saver = Saver([*boxes_of(executor, written=True), *boxes_of_averages(executor), *counts])
    with _hearing_all_errors(OSError):
        if is_distributed():
            save_state({}, storage_writer=Writer(unfinished), planner=saver)
        else:
            write_alone(Writer(unfinished), saver)
    meet()
    if is_first:
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)
    meet()


def _problem_of(executor: Executor, path: Path) -> InputError | None:
    """The error that says why a checkpoint cannot be resumed, judged by its small files; None if it
    can.
    """
    if not (path / MODEL).is_file():
        if path in complete(path.parent):
            return DamagedError(path, f"it has no {MODEL}")
        return InputError(
            f"--resume {path}: there is no checkpoint: give a folder named step-N, such as "
            "step-100, or the folder that holds it"
        )
    try:
        # A field that the stored description lacks was added after the checkpoint was written, and
        # takes its default value.
        stored = ModelSpec.from_mapping(read_yaml(path / MODEL))
        names = Reader(path).metadata().state_dict_metadata
    except (InputError, UnreadableError) as error:
        return DamagedError(path, str(error))
    unlike = _model_difference(to_mapping(stored), to_mapping(executor.model), path)
    return unlike or _averages_problem(executor, names, path)


def _averages_problem(executor: Executor, names: Collection[str], path: Path) -> InputError | None:
    """The error if the checkpoint lacks a state that this run's gradient reduction keeps, for one
    of the run's ranks and replicas; None if it has all of them.
    """
    boxes = [*boxes_of_averages(executor)]
    if executor.connections.peers.rank:
        boxes += boxes_of(executor, written=False)
    missing = [box.name for box in boxes if _stored_name(executor, box.name) not in names]
    if not missing:
        return None
    return InputError(
        f"--resume {path}: it lacks the state {missing[0]}, which the plan's workload.reduction "
        "keeps on this rank: give a checkpoint of a run with equal workload.reduction and ranks"
    )


def _model_difference(
    stored: Mapping[str, object], wanted: Mapping[str, object], path: Path
) -> InputError | None:
    """The error if the checkpoint's model differs from the run's, even if all shapes are equal;
    None if it does not.
    """
    for name, value in wanted.items():
        # ``context`` is not compared: no weight depends on it, and older checkpoints lack it.
        if name not in ("name", "context") and stored.get(name) != value:
            return InputError(
                f"--resume {path}: its model has {name} {stored.get(name)}, the plan's {value}: "
                "give a checkpoint of the plan's model"
            )
    return None


def _counts_of(executor: Executor) -> Box:
    counts = executor.counts()
    return Box(name=_COUNTS, whole=tuple(counts.shape), offsets=(0,), values=counts)


def _stored_name(executor: Executor, name: str) -> str:
    """A tensor's name in the checkpoint. Of two tied tables only the embedding's is stored."""
    parameters = executor.parameters
    return name.replace(parameters.twin, TABLE) if parameters.tied else name


@contextmanager
def _hearing_all_errors(of_files: Kinds) -> Iterator[None]:
    """A context for calls that all ranks make: if a call raises an error on one rank, all ranks
    raise an error.

    An error in ``of_files`` is raised on all ranks. Any other error is raised on the rank where it
    occurred, and the other ranks raise ``RankLostError``.
    """
    ranks = range(distributed.get_world_size()) if is_distributed() else None
    try:
        with nullcontext() if ranks is None else heard_from(ranks):
            yield
    except CheckpointException as error:
        failures = {rank: failure for rank, (failure, _) in sorted(error.failures.items())}
        rank = distributed.get_rank() if is_distributed() else 0
        raise failure_of(rank, failures, of_files) from error


def failure_of(
    own_rank: int, failures: Mapping[int, BaseException], of_files: Kinds
) -> BaseException:
    """The error that the rank ``own_rank`` raises, given the errors of all ranks.

    If all errors are in ``of_files``, every rank raises the first of them. Otherwise a rank with
    another error raises that error, and a rank without an error raises one that says which rank is
    lost.
    """
    others = {rank: one for rank, one in failures.items() if not isinstance(one, of_files)}
    if not others:
        return next(iter(failures.values()))
    if own_rank in others:
        return others[own_rank]
    rank, failure = next(iter(others.items()))
    reason = str(failure).strip().partition("\n")[0] or type(failure).__name__
    return RankLostError(
        f"rank {own_rank} ends, since rank {rank} failed at a checkpoint ({reason}): correct the "
        f"error that rank {rank} printed, then start all ranks again"
    )
