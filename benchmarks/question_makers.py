"""Functions that make questions for an agent: each draws one question and computes its right
answer.

A function takes a generator of random numbers, and returns a question, or None if what it drew
makes no good question (an invalid plan, or two parts of a time that are equally large). Right
answers come from the commands, never from the agent's tools; from measured steps that
Megatron-Bridge published; or from pages of results.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from experiments.runs.configuration import configuration_of
from experiments.runs.runs_table import TableRow
from experiments.studies.published_configurations import cases_of_file, tried
from mistlab import catalog
from mistlab.core.files import format_yaml, parse_yaml
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError
from mistlab.job.job import job_from_mapping, job_to_mapping
from mistlab.serving.step_cost import parameters_of

ROOT = Path(__file__).parents[1]
UNANSWERABLE = "unanswerable"
# The largest relative errors with which answers count as right: for a fact in a table, a number
# that a command prints, a search (whose budget may differ), and a measured step, which no model
# predicts exactly.
OF_FACTS, OF_FIGURES, OF_SEARCHES, OF_STEPS = 0.02, 0.03, 0.05, 0.15
# A question asks for the largest part of an iteration's time only if it is at least this many times
# as large as the second largest part.
CLEARLY = 1.15

MODELS = (
    "llama3-8b",
    "llama3-70b",
    "qwen2.5-7b",
    "qwen2.5-32b",
    "gpt3-13b",
    "llama-13b",
    "olmo2-13b",
)
LARGER = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2", "glm-4.5-air", "gpt-oss-20b", "qwen3-32b")
GPUS = ("h100-80gb", "h200-141gb", "a100-80gb", "b200-180gb", "a100-40gb", "l40s-48gb")
CARDS = ("rtx-4090-24gb", "rtx-3090-24gb", "a10-24gb", "l4-24gb", "rtx-5090-32gb")
PARTS = {
    "products_s": "products below the peak rate",
    "attention_s": "attention",
    "memory_bound_s": "memory-bound kernels",
    "recomputation_s": "recomputation",
    "tensor_exchange_s": "exposed exchanges of tensor parallelism",
    "data_parallel_s": "exposed exchanges of data parallelism",
    "bubble_s": "the pipeline's bubble",
}
YES_NO = ("yes", "no")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question with its right answer, the tolerance, and how the answer was computed."""

    kind: str
    text: str
    answer: float | str
    tolerance: float = 0.0
    computed: str
    plan: str = ""

    def as_plain(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in {"", 0.0}}


Maker = Callable[[Random], Question | None]


def asked(command: str, *line: str) -> Mapping[str, Any]:
    """The JSON object that a command prints for these arguments."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments", command, *line, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    texts = [text for text in done.stdout.splitlines() if text.startswith("{")]
    if not texts:
        raise InputError(done.stderr.strip() or command)
    found: Mapping[str, Any] = json.loads(texts[0])
    return found


def asked_of(plan: str, command: str, *line: str) -> Mapping[str, Any]:
    """The JSON object that a command prints for a plan, given as the plan file's text."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        path.write_text(plan, encoding="utf-8")
        out = ("--out", folder) if command == "will_it_fit" else ()
        return asked(command, str(path), *line, *out)


