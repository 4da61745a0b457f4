"""The tools that a coding agent can call: typed questions, short answers with bounds and
assumptions.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, TypedDict

from pydantic import Field

from experiments.agents.asking import Asking, CommandAnswer, folder_of
from experiments.pages.tables import number
from mistlab import catalog
from mistlab.core.files import format_yaml
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError, to_mapping
from mistlab.machine.hardware import Hardware
from mistlab.plan.named_spaces import SPACES
from mistlab.serving.step_cost import parameters_of

PlanText = Annotated[
    str, Field(description="a plan file's content (YAML), or the path of a plan file")
]
ModelText = Annotated[
    str,
    Field(description="a catalogue name, a path, or the content of a Hugging Face config.json"),
]
HardwareText = Annotated[
    str, Field(description="a catalogue name such as h100-80gb, a path, or a hardware file's YAML")
]
Framework = Literal[
    "megatron",
    "deepspeed",
    "torchtitan",
    "torchtitan-toml",
    "accelerate",
    "axolotl",
    "llama-factory",
    "trl",
    "torchtune",
    "automodel",
    "megatron-bridge",
]
Kind = Literal["models", "hardware", "spaces"]
Precision = Literal["fp16", "bf16", "fp32", "tf32", "fp8", "fp4"]
# Parts of an iteration's time that take less than this share of it are left out of an answer.
NEGLIGIBLE = 0.01
# The time limit of a search in seconds, given to the command as ``--budget-seconds``.
MOST_SEARCH_S = 110.0
# Values that a field of a model has if the model lacks the feature; such fields are left out of an
# answer.
UNSAID: tuple[Any, ...] = (None, False, "", [], ())

ASKING = Asking()


class PlanFigures(TypedDict):
    """A plan's predicted time with its 90 % bounds, the memory of its fullest GPU, and the
    assumptions of the prediction.
    """

    answer: str
    iteration_s: float
    iteration_s_low: float
    iteration_s_high: float
    tokens_per_s: float
    mfu: float
    fits: bool
    fullest_gpu_gib: float
    assumptions: list[str]


class TunedFigures(TypedDict):
    """The plan that a search found, as the text of a plan file; its time with bounds; and whether
    it is proven fastest.
    """

    answer: str
    status: str
    predicted_s: float
    predicted_s_low: float
    predicted_s_high: float
    lower_bound_s: float | None
    gap: float | None
    plan: str
    assumptions: list[str]


class FitFigures(TypedDict):
    """Whether a plan fits, how many bytes of the fullest GPU each kind of tensor takes, and the
    cheapest change if it does not fit.
    """

    answer: str
    fits: bool
    fullest_gpu_gib: float
    room_gib: float
    memory_gib: dict[str, float]
    cheapest_change: str | None
    changed_iteration_s: float | None


class PartSeconds(TypedDict):
    """The breakdown of an iteration's time on the GPU into parts that add up to it."""

    answer: str
    iteration_s: float
    parts_s: dict[str, float]


class LaunchFigures(TypedDict):
    """A plan as a framework's file, and the choices of the plan that the file cannot express."""

    answer: str
    text: str
    exact: bool
    remarks: list[str]


class ReadFigures(TypedDict):
    """A plan read from another framework's file, as the text of a plan file, and the assumptions
    made in reading it.
    """

    answer: str
    plan: str
    read: list[str]
    assumptions: list[str]


class ServedFigures(TypedDict):
    """The best layouts (parallel degrees) of GPUs for serving a load of requests."""

    answer: str
    best: dict[str, Any]
    others: list[dict[str, Any]]
    command_lines: list[str]


def predict_plan(plan: PlanText, played: bool = False) -> PlanFigures:
    """Predict a training plan: seconds an iteration with 90 % bounds, memory, whether it fits.

    With ``played``, the event simulator plays every task, in place of the closed form: slower, but
    more detailed.
    """
    with folder_of(plan=plan) as paths:
        line = [paths["plan"], "--simulator", "events" if played else "symbolic"]
        answer = _only(ASKING.answer("predict", *line))
    peak = max(stage["peak_reserved_bytes"] for stage in answer["stages"]) / GIB_BYTES
    low, high = (answer[f"peak_reserved_bytes_{end}"] / GIB_BYTES for end in ("low", "high"))
    fits = "fits" if answer["fits"] else "does NOT fit"
    return PlanFigures(
        answer=(
            f"{answer['iteration_s']:.3f} s an iteration (90 % of measurements: "
            f"{answer['iteration_s_low']:.3f} to {answer['iteration_s_high']:.3f}), "
            f"{answer['tokens_per_s']:,.0f} tokens/s; {fits}, fullest GPU {peak:.1f} GiB "
            f"(90 % of peaks: {low:.1f} to {high:.1f})"
        ),
        iteration_s=answer["iteration_s"],
        iteration_s_low=answer["iteration_s_low"],
        iteration_s_high=answer["iteration_s_high"],
        tokens_per_s=answer["tokens_per_s"],
        mfu=answer["mfu"],
        fits=answer["fits"],
        fullest_gpu_gib=peak,
        assumptions=answer["notes"],
    )


