"""The network between nodes: measured by processes of two nodes, fitted, and refused on one."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from experiments import calibrate, profile_hardware
from experiments.calibration.profile_tables import ResumedTable, Tables
from experiments.calibration.profiled import network_gbytes_per_s
from experiments.cli.commandline import DONE, WRONG_USAGE, run
from mistlab.core.files import read_yaml, write_yaml
from mistlab.core.units import MIB_BYTES
from mistlab.core.values import from_mapping, to_mapping
from mistlab.machine.hardware import Hardware
from runtime.profiling.network import NodesOfRun
from tests.experiments.test_bare_machine import MACHINE

COMMAND = ("-m", "experiments.profile_hardware", "--between-nodes", "--device", "cpu", "--quick")
TWO_NODES = NodesOfRun(nodes=2, gpus=4)
# Small sizes, so that two nodes on one machine end soon.
SMALL = """
import sys
from experiments import profile_hardware
from experiments.calibration.profiling import SIZES
from experiments.cli.commandline import run
from dataclasses import replace
small = tuple(4096 << power for power in range(4))
SIZES["cpu", True] = replace(SIZES["cpu", True], repetitions=1, transfer_bytes=small)
sys.exit(run(profile_hardware.main, sys.argv[1:]))
"""


def tables_of(folder: Path, devices: int) -> Path:
    """The tables of a node that was measured before."""
    environment = replace(MACHINE.environment, num_devices=devices)
    folder.mkdir()
    write_yaml(to_mapping(replace(MACHINE, environment=environment)), folder / "machine.yaml")
    return folder


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    table: ResumedTable = getattr(Tables.of(folder, MACHINE.environment.device), name)
    return [dict(row) for row in table.rows]


def test_groups_have_neighbours_in_the_same_places_of_each_node() -> None:
    assert TWO_NODES.shapes == [1, 2, 4]
    assert TWO_NODES.groups(1) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert TWO_NODES.groups(2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert TWO_NODES.groups(4) == [[*range(8)]]


def test_two_nodes_fill_the_tables_of_the_first_one(tmp_path: Path, warm_python: str) -> None:
    tables = tables_of(tmp_path / "tables", 1)
    words = [*COMMAND[2:], "--only", "measure", "--tables", str(tables), "--out", "unused.yaml"]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29643", "LOCAL_WORLD_SIZE": "1"}
    meeting |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [warm_python, "-c", SMALL, *words],
            env={**os.environ, **meeting, "RANK": str(rank)},
            cwd=tmp_path if rank else None,
        )
        for rank in (0, 1)
    ]
    assert [node.wait(timeout=300) for node in nodes] == [DONE, DONE]
    network, sends = rows_of(tables, "network"), rows_of(tables, "sends")
    assert {(row["gpus"], row["nodes"]) for row in network} == {("2", "2")}
    assert {row["collective"] for row in network} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert len(network) == 3 * 4
    assert [row["link"] for row in sends] == ["inter_node"] * 4
    assert all(float(row["time_ms"]) > 0 for row in (*network, *sends))


@pytest.mark.slow
def test_torchrun_on_two_nodes_writes_the_network_into_the_file(tmp_path: Path) -> None:
    """A node of two processes is measured, then its network with a second node on this machine."""
    out = tmp_path / "box.yaml"
    usual = ["--device", "cpu", "--quick", "--out", str(out)]
    assert run(profile_hardware.main, [*usual, "--gpus-per-node", "2"]) == DONE
    alone = from_mapping(Hardware, read_yaml(out))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    launch += ["--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launch += ["--rdzv-endpoint", "127.0.0.1:29644", *COMMAND, "--out", str(out)]
    nodes = [subprocess.Popen(launch, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [node.communicate(timeout=1200)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    hardware = from_mapping(Hardware, read_yaml(out))
    assert hardware.transfers is not None
    assert alone.transfers is not None
    shapes = {(one.gpus_in_node, one.nodes) for one in hardware.transfers.groups}
    assert shapes == {(2, 1), (1, 2), (2, 2)}
    assert hardware.transfers.across_nodes is not None
    assert alone.transfers.across_nodes is None
    assert "network by the longest all-gather between nodes" in hardware.provenance.node.source
    assert hardware.node.inter_node_gbytes_per_s != alone.node.inter_node_gbytes_per_s


def network_table(folder: Path, rate: float, latency_ms: float) -> ResumedTable:
    """Collectives of two nodes of four GPUs, of which each node sends ``rate`` bytes a second."""
    table = Tables.of(folder, "box").network
    for gpus in (2, 8):
        for kind, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
            for mib in (16, 64, 256, 1024):
                # Of groups with one GPU of each node, four share the node's links.
                of_node = (4 if gpus == 2 else 1) * times * mib * MIB_BYTES / 2
                key = dict(zip(table.keys, ("box", gpus, 2, kind, mib), strict=True))
                table.add(key, {"time_ms": latency_ms + 1e3 * of_node / rate, "spread": 0.0})
    return table


def test_a_nodes_network_is_the_rate_at_which_all_its_gpus_send(tmp_path: Path) -> None:
    table = network_table(tmp_path, rate=50e9, latency_ms=0.0)
    assert network_gbytes_per_s(table) == pytest.approx(50.0)


def test_lines_across_nodes_are_fitted_by_the_shape_of_their_groups(tmp_path: Path) -> None:
    table, out = network_table(tmp_path, rate=50e9, latency_ms=0.5), tmp_path / "box.yaml"
    words = ["--hardware", "l4-24gb", "--collectives", str(table.path), "--out", str(out)]
    assert run(calibrate.main, words) == DONE
    hardware = from_mapping(Hardware, read_yaml(out))
    assert hardware.transfers is not None
    (one,) = [g for g in hardware.transfers.groups if (g.gpus_in_node, g.nodes) == (1, 2)]
    assert one.all_reduce is not None
    assert one.all_reduce.gbytes_per_s == pytest.approx(12.5, rel=1e-3)
    assert one.all_reduce.latency_us == pytest.approx(500, rel=1e-2)
    (four,) = [g for g in hardware.transfers.groups if (g.gpus_in_node, g.nodes) == (4, 2)]
    assert four.all_reduce is not None
    assert four.all_reduce.gbytes_per_s == pytest.approx(50, rel=1e-3)


def test_one_node_and_tables_of_another_one_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = tables_of(tmp_path / "tables", 8)
    words = ["--between-nodes", "--device", "cpu", "--tables", str(tables)]
    words += ["--out", str(tmp_path / "box.yaml")]
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    assert run(profile_hardware.main, words) == WRONG_USAGE
    told = capsys.readouterr().err
    assert "two equal nodes, but one node started: start torchrun --nnodes 2" in told
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert run(profile_hardware.main, words) == WRONG_USAGE
    told = capsys.readouterr().err
    assert "were measured on nodes of 8 devices, but torchrun started 1 processes a node" in told