def drawn_plan(random: Random) -> str | None:
    """The text of a random plan file for Megatron-core, or None if what was drawn is not valid."""
    model = random.choice(MODELS)
    gpus = random.choice((8, 16, 32, 64))
    tensor, stages = random.choice((1, 2, 4, 8)), random.choice((1, 2, 4))
    blocks, micro = catalog.model(model).layers, random.choice((1, 2))
    data, micro_batches = gpus // tensor // stages, stages * random.choice((2, 4, 8))
    if not data or blocks % stages:
        return None
    stage = {
        "layers": blocks // stages,
        "data_parallel": data,
        "tensor_parallel": tensor,
        "micro_batch": micro,
        "zero": random.choice((0, 1)) if data > 1 else 0,
        "checkpointed_layers": random.choice((0, blocks // stages)),
        "sequence_parallel": int(tensor > 1),
    }
    plain = {
        "workload": {
            "model": model,
            "sequence_length": random.choice((2048, 4096, 8192)),
            "global_batch": data * micro * micro_batches,
            "attention": "flash",
            "precision": "bf16",
        },
        "cluster": {
            "hardware": random.choice(GPUS),
            "nodes": gpus // 8,
            "gpus_per_node": 8,
        },
        "plan": {
            "engine": "megatron-core",
            "micro_batches": micro_batches,
            "stages": [stage] * stages,
        },
    }
    try:
        return format_yaml(job_to_mapping(job_from_mapping(plain)))
    except InputError:
        return None


def parameters(random: Random) -> Question | None:
    name = random.choice(catalog.model_names())
    return Question(
        kind="model",
        text=f"How many billions of parameters does the model {name} have, all experts counted?",
        answer=parameters_of(catalog.model(name)) / 1e9,
        tolerance=OF_FACTS,
        computed=f"mistlab.serving.step_cost.parameters_of(catalog.model({name!r})) / 1e9",
    )


def sizes(random: Random) -> Question | None:
    name = random.choice(catalog.model_names())
    key, words = random.choice(
        (
            ("layers", "blocks (layers)"),
            ("hidden", "hidden size"),
            ("kv_heads", "heads of keys and values"),
        )
    )
    model = catalog.model(name)
    if key == "kv_heads" and (model.latent or model.is_hybrid):
        return None
    return Question(
        kind="model",
        text=f"Model {name}: what is its number of {words}?"
        if key != "hidden"
        else f"Model {name}: what is its hidden size?",
        answer=float(getattr(model, key)),
        computed=f"catalog.model({name!r}).{key}",
    )


def gpu_facts(random: Random) -> Question | None:
    name = random.choice(catalog.hardware_names())
    hardware = catalog.hardware(name)
    facts = (
        (
            "gpu.peak_tflops.bf16",
            "the dense BF16 peak in TFLOP/s of a GPU",
            hardware.gpu.peak_tflops.bf16,
        ),
        (
            "gpu.memory_gbytes_per_s",
            "the memory bandwidth of a GPU in GB/s",
            hardware.gpu.memory_gbytes_per_s,
        ),
        (
            "gpu.memory_gib",
            "the memory of a GPU in GiB, as a program sees it",
            hardware.gpu.memory_gib,
        ),
    )
    key, words, value = random.choice(facts)
    if value is None:
        return None
    return Question(
        kind="hardware",
        text=f"Hardware {name}: what is {words}?",
        answer=float(value),
        tolerance=OF_FACTS,
        computed=f"catalog.hardware({name!r}).{key}",
    )


def step_time(random: Random) -> Question | None:
    if (plan := drawn_plan(random)) is None:
        return None
    found = asked_of(plan, "predict")
    key, words = random.choice(
        (
            ("iteration_s", "How many seconds does an iteration of this plan take?"),
            ("tokens_per_s", "How many tokens a second does this plan train, all GPUs together?"),
        )
    )
    return Question(
        kind="plan",
        text=words,
        answer=found[key],
        tolerance=OF_FIGURES,
        plan=plan,
        computed=f"mistlab predict PLAN --json: {key}",
    )


def days(random: Random) -> Question | None:
    if (plan := drawn_plan(random)) is None:
        return None
    tokens = random.choice((100, 300, 1000))
    found = asked_of(plan, "predict")
    return Question(
        kind="plan",
        text=f"How many days does this plan take for {tokens} billion tokens, without failures?",
        answer=tokens * 1e9 / found["tokens_per_s"] / 86400,
        tolerance=OF_FIGURES,
        plan=plan,
        computed=f"{tokens}e9 / (mistlab predict PLAN --json: tokens_per_s) / 86400",
    )


def measured_step(random: Random) -> Question | None:
    cells = random.choice([*cases_of_file()])
    run = configuration_of(TableRow(file="published", number=1, line=1, cells=cells))
    (theirs,) = tried([run])
    return Question(
        kind="measured",
        text=(
            f"{cells['engine']} measured a step of this configuration ({cells['model']} on "
            f"{cells['gpus']} {cells['hardware']}). How many seconds did it take? An estimate "
            f"within {OF_STEPS:.0%} counts."
        ),
        answer=float(cells["step_s"]),
        tolerance=OF_STEPS,
        plan=format_yaml(job_to_mapping(theirs.job)),
        computed="step_s of experiments/studies/published_configurations.yaml, a measurement",
    )


def largest_part(random: Random) -> Question | None:
    if (plan := drawn_plan(random)) is None:
        return None
    parts = asked_of(plan, "predict", "--breakdown")["breakdown"]["parts"]
    ranked = sorted(PARTS, key=lambda name: -parts[name])
    if parts[ranked[0]] < CLEARLY * parts[ranked[1]]:
        return None
    return Question(
        kind="explanation",
        text=(
            "Apart from the model's arithmetic at the peak rate, which of these takes most of a "
            f"GPU's time under this plan: {', '.join(PARTS.values())}?"
        ),
        answer=PARTS[ranked[0]],
        plan=plan,
        computed="mistlab predict PLAN --breakdown --json: the largest of breakdown.parts",
    )


def share_of_part(random: Random) -> Question | None:
    if (plan := drawn_plan(random)) is None:
        return None
    found = asked_of(plan, "predict", "--breakdown")
    part = random.choice(("bubble_s", "tensor_exchange_s", "recomputation_s"))
    share = 100 * found["breakdown"]["parts"][part] / found["iteration_s"]
    if share < 3:
        return None
    return Question(
        kind="explanation",
        text=f"What share of a GPU's time, in %, goes to {PARTS[part]} under this plan?",
        answer=share,
        tolerance=OF_SEARCHES,
        plan=plan,
        computed=f"mistlab predict PLAN --breakdown --json: breakdown.parts.{part} / iteration_s",
    )


def memory(random: Random) -> Question | None:
    if (plan := drawn_plan(random)) is None:
        return None
    found = asked_of(plan, "predict")
    peak = max(stage["peak_reserved_bytes"] for stage in found["stages"]) / GIB_BYTES
    return Question(
        kind="memory",
        text="How many GiB does the fullest GPU reserve under this plan?",
        answer=peak,
        tolerance=OF_FIGURES,
        plan=plan,
        computed="mistlab predict PLAN --json: the largest peak_reserved_bytes",
    )


def fits(random: Random) -> Question | None:
    if (plan := drawn_plan(random)) is None:
        return None
    found, wanted = asked_of(plan, "predict"), random.choice(YES_NO)
    if YES_NO[not found["fits"]] != wanted:
        return None
    return Question(
        kind="fit",
        text="Does this plan fit the memory of its GPUs? yes or no",
        plan=plan,
        answer=YES_NO[not found["fits"]],
        computed="mistlab predict PLAN --json: fits",
    )


def cheapest_change(random: Random) -> Question | None:
    if (plan := drawn_plan(random)) is None:
        return None
    rows = asked_of(plan, "will_it_fit")["rows"]
    if rows[-1]["kind"] != "cheapest" or rows[-1]["change"].startswith("on "):
        return None
    return Question(
        kind="fit",
        text=(
            "This plan does not fit. With the change on the same GPUs that makes it fit at the "
            "fewest seconds added, how many seconds does an iteration take?"
        ),
        answer=rows[-1]["iteration_s"],
        tolerance=OF_SEARCHES,
        plan=plan,
        computed="mistlab will_it_fit PLAN --json: iteration_s of the row 'cheapest'",
    )


def best_plan(random: Random) -> Question | None:
    model, hardware = random.choice(MODELS + LARGER), random.choice(GPUS)
    nodes, batch = random.choice((1, 2, 4, 8)), random.choice((64, 128, 256, 512))
    length, free = random.choice((2048, 4096, 8192)), random.choice((2, 4, 8))
    line = [
        *("--model", model, "--hardware", hardware, "--nodes", str(nodes), "--gpus-per-node", "8"),
        *("--sequence-length", str(length), "--global-batch", str(batch), "--precision", "bf16"),
        *("--space", "megatron-core", "--keep-free-gib", str(free), "--budget-seconds", "60"),
    ]
    try:
        with TemporaryDirectory() as folder:
            found = asked("tune", *line, "--out", f"{folder}/plan.yaml")
    except InputError:
        return None
    if found["status"] != "OPTIMAL":
        return None
    stages = found["plan"]["plan"]["stages"]
    degrees = {stage["tensor_parallel"] for stage in stages}
    degree = random.random() < 0.3 and len(degrees) == 1
    about = (
        f"{model} on {nodes} nodes of 8 {hardware}, sequences of {length} tokens, {batch} of "
        f"them a step, bf16, flash attention, with Megatron-core (space megatron-core), {free} GiB "
        "of every GPU kept free"
    )
    return Question(
        kind="best plan",
        text=f"{about}: "
        + (
            "what is the degree of tensor parallelism of the fastest plan?"
            if degree
            else "how many seconds does an iteration of the fastest plan take?"
        ),
        answer=float(degrees.pop()) if degree else found["predicted_s"],
        tolerance=0.0 if degree else OF_SEARCHES,
        computed=f"mistlab tune {' '.join(line)} --json: "
        + ("tensor_parallel" if degree else "predicted_s"),
    )


def fine_tuning(random: Random) -> Question | None:
    model = random.choice(("llama3-8b", "qwen2.5-7b", "qwen2.5-14b", "llama3.2-3b", "qwen2.5-32b"))
    card, bits = random.choice(CARDS), random.choice(("16bit", "4bit"))
    line = [
        *("--model", model, "--hardware", card, "--nodes", "1", "--gpus-per-node", "1"),
        *("--sequence-length", "2048", "--global-batch", "16", "--precision", "bf16"),
        *("--train", "adapters", "--rank", "16", "--base", bits, "--loss", "chunked"),
        *("--space", "fsdp", "--budget-seconds", "60"),
    ]
    about = (
        f"Fine-tuning {model} by LoRA of rank 16 beside frozen {bits} weights on one {card}, "
        "sequences of 2048 tokens, 16 a step, bf16, a loss in chunks, with FSDP2 or plain PyTorch "
        "(space fsdp)"
    )
    computed = f"mistlab tune {' '.join(line)} --json: "
    with TemporaryDirectory() as folder:
        try:
            found = asked("tune", *line, "--out", f"{folder}/plan.yaml")
        except InputError:
            found = {}
    if found.get("predicted_s") is None or random.random() < 0.3:
        return Question(
            kind="fine-tuning",
            text=f"{about}: is there a plan that fits? yes or no",
            answer=YES_NO[found.get("predicted_s") is None],
            computed=f"{computed}whether one is found",
        )
    return Question(
        kind="fine-tuning",
        text=f"{about}: how many seconds does a step of the fastest plan take?",
        answer=found["predicted_s"],
        tolerance=OF_SEARCHES,
        computed=f"{computed}predicted_s",
    )


def exported(random: Random) -> Question | None:
    if (plan := drawn_plan(random)) is None:
        return None
    framework, words = random.choice(
        (
            ("megatron", "Megatron-LM's flags"),
            ("torchtitan", "torchtitan's configuration"),
            ("deepspeed", "DeepSpeed's configuration"),
        )
    )
    found = asked_of(plan, "export", "--to", framework)
    return Question(
        kind="export",
        text=f"Can {words} say this plan exactly? yes or no",
        plan=plan,
        answer=YES_NO[not found["exact"]],
        computed=f"mistlab export PLAN --to {framework} --json: exact",
    )


def imported(random: Random) -> Question | None:
    if (plan := drawn_plan(random)) is None:
        return None
    text = asked_of(plan, "export", "--to", "megatron")["text"]
    hardware = job_from_mapping(_plain(plan)).cluster.hardware.name
    with TemporaryDirectory() as folder:
        path = Path(folder) / "launch.sh"
        path.write_text(text, encoding="utf-8")
        read = asked("import_plan", str(path), "--hardware", hardware)["plan"]
    found = asked_of(format_yaml(read), "predict")
    return Question(
        kind="import",
        text=f"How many seconds does an iteration of this launch line take on {hardware}?",
        answer=found["iteration_s"],
        tolerance=OF_FIGURES,
        plan=text,
        computed=(
            f"mistlab import_plan LINE --hardware {hardware} --json, then mistlab predict: "
            "iteration_s"
        ),
    )


def serving(random: Random) -> Question | None:
    model, gpu = (
        random.choice(("llama3-8b", "llama3-70b", "qwen2.5-32b", "qwen3-30b-a3b")),
        random.choice(("H100", "A100", "H200", "B200")),
    )
    gpus, prompt, output = (
        random.choice((2, 4, 8)),
        random.choice((500, 1000, 4000)),
        random.choice((200, 500, 1000)),
    )
    line = [
        *("--model", model, "--gpu", gpu, "--gpus", str(gpus), "--prompt", str(prompt)),
        *("--output", str(output), "--tpot", "0.05", "--engine", "vllm", "--quick"),
    ]
    try:
        best = asked("serve_plan", *line)["best"]
    except InputError:
        return None
    if not best:
        return None
    degree = re.search(r"tp(\d+)", best["plan"])
    about = (
        f"Serving {model} with vLLM in bf16 on {gpus} {gpu}, prompts of {prompt} and outputs of "
        f"{output} tokens in the mean, at most 50 ms a token"
    )
    ask = random.random() < 0.4 and degree is not None
    return Question(
        kind="serving",
        text=f"{about}: "
        + (
            "which degree of tensor parallelism serves most requests?"
            if ask
            else "how many requests a second does the best layout serve?"
        ),
        answer=float(degree[1]) if ask and degree else best["requests_per_s"],
        tolerance=0.0 if ask else OF_SEARCHES,
        computed=f"mistlab serve_plan {' '.join(line)} --json: best",
    )


def _plain(plan: str) -> Mapping[str, Any]:
    return parse_yaml(plan, "plan")
