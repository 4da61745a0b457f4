"""One process of a run in another training system: it trains by a plan file, and reports the
outcome.

The argument is a JSON object: ``plan``, ``system``, ``steps``, ``device``, ``seed``, ``cap_gib``
(null for no cap) and ``out``, the file for losses, seconds of steps and peaks of memory. Running
out of memory is a result too.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError
from mistlab.job.job import load_job

# The module that trains in each training system.
DRIVERS = {
    "megatron": ("runtime.baselines.megatron_run", "MegatronRun"),
    "deepspeed": ("runtime.baselines.deepspeed_run", "DeepSpeedRun"),
    "deepcompile": ("runtime.baselines.deepspeed_run", "compiled_run"),
    "fsdp": ("runtime.baselines.fsdp_run", "FsdpRun"),
}


def main(arguments: Sequence[str]) -> int:
    """Train by a plan, and write the measurements; only the first process writes."""
    settings = json.loads(arguments[0])
    try:
        result = _trained(settings)
    except InputError as error:
        result = {"error": str(error)}
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "out of memory" not in str(error):
            raise
        result = {"error": "out of memory"}
    if int(os.environ.get("RANK", "0")) == 0:
        Path(settings["out"]).write_text(json.dumps(result), encoding="utf-8")
    if "error" in result:
        print(f"error: {result['error']}", file=sys.stderr)
        return 1
    return 0


def _trained(asked: dict[str, Any]) -> dict[str, Any]:
    import torch  # noqa: PLC0415 (not for imports of this file)

    from runtime.baselines.baseline import BaselineSettings  # noqa: PLC0415 (needs torch)
    from runtime.comm.processes import device_of, world_of_launcher  # noqa: PLC0415 (needs torch)
    from runtime.profiling.node_checks import check_gpus  # noqa: PLC0415 (needs torch)
    from runtime.tensor_cores import products_in  # noqa: PLC0415 (needs torch)
    from runtime.threads import with_share  # noqa: PLC0415 (needs torch)

    job, world = load_job(asked["plan"]), world_of_launcher()
    # The rank's GPU becomes torch's current one, whose memory allocator is then limited.
    device = device_of(asked["device"], world)
    precision = job.workload.precision
    check_gpus([device], ranks=world.size, precision=precision, option="workload.precision")
    on_gpu = asked["device"] == "cuda"
    if on_gpu and asked.get("cap_gib"):
        total = torch.cuda.get_device_properties(device).total_memory
        share = min(1.0, asked["cap_gib"] * GIB_BYTES / total)
        torch.cuda.set_per_process_memory_fraction(share)
    module, name = DRIVERS[asked["system"]]
    settings = BaselineSettings(device=asked["device"], seed=asked["seed"])
    losses, seconds = [], []
    cores = None if on_gpu else job.cluster.hardware.gpu.cores
    with with_share(cores), products_in(precision):
        run = getattr(import_module(module), name)(job, settings)
        for number in range(asked["steps"]):
            begin = perf_counter()
            losses.append(run.step(number))
            seconds.append(perf_counter() - begin)
        configuration = asdict(run.configuration())
        run.close()
    peaks = {}
    if on_gpu:
        peaks = {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    return {"losses": losses, "seconds": seconds, "configuration": configuration, **peaks}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
