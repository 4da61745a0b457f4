"""Tables of collectives: read, predicted by their links, fitted, and refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import predict_collectives
from experiments.cli.commandline import run
from experiments.networks.collective_tables import (
    CollectiveRow,
    RefusedCollective,
    collective_rows,
    columns_of,
    hardware_named,
)
from experiments.networks.predict_collectives import fit, left_out
from mistlab.core.values import InputError
from mistlab.network.collective_times import (
    Collectives,
    first_guess,
    fitted_collectives,
    gpu_links,
)

HEADER = "group,hardware,collective,library,gpus,nodes,gpus_per_node,network,size_bytes,time_us\n"


def table(path: Path, *rows: str) -> Path:
    path.write_text(HEADER + "\n".join(rows) + "\n", encoding="utf-8")
    return path


def rows_of(path: Path) -> list[CollectiveRow]:
    return [row for row in collective_rows(path) if isinstance(row, CollectiveRow)]


def many(tmp_path: Path) -> list[CollectiveRow]:
    """Every GPU, operation, size and number of nodes."""
    lines = [
        f"any,{gpu},{operation},{library},{8 * nodes},{nodes},8,,{2**power},"
        for gpu in gpu_links()
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
        for library in ("NCCL", "vLLM_custom_graph", "SGLang_CustomAllReduce_eager")
        for nodes in (1, 2, 8)
        for power in range(8, 33, 3)
    ]
    return rows_of(table(tmp_path / "many.csv", *lines))


def seconds(columns: Collectives) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return columns.seconds(fitted_collectives())


def test_more_bytes_take_longer_and_faster_links_do_not(tmp_path: Path) -> None:
    rows = many(tmp_path)
    times = seconds(columns_of(rows)).reshape(-1, 9)
    # Switches that add up make all-reduces of 2 MiB and more faster: one step down at most.
    steps = np.diff(times, axis=1)
    added = np.array([row.links.adds_in_switch for row in rows]).reshape(-1, 9)[:, 0]
    assert (steps[~added] > 0).mean() > 0.6
    assert (steps[~added] >= 0).all()
    assert ((steps[added] < 0).sum(axis=1) <= 1).all()
    columns = columns_of(rows)
    columns.gpu_rate[:] *= 2
    columns.node_rate[:] *= 2
    columns.card_rate[:] *= 2
    assert (seconds(columns) <= times.ravel() * (1 + 1e-12)).all()


def test_no_bus_bandwidth_is_above_its_links(tmp_path: Path) -> None:
    """But of all-reduces that switches or trees between nodes add up."""
    columns = columns_of(many(tmp_path))
    bus = columns.bus_factor * columns.size_bytes / seconds(columns) / 1e9
    assert (bus <= 1.1 * columns.gpu_rate).all()
    is_sum = columns.operation == "all_reduce"
    across = (columns.nodes > 1) & ~is_sum
    assert (bus[across] <= columns.node_rate[across]).all()


def test_names_of_gpus_are_read_whole() -> None:
    for text, name in (
        ("H100 (p5, EFA)", "H100"),
        ("A100-SXM (NVLink3)", "A100"),
        ("A100-80", "A100"),
        ("RTXPRO6000", "RTX-PRO-6000"),
        ("Titan-RTX", "TITAN-RTX"),
        ("L40S", "L40S"),
        ("GB10 (DGX Spark)", "GB10"),
        ("GH-96", "GH200"),
    ):
        assert hardware_named(text) == name
    for text in ("H1000", "L40X9", "", "XA100"):
        problem = f"hardware: {text} names no GPU" if text else "hardware: is empty: it needs a GPU"
        with pytest.raises(InputError, match=f"^{problem} whose links are known: "):
            hardware_named(text)


def test_networks_are_read_from_what_rows_say(tmp_path: Path) -> None:
    rows = rows_of(
        table(
            tmp_path / "networks.csv",
            "a,A100,all_reduce,NCCL,16,2,8,8 x 200 Gb/s,1024,",
            "a,A100,all_reduce,NCCL,256,32,8,4 x HDR,1024,",
            "a,V100,all_reduce,NCCL,16,2,8,100 Gb/s EFA,1024,",
            'a,A100-40,send/recv,"NCCL (sockets, GCP)",2,2,1,two regions,1024,',
            "a,H100,all_reduce,NCCL,16,2,8,,1024,",
        )
    )
    rates = [(row.node_rate, row.card_rate, row.network) for row in rows]
    assert rates[:3] == [(200, 25, "rdma"), (100, 25, "rdma"), (12.5, 12.5, "efa")]
    assert rates[3][2] == "sockets"
    assert rates[3][0] < 1
    assert rates[4][:2] == (400, 50)
    assert "are assumed" in rows[4].notes[0]


@pytest.mark.parametrize(
    ("network", "gbytes_per_s"),
    [("8 x 12.5 Gb/s", 12.5), ("2x400Gbps", 100.0), ("HDR", 25.0), ("100 Gbit/s", 12.5)],
)
def test_rates_of_cards_are_read_whole(network: str, gbytes_per_s: float, tmp_path: Path) -> None:
    (row,) = rows_of(table(tmp_path / "t.csv", f"g,H100,all_reduce,NCCL,16,2,8,{network},1024,50"))
    assert row.node_rate == gbytes_per_s
    assert row.notes == ()


def test_a_network_without_a_rate_is_noted_and_one_that_moves_nothing_refused(
    tmp_path: Path,
) -> None:
    """One row without an answer takes none from the others."""
    cells = "g,H100,all_reduce,NCCL,16,2,8,{},1024,50"
    path = table(tmp_path / "t.csv", cells.format("dark fibre"), cells.format("8 x 0 Gb/s"))
    noted, refused = collective_rows(path)
    assert isinstance(noted, CollectiveRow)
    assert noted.notes[0].startswith("network dark fibre says no rate: ")
    assert isinstance(refused, RefusedCollective)
    assert refused.problem == (
        "network: 8 x 0 Gb/s has no bandwidth: give cards and their rate, as 8 x 400 Gb/s"
    )


def test_a_fit_finds_the_numbers_that_made_its_rows(tmp_path: Path) -> None:
    """And predicts a cluster that was left out, of whose kind of links there is another."""
    truth = fitted_collectives()
    lines, draw = [], np.random.default_rng(0)
    for gpu in ("A100", "H100", "B200", "L40S", "RTX-PRO-6000"):
        for operation in ("all_reduce", "all_gather"):
            for gpus in (2, 4, 8):
                lines += [
                    f"{gpu},{gpu},{operation},NCCL,{gpus},1,{gpus},,{2**power},"
                    for power in range(8, 30)
                ]
    plain = rows_of(table(tmp_path / "plain.csv", *lines))
    took = 1e6 * columns_of(plain).seconds(truth) * np.exp(0.02 * draw.standard_normal(len(plain)))
    lines = [f"{line}{time}" for line, time in zip(lines, took, strict=True)]
    rows = rows_of(table(tmp_path / "timed.csv", *lines))
    found = fit(rows, first_guess())
    assert np.median(np.abs(columns_of(rows).seconds(found) / (1e-6 * took) - 1)) < 0.03
    assert np.median(left_out(rows, first_guess()).errors) < 0.2
    # A fit to other times finds other numbers.
    slow = [line.rsplit(",", 1)[0] + f",{3 * time}" for line, time in zip(lines, took, strict=True)]
    slower = fit(rows_of(table(tmp_path / "slow.csv", *slow)), first_guess())
    assert slower.numbers.launch_us > 1.5 * found.numbers.launch_us


def test_rows_are_answered_in_order_and_what_cannot_be_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(
        tmp_path / "some.csv",
        "a,H100,all_reduce,NCCL,8,1,8,,1048576,40",
        "a,H1000,all_reduce,NCCL,8,1,8,,1048576,",
        "a,H100,moe dispatch,NCCL,8,1,8,,1048576,",
        "a,H100,all_reduce,NCCL,9,2,8,,1048576,",
        "a,H100,all_reduce,NCCL,8,1,8,,1 MB,",
        "a,H100,all_reduce,NCCL,1,1,8,,1024,",
        "a,H100,all_gather,NCCL,8,1,8,,,",
    )
    assert run(predict_collectives.main, [str(path), "--json"]) == 1
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["row"] for answer in answers] == [1, 2, 3, 4, 5, 6, 7]
    first, large = answers[0], answers[-1]
    assert first["time_us_low"] < first["time_us"] < first["time_us_high"]
    assert 25 < first["time_us"] < 55
    assert large["notes"] == ["no size: 1 GiB is assumed"]
    for answer, text in zip(
        answers[1:6],
        (
            "line 3: hardware: H1000 names no GPU whose links are known",
            "line 4: collective: moe dispatch cannot be predicted",
            "line 5: nodes: 2 do not divide 9 GPUs",
            "line 6: size_bytes: '1 MB' is not a number above 0",
            "line 7: gpus: 1 is too few for a collective",
        ),
        strict=True,
    ):
        assert text in answer["error"]
    assert run(predict_collectives.main, [str(path)]) == 1
    assert "7 rows, 1 measured, 5 refused" in capsys.readouterr().out


def test_a_table_of_other_things_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("model,step_s\nllama,1\n", encoding="utf-8")
    with pytest.raises(InputError, match="none of the columns collective, operation, op"):
        list(collective_rows(path))
    assert run(predict_collectives.main, [str(path)]) == 2


def test_elements_and_rates_are_read(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(
        "hardware,lib,op,kernel,dtype,gpus,elements,latency_ms\n"
        "B200,nccl,alltoall,NCCL,half,8,1024,0.01\n"
        "B200,trtllm,all_reduce,TRTLLM,bfloat16,8,1024,0.004\n"
        "B200,nccl,alltoall,NCCL,int3,8,1024,0.01\n",
        encoding="utf-8",
    )
    first, second, refused = collective_rows(path)
    assert isinstance(first, CollectiveRow)
    assert isinstance(second, CollectiveRow)
    assert (first.operation, first.size_bytes, first.measured_us) == ("all_to_all", 2048, 10.0)
    assert second.software == "trtllm"
    assert isinstance(refused, RefusedCollective)
    assert "int3 is unknown" in refused.problem
    rates = tmp_path / "rates.csv"
    rates.write_text(
        "source,hardware,operation,group_size,nodes,bytes,busbw_gbps,algbw_gbps\n"
        "a,H200,all_reduce,8,1,1000000000,437.5,\n"
        "a,H200,all_gather,8,1,1000000000,,500\n",
        encoding="utf-8",
    )
    took = [row.measured_us for row in rows_of(rates)]
    assert took == pytest.approx([4000.0, 2000.0])


def test_gpus_with_cards_of_their_own_go_by_these(tmp_path: Path) -> None:
    """One card for each pair of processes that send; a cloud's sockets for other GPUs."""
    path = tmp_path / "cards.csv"
    lines = [f"send/recv,NCCL (sockets),{gpu},{of},2,{of},same zone,{to}" for gpu, of, to in PAIRS]
    head = "collective,library,hardware,gpus,nodes,gpus_per_node,network,to_gpus"
    path.write_text("\n".join([head, *lines]))
    rows = [row for row in collective_rows(path) if isinstance(row, CollectiveRow)]
    assert [row.node_rate for row in rows[:4]] == [25.0, 25.0, 50.0, 100.0]
    assert {row.network for row in rows[:4]} == {"rdma"}
    assert rows[4].network == "sockets"
    assert columns_of(rows).kinds.tolist() == ["network"] * 4 + ["sockets"]