def explain_plan(plan: PlanText) -> PartSeconds:
    """Explain a training plan's time: arithmetic, slow kernels, exposed communication by kind,
    recomputation, copies, pipeline bubble.
    """
    with folder_of(plan=plan) as paths:
        answer = _only(ASKING.answer("predict", paths["plan"], "--breakdown"))
    parts: dict[str, float] = answer["breakdown"]["parts"]
    whole = answer["iteration_s"]
    large = {name: value for name, value in parts.items() if value >= NEGLIGIBLE * whole}
    ranked = sorted(large, key=lambda name: -large[name])
    shares = (f"{name.removesuffix('_s')} {large[name] / whole:.0%}" for name in ranked)
    return PartSeconds(
        answer=f"of {whole:.3f} s: {', '.join(shares)}", iteration_s=whole, parts_s=large
    )


def tune_training(  # noqa: PLR0913, PLR0917 (an agent names each)
    model: ModelText,
    hardware: HardwareText,
    global_batch: Annotated[int, Field(ge=1, description="the sequences of an optimizer step")],
    nodes: Annotated[int, Field(ge=1)] = 1,
    gpus_per_node: Annotated[int, Field(ge=1)] = 8,
    sequence_length: Annotated[int, Field(ge=1)] = 4096,
    precision: Precision = "bf16",
    space: Annotated[
        str, Field(description="which plans may be chosen: mist, megatron-core, moe, fsdp, ...")
    ] = "",
    keep_free_gib: Annotated[float, Field(ge=0)] = 0.0,
    budget_seconds: Annotated[float, Field(gt=0, le=MOST_SEARCH_S)] = 60.0,
    train: Annotated[
        Literal["all", "adapters"],
        Field(description="train all weights, or LoRA adapters beside frozen weights"),
    ] = "all",
    rank: Annotated[int, Field(ge=1, description="the rank of the LoRA adapters")] = 16,
    base: Annotated[
        Literal["16bit", "8bit", "4bit"],
        Field(description="the precision of frozen weights; with 4bit the training is QLoRA"),
    ] = "16bit",
    loss: Annotated[
        Literal["whole", "chunked"],
        Field(description="compute the logits of all tokens at once, or of 4,096 tokens at a time"),
    ] = "whole",
) -> TunedFigures:
    """Find the fastest plan that trains or fine-tunes a model on a cluster: parallelism,
    micro-batch, sharding, recomputation, offloading. Says whether the plan is proven fastest, or by
    how much another plan may be faster. If no plan fits, the error says what would make one fit.
    """
    frozen = ("--rank", str(rank), "--base", base) if train == "adapters" else ()
    with folder_of(model=model, hardware=hardware) as paths, TemporaryDirectory() as folder:
        line = [
            *("--model", paths["model"], "--hardware", paths["hardware"]),
            *("--global-batch", str(global_batch), "--nodes", str(nodes)),
            *("--gpus-per-node", str(gpus_per_node), "--sequence-length", str(sequence_length)),
            *("--precision", precision, "--budget-seconds", f"{budget_seconds:g}"),
            *(("--keep-free-gib", f"{keep_free_gib:g}") if keep_free_gib else ()),
            *((f"--space={space}",) if space else ()),
            *("--train", train, *frozen, "--loss", loss),
            *("--out", str(Path(folder) / "plan.yaml")),
        ]
        answer = _only(ASKING.answer("tune", *line))
    status = answer["status"]
    gap = number(answer["gap"], ".1%")
    proof = {
        "OPTIMAL": "proven: no plan of the space is predicted faster",
        "FEASIBLE": f"not proven: a plan of the space may be up to {gap} faster",
    }.get(status, status)
    if status == "FEASIBLE" and answer["gap"] is None:
        proof = f"best of {answer['plan_evaluations']:,} plans tried, no bound"
    return TunedFigures(
        answer=(
            f"{answer['predicted_s']:.3f} s an iteration (90 % of measurements: "
            f"{answer['predicted_s_low']:.3f} to {answer['predicted_s_high']:.3f}) "
            f"in space {answer['space']}; {proof}"
        ),
        status=status,
        predicted_s=answer["predicted_s"],
        predicted_s_low=answer["predicted_s_low"],
        predicted_s_high=answer["predicted_s_high"],
        lower_bound_s=answer["lower_bound_s"],
        gap=answer["gap"],
        plan=format_yaml(answer["plan"]),
        assumptions=[answer["reason"]] if answer["reason"] else [],
    )


