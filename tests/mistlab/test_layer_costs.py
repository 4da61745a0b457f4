"""Seconds of layers: rates, the host's launches, and how engines' kernels differ."""

from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import FieldError
from mistlab.cost.kernels import class_of, rule_of, slowdown_of
from mistlab.cost.layers import BESIDE, LayerFigures, LayerModel, work_of
from mistlab.engines.engine import ENGINES
from mistlab.graph.library import Variant, graph_of, shipped
from mistlab.graph.symbols import size_columns
from mistlab.machine.hardware import OPERATOR_CLASSES, Compute, Rate
from mistlab.plan.workload import ModelSpec, Workload
from tests.workloads import workload_of

RATES = tuple(
    Rate(operators=operators, tflops=None if operators == "memory" else 50.0, gbytes_per_s=200.0)
    for operators in OPERATOR_CLASSES
)
COMPUTE = Compute(rates=RATES, launch_us=0.0)
WORK = workload_of("gpt3-1.3b", 2048, 8)


def sizes_of(work: Workload, b: np.ndarray, tp: np.ndarray) -> dict[str, np.ndarray]:
    return size_columns(work, {"b": b, "tp": tp})


# An engine whose forward passes run the operators of the graph.
PLAIN = "mist"


def block(compute: Compute = COMPUTE, engine: str = PLAIN, **sizes: int) -> LayerFigures:
    columns = sizes_of(WORK, np.array([sizes.get("b", 2)]), np.array([sizes.get("tp", 1)]))
    work = work_of(graph_of(WORK), ENGINES[engine].kernels)
    return LayerModel(work=work, compute=compute, slowdown=1.0)(columns)["block"]


def forward_s(compute: Compute = COMPUTE, engine: str = PLAIN, **sizes: int) -> float:
    return float(block(compute, engine, **sizes).passes["forward"].compute_s[0])


def test_a_pass_is_its_operations_and_its_bytes() -> None:
    graph = graph_of(WORK)
    sizes = {k: float(v[0]) for k, v in sizes_of(WORK, np.array([2]), np.array([1])).items()}
    expected = 0.0
    for operator in graph.block.of_phase("forward"):
        if operator.kind == "collective":
            continue
        values = {s: sizes[s.name] for e in (operator.flop,) for s in e.free_symbols}
        moved = operator.read_bytes + operator.written_bytes
        moved_bytes = float(moved.subs({s: sizes[s.name] for s in moved.free_symbols}))
        if class_of(operator) != "memory":
            expected += float(operator.flop.subs(values)) / 50e12
        expected += moved_bytes / 200e9
    assert forward_s() == pytest.approx(expected, rel=1e-12)


def test_a_host_that_computes_itself_launches_at_the_expense_of_arithmetic() -> None:
    launching = replace(COMPUTE, launch_us=1.0)
    beside, alone = forward_s(launching), forward_s()
    assert beside == pytest.approx(alone, rel=1e-3)
    in_turn = forward_s(replace(launching, host_computes=True))
    # So many kernels as the host alone would take microseconds for.
    nothing = tuple(replace(rate, tflops=None, gbytes_per_s=1e12) for rate in RATES)
    launches_s = forward_s(Compute(rates=nothing, launch_us=1.0))
    assert launches_s > 5e-6
    assert in_turn == pytest.approx(alone + launches_s, rel=1e-6)


