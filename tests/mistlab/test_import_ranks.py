"""Nodes and GPUs of launch commands, by the words of each launcher."""

import pytest

from mistlab.core.values import InputError
from mistlab.export.given import Given
from mistlab.export.megatron.megatron_read import read_launch
from mistlab.shell.launch import launch_of
from mistlab.shell.session import LaunchFile
from tests.mistlab.launched import H100, RUN, SHAPE, imported, texts

WIDE = RUN.replace("--global-batch-size 16", "--global-batch-size 32")
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
    source = LaunchFile(text="", beside={"hosts": "a slots=8\n# b slots=8\nc slots=8\n"}.get)
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
        source=LaunchFile(text=BATCH),
        **({"gpus_per_node": 8} if "$" in started else {}),
    ).job.cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 8)


def test_a_batch_system_s_lines_after_the_first_command_do_not_count() -> None:
    text = "#!/bin/bash\n#SBATCH -N2 --gpus-per-node=8\nset -e\n#SBATCH --nodes=9\n"
    cluster = imported(started="srun python -u", source=LaunchFile(text=text)).job.cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 8)


def test_one_task_a_node_is_not_one_gpu_a_node() -> None:
    text = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n"
    with pytest.raises(InputError, match="gpus_per_node: is missing in the file: give"):
        imported(started="srun bash", source=LaunchFile(text=text))


def test_unknown_ranks_are_asked_for_unless_they_are_given() -> None:
    started = "torchrun --nnodes 2 --nproc-per-node auto"
    with pytest.raises(InputError, match=r"--nproc-per-node: auto is not a number: .*--gpus-per"):
        imported(started=started)
    assert imported(started=started, gpus_per_node=4).job.cluster.gpus_per_node == 4
    with pytest.raises(InputError, match=r"-np: line 40: \$NP is set nowhere.* --gpus-per-node N"):
        imported(started="mpirun -np $NP")


def test_processes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match="10 processes do not divide evenly over 4 nodes"):
        imported(started="mpirun -np 10", nodes=4)
    assert "starts 8 processes and a node has 8" in texts(imported(started="mpirun -np 8"))["nodes"]


def test_torchrun_starts_one_node_unless_it_is_told() -> None:
    found = imported(started="torchrun --nproc-per-node 8")
    assert (found.job.cluster.nodes, found.remarks) == (1, ())
    assert "nodes" in texts(imported(started="deepspeed --num_gpus 8"), "assumed")


@pytest.mark.parametrize(
    ("started", "text", "ranks"),
    [
        ("srun -N4 --ntasks-per-node=8 python", "", (4, 8)),
        ("srun -N4 -n16 python", "", (4, 4)),
        ("srun python", "#SBATCH -N4\n#SBATCH -n16\n", (4, 4)),
        ("srun python", "#SBATCH --exclusive -N4 --gres=gpu:4\n", (4, 4)),
        ("srun -n16 python", "", (2, 8)),
    ],
)
def test_short_options_may_have_their_value_attached(
    started: str, text: str, ranks: tuple[int, int]
) -> None:
    cluster = imported(run=WIDE, started=started, source=LaunchFile(text=text)).job.cluster
    assert (cluster.nodes, cluster.gpus_per_node) == ranks
    with pytest.raises(InputError, match=r"-N: line 40: \$N is set nowhere"):
        imported(run=WIDE, started="srun -N$N --ntasks-per-node=8 python")


def test_tasks_of_slurm_are_told_where_they_stand_for_gpus() -> None:
    header = "#SBATCH -N 4\n#SBATCH --ntasks-per-node=8\n"
    found = imported(run=WIDE, started="srun python", source=LaunchFile(text=header))
    assert found.job.cluster.num_gpus == 32
    assert "8, one for each task of --ntasks-per-node (line 2)" in texts(found)["gpus_per_node"]
    asked = imported(
        run=WIDE, started="srun python", source=LaunchFile(text=f"{header}#SBATCH --gres=gpu:8\n")
    )
    assert "gpus_per_node" not in texts(asked)
    other = imported(
        run=WIDE, started="srun python", source=LaunchFile(text=f"{header}#SBATCH --gres=gpu:4\n")
    )
    assert (
        "predicted with 8 GPUs, one for each task" in texts(other, "contradicting")["gpus_per_node"]
    )
    # What torchrun starts on a node counts.
    inner = imported(
        run=WIDE, started="srun torchrun --nproc-per-node 4", source=LaunchFile(text=header)
    )
    assert (inner.job.cluster.num_gpus, "gpus_per_node" in texts(inner)) == (16, False)


def test_lines_behind_the_first_command_are_none_of_the_batch_system_s() -> None:
    text = "#!/bin/bash\n\n#SBATCH --nodes=2\nexport A=1\n#SBATCH --nodes=4\n"
    found = imported(
        run=WIDE, started="srun --ntasks-per-node=8 python", source=LaunchFile(text=text)
    )
    assert found.job.cluster.nodes == 2
    told = texts(found, "contradicting")["nodes"]
    assert told.startswith("#SBATCH --nodes=4 (line 5): comes after the first command")
    # A script inside of the script has a header, too.
    inner = "X=1\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=4\nsrun python\nEOF\n"
    found = imported(
        run=WIDE, started="srun --ntasks-per-node=8 python", source=LaunchFile(text=inner)
    )
    assert found.job.cluster.nodes == 4


def refusal(text: str, **given: int) -> str:
    source = LaunchFile(text=text)
    with pytest.raises(InputError) as raised:
        read_launch(launch_of(source), source, Given(hardware=H100, **given))
    return str(raised.value)


def test_a_refusal_of_gpus_tells_of_counts_that_are_a_default() -> None:
    start = "torchrun --nnodes $NNODES --nproc-per-node ${GPUS:-8} pretrain_gpt.py"
    options = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2"
    text = f"NNODES=${{SLURM_NNODES:-1}}\n{start} {SHAPE} {RUN} {options}\n"
    hint = "SLURM_NNODES is taken as 1, its default (line 1): give --nodes N or --set SLURM_NNODES="
    assert "8 GPUs are not a multiple of the 16 GPUs of a copy" in refusal(text)
    assert hint in refusal(text)
    assert "GPUS is taken as 8, its default (line 2): give --gpus-per-node N" in refusal(text)
    assert "SLURM_NNODES" not in refusal(text, nodes=1)
    experts = text.replace(options, "--num-experts 16 --expert-model-parallel-size 16")
    assert hint in refusal(experts)
    batch = text.replace(options, "").replace("--global-batch-size 16", "--global-batch-size 12")
    assert hint in refusal(batch)
    # What is wrong in itself has nothing to do with nodes.
    assert "SLURM_NNODES" not in refusal(text.replace("--num-layers 8", "--num-layers 0"))


@pytest.mark.parametrize(
    ("head", "hint"),
    [
        ("while getopts n: o; do N=$OPTARG; done", "reads arguments (line 1), but has none"),
        ("N=0\nif [ $# -gt 0 ]; then N=$1; fi", "reads arguments (line 2), but has none"),
        ("N=${1:-0}", "line 1: ${1:-0}: the script is taken as started without arguments: give"),
        ("N=0", ""),
    ],
)
def test_a_refusal_of_no_size_tells_of_arguments_that_a_script_reads(head: str, hint: str) -> None:
    shape = SHAPE.replace("--num-layers 8", "--num-layers $N")
    text = f"{head}\ntorchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py {shape} {RUN}\n"
    refused = refusal(text)
    assert refused.startswith("--num-layers: line ")
    assert hint in refused
    assert ("ARG" in refused) == bool(hint)
