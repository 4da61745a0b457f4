"""A serving plan: the parallel degrees of a replica, the number of replicas, and the scheduler that
batches requests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mistlab.core.values import MOST_QUANTITY, bounded, check_fields, near_matches, refuse, shown
from mistlab.serving.gpu_facts import CACHE_BYTES, FORMATS, ServingGpu, gpu_named
from mistlab.serving.step_cost import RankLayout

Scheduler = Literal["whole prompts", "chunked prompts", "disaggregated", "changing layouts"]
MOST_DEGREE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """A serving plan: a number of equal replicas, and how the engine's scheduler batches requests.

    With ``whole prompts`` a step either prefills prompts or decodes; with ``chunked prompts`` it
    does both, and prefills at most ``budget`` tokens. At most ``sequences`` requests run on a
    replica. With ``disaggregated`` or ``changing layouts``, prompts are prefilled under the layout
    ``prefill``: by ``prefill_replicas`` on separate GPUs, or in turn with decoding on the same
    GPUs. The layout changes when ``host_gib`` of keys and values are in host memory, and back when
    at most the share ``threshold`` of them is left.
    """

    layout: RankLayout
    replicas: int = field(default=1, metadata=bounded(minimum=1, most=MOST_DEGREE))
    scheduler: Scheduler = "chunked prompts"
    budget: int = field(default=8192, metadata=bounded(minimum=1, most=10**9))
    sequences: int = field(default=1024, metadata=bounded(minimum=1, most=10**9))
    prefill: RankLayout | None = None
    prefill_replicas: int = field(default=0, metadata=bounded(minimum=0, most=MOST_DEGREE))
    host_gib: float = field(default=0.0, metadata=bounded(minimum=0, most=MOST_QUANTITY))
    threshold: float = field(default=0.05, metadata=bounded(minimum=0, maximum=1))

    def __post_init__(self) -> None:
        check_fields(self)
        check_layout(self.layout)
        two = self.scheduler in ("disaggregated", "changing layouts")
        if two != (self.prefill is not None):
            refuse(
                "prefill",
                f"missing, but scheduler {self.scheduler} needs it: give the parallel degrees "
                "for prefill"
                if two
                else f"given, but scheduler {self.scheduler} has one layout for both phases: leave "
                "it out",
            )
        if self.scheduler == "disaggregated" and not self.prefill_replicas:
            refuse("prefill_replicas", "0 with scheduler disaggregated: give at least 1")
        if self.scheduler == "changing layouts" and self.prefill is not None:
            reading = self.prefill_replicas * self.prefill.gpus
            decoding = self.replicas * self.layout.gpus
            if reading != decoding:
                refuse(
                    "prefill_replicas",
                    f"{reading} GPUs prefill and {decoding} decode: give two layouts with equally "
                    "many GPUs",
                )

    @property
    def gpus(self) -> int:
        """The number of all GPUs of the plan."""
        decoding = self.replicas * self.layout.gpus
        if self.prefill is None or self.scheduler == "changing layouts":
            return decoding
        return decoding + self.prefill_replicas * self.prefill.gpus

    @property
    def gpu(self) -> ServingGpu:
        """The name of the plan's GPU."""
        return gpu_named(self.layout.gpu)

    @property
    def text(self) -> str:
        """A serving plan as one line of text, as tables show it."""
        decoding = f"{self.replicas} x {layout_text(self.layout)}"
        if self.prefill is None:
            return decoding
        reading = f"{self.prefill_replicas} x {layout_text(self.prefill)}"
        join = "then" if self.scheduler == "changing layouts" else "beside"
        return f"prompts {reading}, {join} decoding {decoding}"


def layout_text(layout: RankLayout) -> str:
    """The parallel degrees of a replica as text, such as ``tp4 pp2``."""
    parts = [f"tp{layout.tp}"]
    parts += [f"pp{layout.pp}"] * (layout.pp > 1)
    parts += [f"dp{layout.dp}"] * (layout.dp > 1)
    parts += [f"ep{layout.ep}"] * (layout.ep > 1)
    return " ".join(parts)


def check_layout(layout: RankLayout) -> None:
    """Refuse parallel degrees that do not divide the model's heads, experts or ranks, and unknown
    precisions.
    """
    model = layout.model
    if model.is_encoder:
        refuse("model", f"{model.name} is an encoder, which generates no tokens: give a decoder")
    if layout.weights not in FORMATS:
        refuse(
            "weights", f"{shown(layout.weights)} is unknown{near_matches(layout.weights, FORMATS)}"
        )
    if layout.cache not in CACHE_BYTES:
        refuse(
            "cache", f"{shown(layout.cache)} is unknown{near_matches(layout.cache, CACHE_BYTES)}"
        )
    if model.heads % layout.tp:
        refuse(
            "tp",
            f"{layout.tp} does not divide heads {model.heads}: give a divisor of {model.heads}",
        )
    if layout.ep > 1 and model.experts is None:
        refuse("ep", f"{layout.ep}, but {model.name} has no experts: give 1")
    ranks = layout.tp * layout.dp
    if layout.ep > ranks or ranks % layout.ep:
        refuse("ep", f"{layout.ep} does not divide tp x dp = {ranks}: give a divisor of {ranks}")
    if model.experts is not None and model.experts.count % layout.ep:
        refuse(
            "ep",
            f"{layout.ep} does not divide experts {model.experts.count}: give a divisor of "
            f"{model.experts.count}",
        )
    if layout.pp > model.layers:
        refuse(
            "pp",
            f"{layout.pp} is more than the {model.layers} layers: give at most {model.layers}",
        )


