"""The options that a user gives beside a file to import, and the job made of both."""

from dataclasses import dataclass

from mistlab.export.remarks import Remark
from mistlab.machine.hardware import Hardware
from mistlab.values.job import Job
from mistlab.values.model import ModelSpec
from mistlab.values.precision import Precision
from mistlab.values.workload import Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options given beside a file; None leaves a choice to the file, or to a default.

    An option wins over the file, and a remark tells where the two differ.
    """

    hardware: Hardware
    model: ModelSpec | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    sequence_length: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    attention: Attention | None = None
    precision: Precision | None = None
    engine: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The job of a file, and what was assumed, ignored or found to contradict itself."""

    job: Job
    remarks: tuple[Remark, ...]
