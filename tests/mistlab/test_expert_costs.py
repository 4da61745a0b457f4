"""What experts cost besides their products: exchanges, hosts, conversions and biases."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.cost.kernels import rule_of
from mistlab.cost.links import LinkTimes, exchanged_s
from mistlab.cost.tasks import TaskModel, task_columns
from mistlab.engines.engine import ENGINES, ExpertExchange
from mistlab.graph.library import graph_of
from mistlab.graph.stored_graph import CAST
from mistlab.plan.model_parts import Experts
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch
from tests.mistlab.test_experts import B200, CLUSTER, MODEL, WORK


def test_an_exchange_across_nodes_by_hand() -> None:
    links = LinkTimes.of(CLUSTER)
    size_bytes = np.array([64e6])
    inside = links.to_all(gpus_in_node=8, nodes=1)
    plain = links.to_all(gpus_in_node=8, nodes=2)
    network = B200.node.inter_node_gbytes_per_s * 1e9 / 8
    # Half of the rows go to the other node, over the rank's eighth of the network.
    assert plain.s_per_byte == pytest.approx(0.5 / network)
    # Of eight copies four cross; once a node it is one, or none for 1 token in 256.
    once = links.to_all(gpus_in_node=8, nodes=2, copies=8)
    assert once.s_per_byte == pytest.approx(0.5 / network * (1 - 2**-8) / 4)
    assert inside(size_bytes)[0] < once(size_bytes)[0] < plain(size_bytes)[0]
    # Messages to 63 other nodes go at once: they take as long to begin as the one to a neighbour.
    alone = [links.to_all(gpus_in_node=1, nodes=nodes).latency_s for nodes in (2, 64)]
    whole = [links.to_all(gpus_in_node=8, nodes=nodes).latency_s for nodes in (2, 64)]
    assert alone == pytest.approx([14e-6] * 2)
    assert whole == pytest.approx([inside.latency_s + 14e-6] * 2)


def test_an_exchange_takes_longer_for_each_expert_and_may_be_hidden() -> None:
    links = LinkTimes.of(CLUSTER)
    size, messages = np.array([1e8]), np.array([2.0])
    shape = np.array([4]), np.array([1])

    def seconds(exchange: ExpertExchange) -> float:
        model = replace(MODEL, experts=Experts(count=32, active=2, ffn=64))
        return float(exchanged_s(links, exchange, model, shape)(size, messages)[0])

    plain = seconds(ExpertExchange())
    # Eight experts of a rank, at each of two exchanges.
    assert seconds(ExpertExchange(expert_s=1e-4)) - plain == pytest.approx(2 * 8 * 1e-4)
    assert seconds(ExpertExchange(hidden=1.0, expert_s=1e-4)) == pytest.approx(2 * 8 * 1e-4)
    assert seconds(ExpertExchange(hidden=0.5)) == pytest.approx(plain / 2)


@pytest.mark.parametrize("short", [0, 256])
@pytest.mark.parametrize("nodes", [1, 2])
def test_copies_may_take_the_weights_of_all_experts_along(short: int, nodes: int) -> None:
    links, own = LinkTimes.of(CLUSTER), Experts(count=32, active=2, ffn=64, hidden=short)
    model, width = replace(MODEL, experts=own), short or MODEL.hidden
    shape = np.array([4]), np.array([nodes])
    tokens = 1000.0
    # Each token's two copies go there and come back in 16 bits; one weight of a copy in 32.
    size, messages = np.array([tokens * 2 * (2 * 2 * width + 4)]), np.array([3.0])

    def seconds(exchange: ExpertExchange) -> float:
        return float(exchanged_s(links, exchange, model, shape)(size, messages)[0])

    plain, of_all = (
        seconds(ExpertExchange(once_a_node=True, weights_of_all=some)) for some in (False, True)
    )
    more_bytes = np.array([tokens * 2 * 4 * (32 / nodes - 1)])
    link = links.to_all(gpus_in_node=4, nodes=nodes, copies=2)
    gather = links.collective("all_gather", gpus_in_node=4, nodes=nodes)
    choices = np.array([tokens * 32 * 4 * nodes])
    by_hand = more_bytes * link.s_per_byte + gather(choices) / 2
    assert of_all - plain == pytest.approx(by_hand[0])


def bridged_s(work: Workload, **values: int) -> Mapping[str, float]:
    """Seconds of a block's passes without gradients' reductions, by engine ``megatron-bridge``."""
    batch = StageBatch(
        layers=1, **{name: np.array([value]) for name, value in (PASSED | values).items()}
    )
    task = TaskModel.of(work, CLUSTER, ENGINES["megatron-bridge"])
    seconds = task.seconds({name: batch.value(name) for name in task_columns()})
    place = task.types.names.index("block")
    return {
        phase: float((seconds.alone(kind, "") + seconds.tensor_s[phase])[place, 0])
        for phase, kind in (("forward", "F"), ("backward", "B"))
    }


PASSED = {"data_parallel": 8, "tensor_parallel": 1, "micro_batch": 1, "expert_parallel": 8}


def test_a_block_with_experts_takes_as_long_as_its_host() -> None:
    operators = graph_of(WORK).operators_of("block")
    passes = bridged_s(WORK)
    for phase, number in operators.items():
        assert passes[phase] == pytest.approx(number * 112e-6)
    assert bridged_s(WORK, expert_parallel=1) == pytest.approx(passes)
    # Where the GPU is slower, and where the host knows how many rows come.
    busy = replace(WORK, model=replace(MODEL, experts=Experts(count=16, active=8, ffn=16384)))
    padded = replace(WORK, expert_capacity=1.0, expert_padding=True)
    for some in (bridged_s(busy, micro_batch=4), bridged_s(padded)):
        assert some["forward"] != pytest.approx(passes["forward"], rel=0.01)
    assert bridged_s(busy, micro_batch=4)["forward"] > passes["forward"]
    assert bridged_s(padded)["forward"] < passes["forward"]


def test_experts_convert_and_add_biases_in_kernels_of_their_own() -> None:
    """Others' conversions are half done by kernels that make what is converted."""
    work = replace(WORK, model=catalog.model("gpt-oss-20b"), precision="fp8")
    block, rules = graph_of(work).block, ENGINES["megatron-core"].kernels
    factors = {
        (o.module, o.name, o.phase): rule_of(o, block, rules, "flash").bytes_factor
        for o in block.operators
    }
    assert factors["experts.up", CAST, "forward"] == factors["experts.down", CAST, "backward"] == 1
    assert factors["attention.qkv", CAST, "forward"] == 0.5
    # Forward 4 bytes, then 10, 8 and 6, in place of 4; backward 6, 6, 4, 12 and 12 in place of 2.
    assert factors["experts.down", "mistlab.add_by_group", "forward"] == (4 + 10 + 8 + 6) / 4
    assert factors["experts.down", "mistlab.sum_by_group", "backward"] == (6 + 6 + 4 + 24) / 2
    assert factors["experts.up", "mistlab.add_by_group", "forward"] == 1


@pytest.mark.parametrize(("experts", "seconds"), [(1, 1e-5), (2, 1e-3 + 2e-5)])
def test_an_exchange_waits_for_its_host_where_a_rank_has_several_experts(
    experts: int, seconds: float
) -> None:
    exchange = ExpertExchange(wait_s=1e-3, expert_s=1e-5)
    assert exchange.waits_s(experts) == pytest.approx(seconds)