PAIRS = [("GH-96", 1, 4), ("GH-96", 4, 1), ("GH-96", 2, 2), ("GH-96", 4, 4), ("A100-80", 2, 2)]


def test_workstations_reach_one_another_by_the_ethernet_of_their_boards(tmp_path: Path) -> None:
    """Where one end is a workstation, or both; a network that the row says comes first."""
    path = tmp_path / "desks.csv"
    head = "collective,library,hardware,gpus,nodes,gpus_per_node,network,to_hardware,to_gpus"
    sockets = "send/recv,NCCL (sockets)"
    lines = [
        f"{sockets},RTX-3090,4,2,4,same zone,RTX-3090,4",
        f"{sockets},A100-80,1,2,1,same zone,RTX-2080,1",
        f"{sockets},A100-80,1,2,1,same zone,other,1",
        "all_reduce,NCCL,RTX-4090,16,2,8,100 Gb/s,,",
    ]
    path.write_text("\n".join([head, *lines]))
    rows = rows_of(path)
    assert [row.network for row in rows] == ["ethernet", "ethernet", "sockets", "rdma"]
    assert [row.node_rate for row in rows[:2]] == [0.1175, 0.1175]
    assert "Ethernet of a workstation's board" in rows[0].notes[-1]
    assert rows[3].node_rate == 12.5
    assert columns_of(rows).kinds.tolist() == ["ethernet", "ethernet", "sockets", "network"]
    # A message of a gibibyte takes what a gigabit a second takes.
    gigabit_s = 2**30 / 0.125e9
    assert seconds(columns_of(rows))[0] == pytest.approx(gigabit_s, rel=0.1)
