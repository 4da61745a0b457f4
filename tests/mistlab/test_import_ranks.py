"""Nodes and GPUs of launch commands, by the words of each launcher."""

import pytest

from mistlab.shell.source import Source
from mistlab.values.errors import InputError
from tests.mistlab.launched import imported, texts

BATCH = "#!/bin/bash\n#SBATCH --nodes=2 --gres=gpu:8  # two nodes\n#SBATCH --ntasks-per-node=1\n"


@pytest.mark.parametrize(
    ("started", "ranks"),
    [
        ("torchrun --nnodes 2 --nproc_per_node=4", (2, 4)),
        ("python -m torch.distributed.launch --nproc_per_node 8 --nnodes 2", (2, 8)),
        ("deepspeed --num_nodes 2 --num_gpus 4", (2, 4)),
        ("deepspeed --include localhost:0,1,2,3", (1, 4)),
        ("deepspeed --include worker-0:0,1@worker-1:2,3", (2, 2)),
        ("deepspeed --hostfile hosts", (2, 8)),
        ("srun --nodes 2 --ntasks-per-node=8 python -u", (2, 8)),
        ("srun -N2 --ntasks-per-node=8 python -u", (2, 8)),
        ("srun -N 2 --gres=gpu:h100:8 torchrun --nproc-per-node 4", (2, 4)),
        ("srun --nodes=2 --ntasks-per-node=1 torchrun --nnodes $N --nproc-per-node 4", None),
        ("mpirun -np 16 -npernode 8 python", (2, 8)),
        ("mpirun -np 8 python", (1, 8)),
        ("mpiexec -n 16 --map-by ppr:4:node python", (4, 4)),
        ("accelerate launch --num_processes 16 --num_machines 2", (2, 8)),
        ("accelerate launch --num_processes 4", (1, 4)),
    ],
)
def test_launchers_say_nodes_and_gpus(started: str, ranks: tuple[int, int] | None) -> None:
    source = Source(text="", beside={"hosts": "a slots=8\n# b slots=8\nc slots=8\n"}.get)
    if ranks is None:
        with pytest.raises(
            InputError, match=r"--nnodes: line 40: \$N is set nowhere: .* --nodes N"
        ):
            imported(started=started, source=source)
        return
    cluster = imported(started=started, source=source).job.cluster
    assert (cluster.nodes, cluster.gpus_per_node) == ranks


@pytest.mark.parametrize(
    "started", ["torchrun --nnodes $SLURM_NNODES --nproc-per-node $GPUS", "srun python -u"]
)
def test_a_batch_system_s_lines_fill_what_launchers_leave_open(started: str) -> None:
    cluster = imported(
        started=started,
        source=Source(text=BATCH),
        **({"gpus_per_node": 8} if "$" in started else {}),
    ).job.cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 8)


def test_a_batch_system_s_lines_after_the_first_command_do_not_count() -> None:
    text = "#!/bin/bash\n#SBATCH -N2 --gpus-per-node=8\nset -e\n#SBATCH --nodes=9\n"
    cluster = imported(started="srun python -u", source=Source(text=text)).job.cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 8)


def test_one_task_a_node_is_not_one_gpu_a_node() -> None:
    text = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n"
    with pytest.raises(InputError, match="gpus_per_node: the file does not say it: give"):
        imported(started="srun bash", source=Source(text=text))


def test_unknown_ranks_are_asked_for_unless_they_are_given() -> None:
    started = "torchrun --nnodes 2 --nproc-per-node auto"
    with pytest.raises(InputError, match=r"--nproc-per-node: auto is no number: .*--gpus-per-node"):
        imported(started=started)
    assert imported(started=started, gpus_per_node=4).job.cluster.gpus_per_node == 4
    with pytest.raises(InputError, match=r"-np: line 40: \$NP is set nowhere.* --gpus-per-node N"):
        imported(started="mpirun -np $NP")


def test_processes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match="10 processes do not divide over 4 nodes"):
        imported(started="mpirun -np 10", nodes=4)
    assert "starts processes on nodes of 8" in texts(imported(started="mpirun -np 8"))["nodes"]


def test_torchrun_starts_one_node_unless_it_is_told() -> None:
    found = imported(started="torchrun --nproc-per-node 8")
    assert (found.job.cluster.nodes, found.remarks) == (1, ())
    assert "nodes" in texts(imported(started="deepspeed --num_gpus 8"), "assumed")