def will_plan_fit(plan: PlanText, keep_free_gib: float = 0.0) -> FitFigures:
    """Tell whether a plan fits its GPUs' memory, and the cheapest change that makes it fit."""
    with folder_of(plan=plan) as paths, TemporaryDirectory() as folder:
        free = ["--keep-free-gib", f"{keep_free_gib:g}"] if keep_free_gib else []
        answer = _only(ASKING.answer("will_it_fit", paths["plan"], *free, "--out", folder))
    asked, last = answer["rows"][0], answer["rows"][-1]
    changed = last if last["kind"] == "cheapest" else None
    needs, room = asked["reserved_bytes"] / GIB_BYTES, asked["room_bytes"] / GIB_BYTES
    verdict = f"{'fits' if asked['fits'] else 'does NOT fit'}: {needs:.1f} of {room:.1f} GiB"
    if changed is not None:
        verdict += f"; cheapest change: {changed['change']} ({changed['iteration_s']:.3f} s)"
    return FitFigures(
        answer=verdict,
        fits=asked["fits"],
        fullest_gpu_gib=needs,
        room_gib=room,
        memory_gib={name: size / GIB_BYTES for name, size in asked["memory"].items() if size},
        cheapest_change=None if changed is None else changed["change"],
        changed_iteration_s=None if changed is None else changed["iteration_s"],
    )


def export_plan(plan: PlanText, framework: Framework) -> LaunchFigures:
    """Write a plan as the launch line or configuration of a framework."""
    with folder_of(plan=plan) as paths:
        answer = _only(ASKING.answer("export", paths["plan"], "--to", framework))
    lost = [remark["text"] for remark in answer["remarks"] if remark["kind"] != "noted"]
    exact = "said exactly" if answer["exact"] else f"not said exactly: {'; '.join(lost) or 'see'}"
    return LaunchFigures(
        answer=f"{framework}: {exact}",
        text=answer["text"],
        exact=answer["exact"],
        remarks=[f"{one['kind']}: {one['text']}" for one in answer["remarks"]],
    )


def import_launch_file(
    file: Annotated[str, Field(description="a launch script or configuration: content or path")],
    hardware: HardwareText,
    model: Annotated[str, Field(description="the model, if the file does not name it")] = "",
) -> ReadFigures:
    """Read a launch script or configuration of Megatron-LM, DeepSpeed, torchtitan, nanotron, NeMo,
    axolotl and others as a plan, which predict_plan and explain_plan then take.
    """
    with folder_of(file=file, hardware=hardware, model=model or "none") as paths:
        given = ["--model", paths["model"]] if model else []
        line = [paths["file"], "--hardware", paths["hardware"], *given]
        answer = _only(ASKING.answer("import_plan", *line))
    return ReadFigures(
        answer=f"read as {answer['format']}: {answer['read'][0]}; {answer['remarks'][-1]}",
        plan=format_yaml(answer["plan"]),
        read=answer["read"],
        assumptions=answer["remarks"],
    )


