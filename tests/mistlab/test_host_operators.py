"""Hosts issue operators one by one: a block with more of them takes longer in proportion."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.cost.tasks import TaskModel
from mistlab.engines.engine import ENGINES, HostTime
from mistlab.graph.library import graph_of
from mistlab.machine.cluster import Cluster
from mistlab.plan.workload import ModelSpec, Workload

CLUSTER = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=8)


def workload(model: str | ModelSpec, precision: str = "bf16") -> Workload:
    found = catalog.model(model) if isinstance(model, str) else model
    return Workload(
        model=found,
        sequence_length=4096,
        global_batch=8,
        attention="flash",
        precision=precision,  # type: ignore[arg-type]
    )


def host_of(work: Workload, engine: str) -> HostTime:
    host = TaskModel.of(work, CLUSTER, ENGINES[engine]).host
    assert host is not None
    return host


def both_ms(host: HostTime) -> float:
    return 1e3 * (host.forward_s + host.backward_s)


@pytest.mark.parametrize(
    ("engine", "model", "milliseconds"),
    [
        ("megatron-core", "llama3-70b", 4.8),
        ("nanotron", "llama3-8b", 4.4),
        ("fsdp", "qwen3-30b-a3b", 4.0),
        ("megatron-bridge-alltoall", "qwen3-30b-a3b", 9.2),
        ("megatron-bridge-eager", "deepseek-v2", 12.149),
        ("megatron-bridge-eager", "mixtral-8x7b", 9.2),
    ],
)
def test_a_block_takes_the_host_what_its_runs_showed(
    engine: str, model: str, milliseconds: float
) -> None:
    assert both_ms(host_of(workload(model), engine)) == pytest.approx(milliseconds, rel=1e-3)


def test_blocks_with_more_operators_take_the_host_longer_in_proportion() -> None:
    few, many = workload("qwen3-30b-a3b"), workload("deepseek-v2")
    operators = [graph_of(work).block_operators for work in (few, many)]
    hosts = [both_ms(host_of(work, "megatron-bridge-alltoall")) for work in (few, many)]
    assert operators[1] > 1.2 * operators[0]
    assert hosts[1] / hosts[0] == pytest.approx(operators[1] / operators[0])


def test_conversions_to_8_bits_are_no_operators_of_their_own() -> None:
    half, eighth = (graph_of(workload("llama3-8b", name)) for name in ("bf16", "fp8"))
    assert half.block_operators == eighth.block_operators == 41


def test_the_delta_rule_is_a_chain_of_operators() -> None:
    """Forward it is 26 operators and backward 28, where the graph has one of each."""
    graph = graph_of(workload("qwen3-next-80b-a3b"))
    (scan,) = (one for one in graph.mapping["further_blocks"] if "scan" in one["name"])
    names = [one["name"] for one in scan["operators"]]
    assert names.count("mistlab.delta_rule") == names.count("mistlab.delta_rule_backward") == 1
    issued = graph.operators_of(scan["name"])
    assert sum(issued.values()) == len(names) + 25 + 27


def test_kinds_of_blocks_count_by_how_often_they_are() -> None:
    model = catalog.model("deepseek-v2")

    def operators(dense: int) -> float:
        assert model.experts is not None
        own = replace(model, experts=replace(model.experts, dense_blocks=dense))
        return graph_of(workload(own)).block_operators

    none, some, more = (operators(dense) for dense in (0, 15, 30))
    assert none > some > more
    assert none - some == pytest.approx(some - more)


def test_a_host_without_a_number_of_operators_takes_any_block_alike() -> None:
    host = HostTime(forward_s=1.0, backward_s=2.0)
    assert host.of_blocks(82) == host
    twice = replace(host, operators=41).of_blocks(82)
    assert (twice.forward_s, twice.backward_s, twice.end_s) == (2.0, 4.0, 0.0)
    assert replace(host, operators=41).of_blocks(20).forward_s == 1.0
