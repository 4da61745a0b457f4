"""Notes about a measured machine, in a file beside its tables: its memory, peak rates, software and
GPU clocks.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.training.moved_clocks import moved_words
from mistlab.core.files import read_yaml
from mistlab.core.values import Checked, from_mapping, reject
from mistlab.job.prediction import Clocks, Environment
from mistlab.machine.hardware import PeakTflops


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(Checked):
    """A machine as it was measured on a certain day. If its devices are shares of a CPU,
    ``threads`` is the number of threads of each process.

    ``outside_bytes`` are the bytes of a GPU that a process takes outside torch's allocator, without
    those of its communicators if these were measured separately. ``clocks`` are the first GPU's
    clock rates when measuring began, ``clocks_after`` those when it ended. ``others`` are machines
    of the same kind that continued its tables. ``is_measured`` says that the tables are complete.
    """

    environment: Environment
    date: str
    threads: int
    clocks: Clocks | None
    device_memory_bytes: int
    outside_bytes: int
    host_memory_bytes: int
    memory_gbytes_per_s: float
    peak_tflops: PeakTflops
    communicator_bytes: int | None = None
    attention_kernel: str = "flash"
    clocks_after: Clocks | None = None
    others: tuple[str, ...] = ()
    is_measured: bool = False

    @property
    def is_gpu(self) -> bool:
        """Whether the machine's devices are GPUs, rather than shares of a CPU."""
        return bool(self.environment.cuda)

    @property
    def words(self) -> str:
        """A description of the machine, for the sources of figures in a hardware file."""
        environment = self.environment
        parts = [
            f"{environment.num_devices} x {environment.device}"
            if self.is_gpu
            else environment.device
        ]
        if not self.is_gpu:
            parts.append(
                f"{environment.num_devices} processes of {self.threads} threads stand in for GPUs, "
                "their memory is host memory, copies are between host buffers, streams are threads"
            )
        parts += [f"torch {environment.torch}"]
        parts += [f"CUDA {environment.cuda}, driver {environment.driver}"] if self.is_gpu else []
        kernel = self.attention_kernel
        parts += [f"attention by {kernel}"] if kernel != "flash" else []
        parts += [self.clocks.words] if self.clocks else []
        parts += [f"also one with {other}" for other in self.others]
        moved = moved_words(self.clocks, self.clocks_after)
        parts += [moved] if moved else []
        return ", ".join([*parts, self.date])


def noted_machine(tables: Path) -> Machine:
    """The machine on which the tables in a folder were measured."""
    path = tables / "machine.yaml"
    if not path.exists():
        reject(f"--tables {tables}: it has no machine.yaml: give a folder with measured tables")
    return from_mapping(Machine, read_yaml(path))