# Makes command lines of serving engines: each engine has its own option names for the choices of a
# serving plan.


def vllm_options(plan: ServingPlan, layout: RankLayout) -> str:
    """vLLM's command-line options for one replica (vLLM 0.19, engine arguments)."""
    options: dict[str, object] = {
        "--tensor-parallel-size": layout.tp,
        "--pipeline-parallel-size": layout.pp,
        "--data-parallel-size": layout.dp if layout.dp > 1 else None,
        "--max-num-batched-tokens": plan.budget,
        "--max-num-seqs": plan.sequences,
        "--kv-cache-dtype": "fp8" if layout.cache == "fp8" else "auto",
        "--dtype": "float16" if layout.weights == "fp16" else "bfloat16",
        "--quantization": "fp8" if layout.weights == "fp8" else None,
    }
    flags = ["--enable-expert-parallel"] * (layout.ep > 1)
    flags += ["--no-enable-chunked-prefill"] * (plan.scheduler == "whole prompts")
    return _line(options, flags)


def sglang_options(plan: ServingPlan, layout: RankLayout) -> str:
    """SGLang's command-line options for one replica (SGLang 0.5, server arguments); its
    ``--tp-size`` includes the ranks of attention data parallelism.
    """
    options: dict[str, object] = {
        "--tp-size": layout.tp * layout.dp,
        "--pp-size": layout.pp,
        "--dp-size": layout.dp if layout.dp > 1 else None,
        "--ep-size": layout.ep if layout.ep > 1 else None,
        "--chunked-prefill-size": -1 if plan.scheduler == "whole prompts" else plan.budget,
        "--max-running-requests": plan.sequences,
        "--kv-cache-dtype": "fp8_e4m3" if layout.cache == "fp8" else "auto",
        "--dtype": "float16" if layout.weights == "fp16" else "bfloat16",
        "--quantization": "fp8" if layout.weights == "fp8" else None,
    }
    flags = ["--enable-dp-attention"] * (layout.dp > 1)
    return _line(options, flags)


def exported_lines(
    plan: ServingPlan, engine: str, weights: str = "", context: int | None = None
) -> list[str]:
    """The command lines that serve a plan with an engine, followed by comments on choices that the
    engine has no option for.
    """
    if engine not in LINES:
        refuse("engine", f"{shown(engine)} has no command line{near_matches(engine, LINES)}")
    weights = weights or plan.layout.model.name
    if plan.scheduler == "changing layouts":
        refuse(
            "scheduler",
            f"{plan.scheduler} has no option on the command lines of engines: give another "
            "scheduler",
        )
    line, lines = LINES[engine], list[str]()
    if "/" not in weights:
        lines.append(f"# {weights}: give the path of its weights, or their name at a hub")
    if plan.prefill is None:
        lines += [f"# {plan.replicas} of these behind a balancer"] * (plan.replicas > 1)
        lines.append(line.of(plan, weights, context))
    else:
        lines.append(f"# {plan.prefill_replicas} of these prefill, behind a router of both phases")
        lines.append(line.of(plan, weights, context, "prefill"))
        lines.append(f"# {plan.replicas} of these decode")
        lines.append(line.of(plan, weights, context, "decode"))
    if plan.layout.weights in ("fp8_block", "nvfp4", "mxfp4", "int4"):
        lines.append(f"# the checkpoint itself has to be in {plan.layout.weights}")
    return lines


def _line(options: Mapping[str, object], flags: list[str]) -> str:
    option_texts = [f"{name} {value}" for name, value in options.items() if value is not None]
    return " ".join((*option_texts, *flags))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The pieces of a serving engine's command line: the program, and the options for parallel
    degrees, context length, and servers that only prefill or only decode.
    """

    program: str
    options: Callable[[ServingPlan, RankLayout], str]
    context: str
    phases: Mapping[str, str]

    def of(
        self, plan: ServingPlan, weights: str, context: int | None, phase: str | None = None
    ) -> str:
        """The command line of one replica, for all requests or for one phase (prefill or
        decoding).
        """
        layout = plan.prefill if phase == "prefill" and plan.prefill else plan.layout
        parts = [self.program, weights, self.options(plan, layout)]
        parts += [f"{self.context} {context}"] * (context is not None)
        return " ".join([*parts, *([self.phases[phase]] if phase else [])])


# vLLM transfers key-value caches between servers by a connector (NIXL), which both phases name in
# the same option.
_NIXL = """--kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'"""
LINES = {
    "vllm": CommandLine(
        program="vllm serve",
        options=vllm_options,
        context="--max-model-len",
        phases={"prefill": _NIXL, "decode": _NIXL},
    ),
    "sglang": CommandLine(
        program="python -m sglang.launch_server --model-path",
        options=sglang_options,
        context="--context-length",
        phases={
            "prefill": "--disaggregation-mode prefill",
            "decode": "--disaggregation-mode decode",
        },
    ),
}
