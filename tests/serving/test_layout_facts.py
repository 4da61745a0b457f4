"""Tensor parallelism against pipelines: published statements, each in its direction.

They are single statements of users about engines of 2023 to 2025 (issues of vLLM and TensorRT-LLM).
"""

from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.plan.model_parts import Window
from mistlab.serving.engine_constants import ServedRun, fitted_constants
from mistlab.serving.load import Lengths, ServingLoad, drawn_load
from mistlab.serving.steady import Constants, capacity_tokens, decode_step_s
from mistlab.serving.step_cost import LayoutColumns, RankLayout
from simulators.serving.continuous import Batching, play_continuous
from simulators.serving.step_clock import StepClock


def layout_of(model: str, gpu: str, engine: str, weights: str, *, tp: int, pp: int) -> RankLayout:
    return RankLayout(
        model=catalog.model(model),
        gpu=gpu,
        engine=engine,
        weights=weights,
        cache="bf16",
        tp=tp,
        pp=pp,
    )


def constants_of(layout: RankLayout, kind: str, version: str = "unsaid") -> Constants:
    run = ServedRun(
        engine=layout.engine,
        version=version,
        gpu=layout.gpu,
        model=layout.model.name,
        weights=layout.weights,
        kind=kind,
    )
    return fitted_constants().of([run])


def decoded_per_s(layout: RankLayout, running: float, context: float) -> float:
    """Tokens a second while nothing is read."""
    by = constants_of(layout, "static batch")
    of = LayoutColumns.of([layout])
    return running / float(decode_step_s(of, by, np.array([running]), np.array([context]))[0])


@pytest.mark.parametrize(("prompt", "output"), [(512, 256), (1024, 256)])
def test_latency_at_a_rate_is_least_with_tensor_parallelism_alone(prompt: int, output: int) -> None:
    # LLaMA-13B on four A100 at three requests a second, TensorRT-LLM: 6.4 s with tp 4, 10.2 s with
    # tp 2 pp 2 at the 90th percentile; pp 4 does not keep up. Lengths are not said, and seconds
    # follow them: only ratios of layouts can be judged.
    lengths = Lengths(shape="lognormal", tokens=prompt), Lengths(shape="lognormal", tokens=output)
    load = drawn_load(300, lengths, np.random.default_rng(0), rate=3.0)
    slowest = {}
    for tp, pp in ((4, 1), (2, 2), (1, 4)):
        layout = layout_of("llama-13b", "A100-40G", "trtllm", "fp16", tp=tp, pp=pp)
        # Through which server and client is not said; the rates that fits know were behind Triton.
        by = constants_of(layout, "unsaid")
        batching = Batching(
            capacity=int(capacity_tokens(LayoutColumns.of([layout]), by)[0]), sequences=256
        )
        clock = StepClock.of(layout, {name: float(one[0]) for name, one in by.items()}, most=256)
        played = play_continuous(load, clock, batching)
        latencies = [(one.end_s or 0.0) - one.arrival_s for one in played.requests]
        slowest[tp, pp] = float(np.quantile(latencies, 0.9))
    assert slowest[2, 2] / slowest[4, 1] == pytest.approx(10.2 / 6.4, rel=0.3)
    assert slowest[1, 4] > 1.3 * slowest[2, 2]


@pytest.mark.parametrize(("batch", "measured_s"), [(1, 5.5), (16, 6.07)])
def test_a_static_batch_decodes_faster_with_more_tensor_parallelism(
    batch: int, measured_s: float
) -> None:
    # QwQ-32B on A100, vLLM, 200 tokens with tp 2, 4 and 8: 5.5, 3.91 and 3.15 s alone, 6.07, 4.77
    # and 4.25 s in a batch of 16.
    layouts = [layout_of("qwen2.5-32b", "A100", "vllm", "bf16", tp=tp, pp=1) for tp in (2, 4, 8)]
    seconds = [200 * batch / decoded_per_s(layout, batch, 100) for layout in layouts]
    assert seconds[0] > 1.2 * seconds[1] > 1.2 * 1.2 * seconds[2]
    assert seconds[0] == pytest.approx(measured_s, rel=0.15)


def test_pipelines_decode_slower_than_tensor_parallelism() -> None:
    # Qwen2.5-14B on four GPUs, 400 requests: nearly three times the decoding throughput with tp 4.
    # How much is more than any constant here says: pipelines of that version waited for the host.
    tensor, pipeline = (
        decoded_per_s(layout_of("qwen2.5-14b", "A100", "vllm", "bf16", tp=tp, pp=pp), 400, 2500)
        for tp, pp in ((4, 1), (1, 4))
    )
    assert tensor > 1.02 * pipeline


def test_a_pipeline_of_a_model_that_fits_one_gpu_gains_little() -> None:
    # Llama-3.1-8B, a hundred short requests: 565 tokens a second with one GPU, 586 with pp 8.
    one, eight = (
        decoded_per_s(layout_of("llama3-8b", "A100", "vllm", "bf16", tp=1, pp=pp), 64, 1200)
        for pp in (1, 8)
    )
    assert one < eight < 3 * one


def test_early_vllm_served_long_prompts_slower_on_eight_gpus_than_on_one() -> None:
    # Mistral-7B in vLLM of 2023, a hundred prompts of 10,240 tokens and 1,024 each out: 0.575
    # requests a second on one A100, 0.27 on eight. That version kept the model's windows, so that
    # all fit on one GPU, and its driver serialised all token ids for each worker in every step.
    # Links are not said: over PCIe eight GPUs are slower, over NVLink they gain nothing.
    gains = {gpu: gain_of_eight(gpu, "0.2") for gpu in ("A100", "A100-PCIE")}
    assert gains["A100-PCIE"] < 0.75
    assert gains["A100"] < 1.05
    assert gain_of_eight("A100", "0.19") > 4
    assert gain_of_eight("A100-PCIE", "0.19") > 1.3


def gain_of_eight(gpu: str, version: str) -> float:
    """Requests a second of eight GPUs over those of one, a hundred long prompts at once."""
    load = ServingLoad(prompts=(10240,) * 100, outputs=(1024,) * 100, arrivals_s=(0.0,) * 100)
    rates = []
    for tp in (1, 8):
        layout = layout_of("mistral-7b", gpu, "vllm", "fp16", tp=tp, pp=1)
        window = Window(size=4096, full_every=0)
        layout = replace(layout, model=replace(layout.model, window=window))
        by = constants_of(layout, "offline", version)
        capacity = int(capacity_tokens(LayoutColumns.of([layout]), by)[0])
        assert capacity > len(load) * window.size
        # Blocks of tokens outside of windows are given back.
        batching = Batching(capacity=len(load) * 11264, budget=10240, mixes=False)
        clock = StepClock.of(layout, {name: float(one[0]) for name, one in by.items()}, most=100)
        rates.append(play_continuous(load, clock, batching).requests_per_s)
    return rates[1] / rates[0]
