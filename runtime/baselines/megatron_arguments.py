"""Megatron-LM's own parser of options, of a checkout: it takes a launch line, or refuses it.

The wheel of Megatron-core has no parser. A checkout is imported beside the wheel; what it asks of
GPUs and of TransformerEngine is answered as on a machine that has both.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from mistlab.shell.launch import launch_of
from mistlab.shell.source import Source
from mistlab.values.errors import InputError
from mistlab.values.job import Job

# What a launch line leaves to its user.
_BESIDE = "--mock-data --tokenizer-type NullTokenizer --lr 1e-4 --train-iters 10 --no-rope-fusion"
_HOPPER, _BLACKWELL = 9, 10


def arguments_of(text: str, job: Job, checkout: Path) -> Namespace:
    """The arguments of a launch line after Megatron-LM has checked them, and has built the
    configuration of its model."""
    if not (checkout / "megatron" / "training" / "arguments.py").is_file():
        message = f"{checkout}: has no megatron/training/arguments.py: give Megatron-LM's checkout"
        raise InputError(message)
    launch = launch_of(Source(text=text))
    words = [*map(str, launch.arguments), *_BESIDE.split()]
    with _on_its_machine(job, checkout, "32" if "--use-megatron-fsdp" in words else "1"):
        from megatron.training import arguments  # noqa: PLC0415 (its package)

        version = _version_of(job)
        with (
            _as_command(words),
            patch.object(arguments, "get_device_arch_version", lambda: version),
            patch("torch.cuda.get_device_capability", lambda: (version, 0)),
        ):
            made: Namespace = arguments.validate_args(arguments.parse_args(), {})
            arguments.core_transformer_config_from_args(made)
    return made


def _version_of(job: Job) -> int:
    has_blocks = job.cluster.hardware.gpu.peak_tflops.fp4 is not None
    return _BLACKWELL if has_blocks else _HOPPER


@contextmanager
def _on_its_machine(job: Job, checkout: Path, connections: str) -> Iterator[None]:
    """Processes and paths as Megatron-LM finds them on the first rank."""
    said = {
        "RANK": "0",
        "WORLD_SIZE": str(job.cluster.num_gpus),
        "CUDA_DEVICE_MAX_CONNECTIONS": connections,
    }
    with (
        patch.dict(os.environ, said),
        patch.object(sys, "path", [str(checkout), *sys.path]),
    ):
        yield


@contextmanager
def _as_command(words: Sequence[str]) -> Iterator[None]:
    """The words of a command line as Python's parser finds them; it may not end the process."""
    with patch.object(sys, "argv", ["pretrain.py", *words]):
        try:
            yield
        except SystemExit as error:
            message = f"the parser ends with status {error.code}"
            raise ValueError(message) from None
