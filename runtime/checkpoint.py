"""Checkpoints that any plan can resume: torch.distributed.checkpoint of the whole model's tensors.

Each rank writes the boxes of master weights and moments that it steps, and reads those that it
needs, however they were written; the model is beside them, in YAML. A checkpoint is complete when
its folder has its name: it is written beside it, and renamed when every rank is done.
"""

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from mistlab.values.datafile import read_yaml, write_yaml
from mistlab.values.errors import InputError
from mistlab.values.model import ModelSpec
from mistlab.values.value import to_mapping
from runtime.box_files import Reader, Writer
from runtime.boxes import Box, Loader, Saver, UnlikeError, UnreadableError, boxes_of
from runtime.checkpoint_folder import checkpoint_path, complete
from runtime.comm.group import RankLostError
from runtime.comm.objects import gathered, is_distributed
from runtime.comm.processes import heard_from, meet
from runtime.engine.executor import Executor
from runtime.engine.work.modules import TABLE, TIED

MODEL = "model.yaml"
# Everything besides tensors of the model: so many numbers.
_COUNTS = "counts"
Kinds = type[Exception] | tuple[type[Exception], ...]


class UnsavedError(RuntimeError):
    """A checkpoint cannot be written."""


class DamagedError(InputError):
    """The files of a checkpoint are not what was written."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return (
            f"--resume {self.path}: cannot be read ({self.problem}): it is damaged: "
            "give another checkpoint"
        )


def save(executor: Executor, folder: Path) -> Path:
    """Do what is still to do, and write ``folder/step-N``."""
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
    """Go on from a checkpoint; what is wrong with its files every rank says alike.

    A damaged one may have been read in part: after that, only another one makes a state to train.
    """
    problem = next((one for one in gathered(_problem(executor, path)) if one is not None), None)
    if problem is not None:
        raise problem
    counts = _counts_of(executor)
    loader = Loader(
        [*boxes_of(executor, written=False), counts], lambda name: _stored_name(executor, name)
    )
    try:
        with _together((UnlikeError, UnreadableError)):
            load_state({}, storage_reader=Reader(path), planner=loader, no_dist=_is_alone())
    except UnreadableError as error:
        raise DamagedError(path, str(error)) from error
    except UnlikeError as error:
        message = f"--resume {path}: {error}: it is of another sequence_length: give another"
        raise InputError(message) from error
    executor.set_counts(counts.values)


def load_latest(executor: Executor, folder: Path, tell: Callable[[str], None]) -> Path | None:
    """Go on from the newest checkpoint of a folder that can be read; None if there is none at all.

    The first rank looks which there are: on a shared disk others may see a folder later.
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
        message = f"{folder}: none of its checkpoints can be read: move it away to begin anew"
        raise InputError(message)
    return None


def _write(executor: Executor, path: Path) -> None:
    unfinished = path.with_suffix(".part")
    is_first = executor.connections.rank == 0
    if is_first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write_yaml(to_mapping(executor.model), unfinished / MODEL)
    meet()
    saver = Saver(
        [*boxes_of(executor, written=True), *([_counts_of(executor)] if is_first else [])]
    )
    with _together(OSError):
        save_state({}, storage_writer=Writer(unfinished), planner=saver, no_dist=_is_alone())
    meet()
    if is_first:
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)
    meet()


def _problem(executor: Executor, path: Path) -> InputError | None:
    """What the small files of a checkpoint say against it."""
    if not (path / MODEL).is_file():
        if path in complete(path.parent):
            return DamagedError(path, f"it has no {MODEL}")
        return InputError(
            f"--resume {path}: there is no checkpoint: give a folder step-N, or the one it is in"
        )
    try:
        # What a checkpoint does not say was not to be chosen when it was written.
        stored = ModelSpec.from_mapping(read_yaml(path / MODEL))
        Reader(path).metadata()
    except (InputError, UnreadableError) as error:
        return DamagedError(path, str(error))
    return _unlike(to_mapping(stored), to_mapping(executor.model), path)


def _unlike(
    stored: Mapping[str, object], own: Mapping[str, object], path: Path
) -> InputError | None:
    """Refuse another model, even one whose tensors have the shapes of this one's."""
    for name, value in own.items():
        if name != "name" and stored.get(name) != value:
            return InputError(
                f"--resume {path}: its model has {name} {stored.get(name)}, the plan's {value}: "
                "give a checkpoint of the plan's model"
            )
    return None


def _counts_of(executor: Executor) -> Box:
    counts = executor.counts()
    return Box(name=_COUNTS, whole=tuple(counts.shape), offsets=(0,), values=counts)


def _stored_name(executor: Executor, name: str) -> str:
    """Of two tied tables the embedding's alone is written."""
    return name.replace(TIED, TABLE) if executor.parameters.tied else name


@contextmanager
def _together(of_files: Kinds) -> Iterator[None]:
    """Around what all ranks do with torch.distributed.checkpoint: each hears of all their errors.

    Errors ``of_files`` are raised on all ranks; any other one on the rank that had it, and to the
    others that rank is lost. torch warns of its own calls, which is of no use to anybody.
    """
    ranks = range(distributed.get_world_size()) if is_distributed() else None
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            nullcontext() if ranks is None else heard_from(ranks),
        ):
            yield
    except CheckpointException as error:
        failures = {rank: failure for rank, (failure, _) in sorted(error.failures.items())}
        own = distributed.get_rank() if is_distributed() else 0
        raise failure_of(own, failures, of_files) from error


def failure_of(own: int, failures: Mapping[int, BaseException], of_files: Kinds) -> BaseException:
    """What a rank makes of the errors of all ranks: either all of them say what is wrong with the
    files, or those with other errors say these, and are lost to the rest."""
    others = {rank: one for rank, one in failures.items() if not isinstance(one, of_files)}
    if not others:
        return next(iter(failures.values()))
    if own in others:
        return others[own]
    rank, failure = next(iter(others.items()))
    said = str(failure).strip().partition("\n")[0] or type(failure).__name__
    return RankLostError(f"rank {own}: rank {rank} failed at a checkpoint ({said})")


def _is_alone() -> bool:
    return not is_distributed()
