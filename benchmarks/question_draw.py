"""Draws the questions for an agent by a seed: on plans, on figures of result pages, and on what has
no answer.
"""

import re
import sys
from random import Random

from benchmarks.question_makers import (
    MODELS,
    OF_SEARCHES,
    ROOT,
    UNANSWERABLE,
    Maker,
    Question,
    best_plan,
    cheapest_change,
    days,
    exported,
    fine_tuning,
    fits,
    gpu_facts,
    imported,
    largest_part,
    measured_step,
    memory,
    parameters,
    serving,
    share_of_part,
    sizes,
    step_time,
)

LLAMA = (
    "Llama 3 70B (llama3-70b) on 8 nodes of 8 h100-80gb, sequences of 8192 tokens, 512 a step, "
    "bf16, space megatron-core, 4 GiB of every GPU kept free: how many "
)
GPT = (
    "gpt3-2.7b on one node of 4 l4-24gb, sequences of 4096 tokens, 8 a step, fp16, flash "
    "attention, engine mistlab, 4 replicas of one stage of 32 blocks, micro-batch 1 (2 of them), "
    "ZeRO-0, nothing recomputed"
)
LARGE = (
    "gpt3-175b on 128 nodes of 8 a100-80gb, sequences of 2048 tokens, 1536 a step, fp16, attention "
    "math (not fused), engine megatron, 8 stages of 12 blocks, 16 replicas, tensor parallel 8, "
    "micro-batch 1, 96 micro-batches, ZeRO-0, all blocks recomputed: how many days do 300 billion "
    "tokens take?"
)
FIT = "docs/results/will-it-fit.md"
# Pages of results, the lines from which a figure is taken, and the question about the figure.
PAGE_LINES = (
    (
        "README.md",
        r"predicted faster than ([\d.]+) s",
        f"{LLAMA}seconds does an iteration of the fastest plan take?",
    ),
    (
        "README.md",
        r"tokens/s, ([\d,]+) a GPU",
        f"{LLAMA}tokens a second and GPU does the fastest plan train?",
    ),
    (FIT, r"stage 0, needs ([\d.]+) of", f"{GPT}: how many GiB does a GPU need?"),
    (
        FIT,
        r"An iteration takes ([\d.]+) s",
        (
            f"{GPT}, does not fit. With the cheapest change that makes it fit: how many seconds "
            "does an iteration take?"
        ),
    ),
    (
        "docs/results/estimate.md",
        r"gpt3-175b \| 1,024 a100-80gb \| predicted, plan by the rule\s*\| ([\d.]+) ",
        LARGE,
    ),
)
CONFIG = (
    '{"model_type": "resnet", "depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048], '
    '"num_channels": 3}'
)


def page_line(random: Random) -> Question | None:
    """A question about a figure on a page of results; it states all conditions under which the
    figure was made.
    """
    page, pattern, text = random.choice(PAGE_LINES)
    found = re.search(pattern, (ROOT / page).read_text(encoding="utf-8"))
    assert found, page
    return Question(
        kind="page",
        text=text,
        answer=float(found[1].replace(",", "")),
        tolerance=OF_SEARCHES,
        computed=f"the line of {page} that matches {pattern!r}",
    )


def unanswerable(random: Random) -> Question | None:
    """A question that lacks a fact, names something that does not exist, or makes no sense."""
    model, gpus = random.choice(MODELS), random.choice((8, 16, 64))
    unknown_gpu = random.choice((350, 470, 910))
    unknown_model = f"{random.choice((7, 9))}-{random.choice((33, 90))}B"
    stages, tokens = random.choice((256, 512)), random.choice((37, 83))
    cases = {
        "the batch and GPUs are not said": (
            f"How many seconds does a training step of {model} take on H100?"
        ),
        "no such GPU": (
            f"How many seconds does a step of {model} take on {gpus} NVIDIA R{unknown_gpu} Ultra, "
            "tensor parallel 4, sequences of 4096 tokens, 256 a step?"
        ),
        "no such model": (
            f"How many GiB does full training of Llama-{unknown_model} Instruct take on {gpus} "
            "H100 with FSDP, sequences of 4096 tokens, 64 a step?"
        ),
        "more stages than blocks": (
            f"How many seconds does an iteration of {model} take with {stages} pipeline stages, "
            "one GPU each, on H100, without interleaving?"
        ),
        "not a transformer": (
            "How many seconds does a step take with this config.json on 8 H100, 256 samples a "
            f"step? {CONFIG}"
        ),
        "degrees exceed the GPUs": (
            f"On one node of 8 H100: how many tokens a second does {model} train with tensor "
            "parallelism 8, pipeline parallelism 4 and data parallelism 2?"
        ),
        "nothing tells the loss": (
            f"Which validation loss on C4 does {model} reach after exactly {tokens} billion tokens "
            "of an unnamed corpus, by the best plan?"
        ),
        "the cluster's network is not said, nor the plan": (
            f"How much faster does {model} train on my cluster than on my colleague's?"
        ),
    }
    why = random.choice([*cases])
    return Question(
        kind=UNANSWERABLE, text=cases[why], answer=UNANSWERABLE, computed=f"by construction: {why}"
    )


# The functions that make questions, each with the number of questions to make.
KINDS: tuple[tuple[Maker, int], ...] = (
    (parameters, 3), (sizes, 2), (gpu_facts, 2),
    (step_time, 4), (days, 2), (measured_step, 4), (largest_part, 3), (share_of_part, 2),
    (memory, 2), (fits, 2), (cheapest_change, 2), (best_plan, 4), (fine_tuning, 3),
    (exported, 2), (imported, 2), (serving, 3), (page_line, 3), (unanswerable, 5),
)  # fmt: skip


def drawn(seed: int) -> list[Question]:
    """The questions that a seed draws, in an order that does not reveal their kinds."""
    random = Random(seed)
    found: dict[str, Question] = {}
    for maker, count in KINDS:
        wanted = len(found) + count
        while len(found) < wanted:
            if (question := maker(random)) is not None:
                is_odd = question.kind == UNANSWERABLE
                key = question.computed if is_odd else question.plan + question.text
                found.setdefault(key, question)
                sys.stderr.write(f"{len(found)} {question.kind}: {question.answer}\n")
    questions = [*found.values()]
    random.shuffle(questions)
    return questions