def products(model: ModelSpec) -> tuple[float, float]:
    """Sizes of the weights of a block: of those whose rows are split over ranks, and of all."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    width = model.ffn * (2 if model.mlp_type == "gated_mlp" else 1)
    by_rows = model.hidden * (queries + 2 * keys + width)
    return by_rows, by_rows + model.hidden * (queries + model.ffn)


@pytest.mark.parametrize("name", ["gpt3-7b", "llama-7b", "llama3-70b", "falcon-7b"])
def test_weights_gradients_of_split_rows_go_on_beside_reductions(name: str) -> None:
    """Of the two products that a weight has backward, the one whose result nobody waits for."""
    work = replace(WORK, model=catalog.model(name))
    columns = sizes_of(work, np.array([2]), np.array([4]))
    compiled = work_of(graph_of(work), ENGINES["megatron"].kernels).compiled
    found = dict(zip(compiled.names, compiled(columns)[:, 0].tolist(), strict=True))

    def share(layer: str) -> float:
        beside = found[f"{layer} backward {BESIDE} flop"]
        return beside / found[f"{layer} backward matmul flop"]

    by_rows, every = products(work.model)
    assert share("block") == pytest.approx(by_rows / every / 2)
    assert share("head") == 0.5
    assert found[f"block forward {BESIDE} flop"] == 0
    if name == "gpt3-7b":
        # Three and four of twelve squares of the hidden size.
        assert share("block") == pytest.approx(7 / 24)


def test_small_layers_take_what_their_launches_take() -> None:
    slow_host = replace(COMPUTE, launch_us=100_000.0)
    kernels = sum(o.kind != "collective" for o in graph_of(WORK).block.of_phase("forward"))
    assert forward_s(slow_host) == pytest.approx(kernels * 0.1, rel=1e-3)
    assert forward_s(replace(COMPUTE, launch_us=0.01)) == pytest.approx(forward_s(), rel=1e-3)


@pytest.mark.parametrize("operators", OPERATOR_CLASSES)
def test_faster_rates_are_never_slower(operators: str) -> None:
    faster = tuple(
        replace(rate, gbytes_per_s=400.0) if rate.operators == operators else rate for rate in RATES
    )
    assert forward_s(replace(COMPUTE, rates=faster)) <= forward_s()
    assert forward_s(replace(COMPUTE, sustained=0.8)) > forward_s()


def test_single_precision_is_slower_by_the_datasheets_peaks() -> None:
    peaks = catalog.hardware("l4-24gb").gpu.peak_tflops
    assert slowdown_of(peaks, "fp16") == 1
    assert slowdown_of(peaks, "fp32") == pytest.approx(121 / 30.3)


@pytest.mark.parametrize("family", ["gpt", "llama", "falcon"])
def test_gradients_of_weights_are_added_up_inside_products(family: str) -> None:
    """By engines mistlab and megatron; other gradients are added by kernels of their own."""
    graph = shipped(Variant(family=family, attention="flash", precision="half"))

    def added(engine: str) -> set[str]:
        return {
            operator.module
            for layer in graph.layers
            for operator in layer.operators
            if operator.kind == "accumulate"
            and rule_of(operator, layer, ENGINES[engine].kernels, "flash").bytes_factor == 0
        }

    weights = {"attention.qkv", "attention.output", "mlp.up", "mlp.down", "head.projection"}
    assert added("mistlab") == weights
    assert added("megatron") > weights
    assert added("deepspeed") == added("mist") == set()


def test_gradients_of_vectors_are_one_kernel() -> None:
    """Two of each of a GPT block's two normalisations, which add the residual's gradient besides.
    Gradients of queries, keys and values are put together by a kernel that the published Mist has
    none for."""
    columns = sizes_of(WORK, np.array([2]), np.array([1]))

    def kernels(engine: str) -> float:
        compiled = work_of(graph_of(WORK), ENGINES[engine].kernels).compiled
        found = dict(zip(compiled.names, compiled(columns)[:, 0].tolist(), strict=True))
        return found["block backward kernels"]

    weights, vectors, residuals, puts_together = 4, 4, 2, 1
    fewer = weights + vectors - 1 + residuals - puts_together
    assert kernels("mist") - kernels("mistlab") == fewer


@pytest.mark.parametrize(("name", "copies"), [("gpt3-7b", False), ("llama3-8b", True)])
def test_written_out_attention_copies_where_heads_share_keys(name: str, copies: bool) -> None:
    """By engine mistlab; where it copies nothing, each sequence's products are kernels."""
    work = replace(WORK, model=catalog.model(name), attention="math")

    def kernels(engine: str, micro_batch: int) -> float:
        columns = sizes_of(work, np.array([micro_batch]), np.array([1]))
        compiled = work_of(graph_of(work), ENGINES[engine].kernels).compiled
        found = dict(zip(compiled.names, compiled(columns)[:, 0].tolist(), strict=True))
        return found["block forward kernels"]

    # Two products; four copies; a softmax of one kernel, as the published one has; and the norm of
    # the network, which is one kernel with the sum before it.
    assert kernels("mistlab", 4) - kernels("mistlab", 1) == (0 if copies else 2 * 3)
    assert kernels("mistlab", 1) - kernels("mist", 1) == (0 if copies else -4) - 1


def test_operands_of_fused_attention_are_copied_for_batches_only() -> None:
    assert forward_s(engine="deepspeed", b=1) == pytest.approx(forward_s(b=1))
    assert forward_s(engine="deepspeed", b=2) > forward_s(b=2)


def test_a_softmax_that_is_not_fused_takes_more() -> None:
    unfused = replace(WORK, attention="math")
    work = work_of(graph_of(unfused), ENGINES["megatron"].kernels)
    model = LayerModel(work=work, compute=COMPUTE, slowdown=1.0)

    def seconds(micro_batch: int, tensor_parallel: int) -> float:
        columns = sizes_of(unfused, np.array([micro_batch]), np.array([tensor_parallel]))
        return float(model(columns)["block"].passes["forward"].compute_s[0])

    # 16 heads over 8 ranks: two for one sequence, four for two.
    assert seconds(1, 8) > seconds(2, 8) / 2 * 1.5
    assert seconds(1, 4) < seconds(2, 4)


def test_rates_name_what_is_wrong() -> None:
    with pytest.raises(
        FieldError, match=r"tflops: missing, as is gbytes_per_s: give .* memory operators"
    ):
        Rate(operators="memory")
    with pytest.raises(
        FieldError, match="rates: has rates of matmul: give one rate for matmul, batched"
    ):
        Compute(rates=RATES[:1], launch_us=0.0)