def serve_load(  # noqa: PLR0913, PLR0917 (an agent names each)
    model: Annotated[str, Field(description="the name of a model in the catalogue")],
    gpu: Annotated[str, Field(description="A100, H100, H200, B200, L4, A10, ...")],
    gpus: Annotated[int, Field(ge=1)],
    prompt_tokens: Annotated[float, Field(gt=0)] = 1000.0,
    output_tokens: Annotated[float, Field(gt=0)] = 500.0,
    most_token_s: Annotated[
        float,
        Field(
            ge=0, description="the longest time between tokens, as a goal in seconds; 0 for no goal"
        ),
    ] = 0.0,
    most_first_token_s: Annotated[
        float,
        Field(
            ge=0,
            description="the longest time to the first token, as a goal in seconds; 0 for no goal",
        ),
    ] = 0.0,
    engine: Literal["vllm", "sglang", "trtllm"] = "vllm",
) -> ServedFigures:
    """Find the layout of GPUs that serves requests best: tensor, pipeline and data parallelism."""
    with folder_of(model=model, gpu=gpu) as paths:
        line = [
            *("--model", paths["model"], "--gpu", paths["gpu"], "--gpus", str(gpus)),
            *("--prompt", f"{prompt_tokens:g}", "--output", f"{output_tokens:g}"),
            *(("--tpot", f"{most_token_s:g}") if most_token_s else ()),
            *(("--ttft", f"{most_first_token_s:g}") if most_first_token_s else ()),
            *("--engine", engine, "--quick"),
            *(("--export", engine) if engine != "trtllm" else ()),
        ]
        answer = _only(ASKING.answer("serve_plan", *line))
    best, played = answer["best"], answer["best_played"]
    percentile = ""
    if played is not None and played["meets_goals"] is not None:
        meets = "meets" if played["meets_goals"] else "is nearest to"
        plan = f"{played['plan']} with {played['in_flight']:.0f} in flight"
        percentile = f"; at {100 * played['share']:.0f} % of requests {plan} {meets} the goals"
    return ServedFigures(
        answer=(
            f"{best['plan']}: {best['requests_per_s']:.2f} requests/s, first token "
            f"{best['ttft_s']:.3f} s, then {1e3 * best['tpot_s']:.1f} ms a token; best of "
            f"{answer['layouts']} layouts by the model's means{percentile}; measured runs differ "
            "by 15 % or so"
        ),
        best=best,
        others=answer["others"][:3],
        command_lines=answer["command_lines"],
    )


def list_names(kind: Kind) -> list[str]:
    """List the names of models, hardware or search spaces that other tools take."""
    names: Mapping[str, Any] = {
        "models": catalog.model_names,
        "hardware": catalog.hardware_names,
        "spaces": lambda: tuple(SPACES),
    }
    return list(names[kind]())


class KnownFacts(TypedDict):
    """What the catalogue says about a model or a kind of GPU."""

    answer: str
    facts: dict[str, Any]


def describe_name(
    name: Annotated[str, Field(description="a name that list_names has listed")],
) -> KnownFacts:
    """Describe a model (parameters, blocks, sizes, experts) or a kind of hardware (memory, peak
    rates, bandwidths) in the catalogue.
    """
    if name in catalog.hardware_names():
        return _hardware_facts(catalog.hardware(name))
    model = catalog.model(name)
    facts = {key: value for key, value in to_mapping(model).items() if value not in UNSAID}
    facts["parameters"] = round(parameters_of(model))
    sizes = f"{model.layers} blocks, hidden size {model.hidden}, {model.heads} heads"
    return KnownFacts(
        answer=f"{name}: {facts['parameters'] / 1e9:.2f} billion parameters, {sizes}", facts=facts
    )


def _hardware_facts(hardware: Hardware) -> KnownFacts:
    gpu, node = to_mapping(hardware.gpu), to_mapping(hardware.node)
    memory = f"{hardware.gpu.memory_gib} GiB at {hardware.gpu.memory_gbytes_per_s:,.0f} GB/s"
    return KnownFacts(
        answer=(
            f"{hardware.name}: {hardware.gpu.peak_tflops.bf16} TFLOP/s in bf16 without sparsity, "
            f"{memory}, up to {hardware.node.gpus} GPUs a node"
        ),
        facts={"gpu": gpu, "node": node, "provenance": to_mapping(hardware.provenance)},
    )


TOOLS = (
    predict_plan,
    explain_plan,
    tune_training,
    will_plan_fit,
    export_plan,
    import_launch_file,
    serve_load,
    list_names,
    describe_name,
)


def _only(answer: CommandAnswer) -> Mapping[str, Any]:
    """The single object that a command has printed; raises an error with the command's message if
    the command refused its input.
    """
    if not answer.objects:
        raise InputError(_problem(answer.told))
    (printed,) = answer.objects
    if "error" in printed:
        raise InputError(str(printed["error"]))
    return printed


def _problem(messages: str) -> str:
    """The error message that a command wrote to standard error, without other lines; if there is no
    such message, the last line.
    """
    lines = messages.splitlines() or ["no answer"]
    for line_number, line in enumerate(lines):
        if line.startswith("error: "):
            return "\n".join(lines[line_number:]).removeprefix("error: ")
    return lines[-1]
