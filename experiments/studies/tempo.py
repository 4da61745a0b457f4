"""The command ``tempo``: what operators that save memory (lean ones) gain, beside recomputation and
published figures.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Self

from experiments.cli.commandline import DONE
from experiments.pages.charts import Bars
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study, beside
from experiments.pages.tables import Row, table_of
from mistlab import catalog
from mistlab.core.units import GIB_BYTES, MIB_BYTES
from mistlab.engines.engine import Precision
from mistlab.graph.treatments import TREATMENTS
from mistlab.job.prediction import Prediction
from mistlab.machine.cluster import Cluster
from mistlab.plan.lean_sets import ALL, CHOICE, KINDS, SETS
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Attention, Workload
from simulators.symbolic import SymbolicPredictor

# How Tempo's authors launched pretraining (scripts/tempo/tempo_benchmarking_pretraining.sh and
# run_pretraining.py of their repository): 32 bits without tensor cores, as torch 1.12 has them by
# default; all GPUs of a node, each with a whole model; one bucket, so that gradients are reduced
# after the backward pass; one micro-batch a step, nothing recomputed, attention written out.
LAUNCHED_BY = "ddp"
LAUNCHED_IN: Precision = "fp32"
# Other conditions on the same GPU: its number, the engine and the precision. The last ones were
# those of all predictions before the launch script was read.
CONDITIONS: Mapping[str, tuple[bool, str, Precision]] = {
    "alone": (False, "ddp", "fp32"),
    "tensor cores": (True, "ddp", "tf32"),
    "16 bits": (False, "fsdp-eager", "bf16"),
}
IN_16_BITS = "16 bits"
# The GPU was chosen before any prediction was made.
HARDWARE = "a100-40gb"
GPUS = ("a100-40gb", "h100-80gb", "l4-24gb")
# For each model: the tokens of its sequences, the lengths for which a map is drawn, and its
# published gain.
MODELS: Mapping[str, tuple[int, Sequence[int], float]] = {
    "bert-large": (512, (128, 256, 512), 0.16),
    "gpt2-medium": (1024, (256, 512, 1024), 0.19),
    "roberta-large": (512, (128, 256, 512), 0.26),
}
# By how many percentage points a predicted gain may differ from the published one.
POINTS = 6
PLAIN, LEAN, AGAIN = "plain", "lean", "recomputed"
RECOMPUTED, IS_LEAN = (TREATMENTS[name].dimension for name in ("recomputed", "lean"))
# The shares of a model's blocks that are recomputed.
SHARES = tuple(part / 12 for part in range(13))
MOST = 1 << 14
# In further cases, the memory of a GPU is reduced to these sizes in GiB.
LESS_GIB = (10.0, 12.0, 16.0, 24.0)
# A machine of the authors: four V100 of 16 GB. Their script of fine-tuning there
# (tempo_benchmarking_squad_v100.sh) has sequences of this length, and these batches of a GPU.
OTHERS, OTHER_GPUS = "v100-16gb", 4
TUNED, TUNED_LENGTH, TUNED_BATCHES = "bert-large", 384, {"plain": 8, "lean": 13}


@dataclass(frozen=True, slots=True, kw_only=True)
class OneGpu:
    """Predicts the steps of a model on one GPU, or on several data-parallel GPUs, at any batch
    size.

    The engine ``ddp`` reduces gradients after the backward pass, as Tempo's authors launched it.
    """

    model: str
    hardware: str
    length: int
    attention: Attention = "math"
    memory_gib: float | None = None
    gpus: int = 1
    engine: str = LAUNCHED_BY
    precision: Precision = LAUNCHED_IN

    @classmethod
    def launched(cls, model: str, hardware: str, length: int, **others: Any) -> Self:
        """The case as Tempo's authors launched it, on all GPUs of the hardware's node."""
        gpus = catalog.hardware(hardware).node.gpus
        return cls(model=model, hardware=hardware, length=length, **{"gpus": gpus, **others})

    @property
    def layers(self) -> int:
        """The number of the model's blocks."""
        return catalog.model(self.model).layers

    def predicted(self, sequences: int, values: Mapping[str, float]) -> Prediction:
        """The prediction of a step with this many sequences per GPU and these values of the stage's
        dimensions.
        """
        plan = Plan.of_one_gpu(self.layers, sequences, self.engine, values, self.gpus)
        plan = replace(plan, overlap_communication=self.engine != LAUNCHED_BY)
        return _predictor(self, sequences).predict(plan)


@cache
def _predictor(case: OneGpu, sequences: int) -> SymbolicPredictor:
    work = Workload(
        model=catalog.model(case.model),
        sequence_length=case.length,
        global_batch=sequences * case.gpus,
        attention=case.attention,
        precision=case.precision,
    )
    cluster = Cluster(
        hardware=catalog.hardware(case.hardware),
        nodes=1,
        gpus_per_node=case.gpus,
        memory_gib=case.memory_gib,
    )
    return SymbolicPredictor(workload=work, cluster=cluster)


def largest(case: OneGpu, values: Mapping[str, float]) -> tuple[int, Prediction | None]:
    """The largest number of sequences that fits in memory, and the prediction of that step; 0 if
    not even one fits.
    """
    low, high = 0, 1
    while high < MOST and case.predicted(high, values).fits:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if case.predicted(middle, values).fits:
            low = middle
        else:
            high = middle
    return low, case.predicted(low, values) if low else None


def tempo(options: argparse.Namespace) -> int:
    """Predict the gain of operators that keep less for the backward pass (Tempo, NeurIPS 2022): the
    largest batch and the throughput of BERT Large, GPT-2 and RoBERTa Large, with and without them,
    and with recomputation.

    Precision, number of GPUs and reduction of gradients are as the authors launched pretraining;
    GPU, sequence lengths and models were chosen before anything was predicted. Predicted gains
    stand beside the published ones. Further sections show other conditions, what of a step a larger
    batch saves, each kind of operator by itself, fused attention, and a map over three GPUs and
    three lengths.
    """
    study = Study.begin("tempo", options)
    models = [*MODELS][: 1 if options.quick else None]
    for case, chapter in study.counted([*_cases(models, quick=options.quick)], "cases"):
        ways = WAYS if chapter == "ways" else (PLAIN, LEAN, AGAIN)
        for way in ways:
            study.add({"chapter": chapter, **_of_way(case, way)})
        if chapter in ("ways", "others"):
            study.add(_shares(case))
        for number in range(1, len(KINDS) + 1) if chapter == "ways" else ():
            way = f"lean {' and '.join(SETS[number])}"
            study.add({"chapter": "kinds", **_row(case, way, _lean(case, number))})
    return study.end(_report(study.rows), DONE)


def _cases(models: Sequence[str], *, quick: bool) -> Iterator[tuple[OneGpu, str]]:
    """The cases to predict, each with the section of the page to which it belongs."""
    for model in models:
        length, lengths, _ = MODELS[model]
        case = OneGpu.launched(model, HARDWARE, length)
        yield case, "ways"
        for is_node, engine, precision in CONDITIONS.values():
            gpus = case.gpus if is_node else 1
            yield replace(case, engine=engine, precision=precision, gpus=gpus), "conditions"
        is_node, engine, precision = CONDITIONS[IN_16_BITS]
        in_16_bits = replace(case, engine=engine, precision=precision, gpus=1)
        yield replace(in_16_bits, attention="flash"), "fused"
        for memory_gib in LESS_GIB[: 1 if quick else None]:
            yield replace(case, memory_gib=memory_gib), "less memory"
        yield OneGpu.launched(model, OTHERS, length, gpus=OTHER_GPUS), "others"
        if model == TUNED:
            yield OneGpu.launched(model, OTHERS, TUNED_LENGTH, gpus=OTHER_GPUS), "tuned"
        for hardware in GPUS[: 1 if quick else None]:
            for each in lengths[: 1 if quick else None]:
                yield OneGpu.launched(model, hardware, each), "map"


def _lean(case: OneGpu, number: int = ALL, share: float = 0.0) -> dict[str, float]:
    """The values of a stage's dimensions with which all blocks use operators that save memory,
    except those blocks that are recomputed.
    """
    again = round(share * case.layers)
    return {IS_LEAN: case.layers - again, RECOMPUTED: again, CHOICE: number}


def _again(case: OneGpu, share: float) -> dict[str, float]:
    return {RECOMPUTED: round(share * case.layers)}


# The fields of a row that identify a case.
CASE = tuple(field.name for field in fields(OneGpu))
# The sections of the page whose cases are compared.
COMPARED = ("ways", "conditions", "fused", "less memory", "others", "tuned", "map")
# The names of two ways to save memory. For each there are several values of the stage's dimensions,
# of which the fastest counts.
SOME_AGAIN, LEAN_AND_AGAIN = "some recomputed", "lean and recomputed"
WAYS = (PLAIN, LEAN, AGAIN, SOME_AGAIN, LEAN_AND_AGAIN)


def _of_way(case: OneGpu, way: str) -> Row:
    """The fastest step with one way to save memory, at its largest batch."""
    tried = {
        PLAIN: [_again(case, 0.0)],
        LEAN: [_lean(case)],
        AGAIN: [_again(case, 1.0)],
        SOME_AGAIN: [_again(case, share) for share in SHARES],
        LEAN_AND_AGAIN: [_lean(case, share=share) for share in SHARES],
    }[way]
    return max((_row(case, way, values) for values in tried), key=lambda row: row["rate"])


def _shares(case: OneGpu) -> Row:
    """The share of a step with plain operators that does not grow with the batch, between the
    largest batches with plain and with lean operators; and how much longer a sequence takes with
    lean ones.
    """
    none = _again(case, 0.0)
    (few, plain), (many, lean) = (largest(case, values) for values in (none, _lean(case)))
    assert plain is not None
    assert lean is not None
    beyond = case.predicted(many, none).iteration_s
    a_sequence_s = (beyond - plain.iteration_s) / (many - few)
    fixed_s = plain.iteration_s - few * a_sequence_s
    return {
        "chapter": "shares",
        "model": case.model,
        "hardware": case.hardware,
        "gpus": case.gpus,
        "plain_ms": 1000 * plain.iteration_s,
        "fixed_ms": 1000 * fixed_s,
        "fixed": fixed_s / plain.iteration_s,
        "most": fixed_s / (plain.iteration_s - fixed_s),
        "by_batch": many / beyond * plain.iteration_s / few - 1,
        "by_operators": beyond / lean.iteration_s - 1,
    }


def _row(case: OneGpu, way: str, values: Mapping[str, float]) -> Row:
    batch, step = largest(case, values)
    row: Row = {
        **{name: getattr(case, name) for name in CASE},
        "way": way,
        "recomputed": values.get(RECOMPUTED, 0),
        "batch": batch,
        "rate": 0.0,
    }
    if step is None:
        return row
    kept = step.stages[0].memory.activations / batch
    return {
        **row,
        "rate": batch / step.iteration_s,
        "iteration_s": step.iteration_s,
        "peak_gib": step.peak_reserved_bytes / GIB_BYTES,
        "kept_mib": kept / MIB_BYTES,
    }


def gains(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each case, the batch and the throughput with operators that save memory: relative to
    plain operators, and to the better of plain operators and recomputation.
    """
    rows_of_gains = []
    compared = [row for row in rows if row["chapter"] in COMPARED]
    keys = dict.fromkeys((row["chapter"], *_case_of(row)) for row in compared)
    for key in keys:
        by_way = {r["way"]: r for r in compared if (r["chapter"], *_case_of(r)) == key}
        plain, lean, again = (by_way[way] for way in (PLAIN, LEAN, AGAIN))
        best = max(plain["rate"], again["rate"])
        if not lean["batch"] or not best:
            continue
        row = dict(zip(("chapter", *CASE), key, strict=True))
        row |= {"plain_batch": plain["batch"], "lean_batch": lean["batch"]}
        row["batch_ratio"] = lean["batch"] / plain["batch"] if plain["batch"] else None
        row["gain"] = lean["rate"] / best - 1
        row["over_plain"] = lean["rate"] / plain["rate"] - 1 if plain["rate"] else None
        rows_of_gains.append(row)
    return rows_of_gains


def _case_of(row: Row) -> tuple[object, ...]:
    return tuple(row[key] for key in CASE)


def beside_published(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The predicted gains of those cases that were chosen beforehand, beside the published gains,
    in percentage points.
    """
    with_published = []
    for row in gains(rows):
        if row["chapter"] == "ways":
            published = MODELS[row["model"]][2]
            points = 100 * (row["gain"] - published)
            with_published.append({**row, "published": published, "points": points})
    return with_published


_GAIN = {
    "model": "{model}",
    "GPUs": "{gpus} {hardware}",
    "tokens": "{length}",
    "attention": "{attention}",
    "batch plain": "{plain_batch}",
    "lean": "{lean_batch}",
    "times": "{batch_ratio:.2f}",
    "faster than plain": "{over_plain:+.1%}",
    "than the best of plain and recomputed": "{gain:+.1%}",
}
_BATCHES = [(head, _GAIN[head]) for head in ("model", "tokens", "batch plain", "lean", "times")]
_FASTER = [
    (head, _GAIN[head]) for head in ("faster than plain", "than the best of plain and recomputed")
]
_BESIDE = (
    ("predicted", "{gain:+.1%}"),
    ("published", "{published:+.0%}"),
    ("points apart", "{points:+.1f}"),
)
_WAY = {
    "model": "{model}",
    "way": "{way}",
    "blocks recomputed": "{recomputed:.0f}",
    "largest batch": "{batch}",
    "sequences/s": "{rate:.1f}",
    "peak GiB": "{peak_gib:.1f}",
    "MiB kept a sequence": "{kept_mib:.0f}",
}


def _report(rows: Sequence[Row]) -> Report:
    gained, published = gains(rows), beside_published(rows)
    near = sum(abs(row["points"]) <= POINTS for row in published)
    of = {chapter: [r for r in gained if r["chapter"] == chapter] for chapter in COMPARED}
    ways = [row for row in rows if row["chapter"] == "ways"]
    shares = [row for row in rows if row["chapter"] == "shares"]
    return Report(
        title="Operators that keep less (Tempo)",
        words=[
            *(SETTING, "## Published beside predicted"),
            table_of(published, *_BATCHES, *_BESIDE),
            f"Within {POINTS} points: {near} of {len(published)}.",
            *("## What a larger batch brings", table_of(shares, *_SHARES.items())),
            *("## Under other conditions", IN_A_FILE, table_of(of["conditions"], *_CONDITIONS)),
            *("## Alone and together", IN_A_FILE, table_of(ways, *_WAY.items())),
            *("## Each kind of operator alone", IN_A_FILE),
            table_of([r for r in rows if r["chapter"] == "kinds"], *_WAY.items()),
            *("## With fused attention", "One GPU in 16 bits.", IN_A_FILE),
            table_of(of["fused"], *_BATCHES, *_FASTER),
            *("## With less memory", IN_A_FILE),
            table_of(of["less memory"], ("GiB", "{memory_gib:.0f}"), *_BATCHES, *_FASTER),
            *("## On four V100 of 16 GB", *_of_tuned(of["tuned"]), IN_A_FILE),
            table_of(of["others"], *_BATCHES, *_FASTER),
            *("## Three GPUs and three lengths", IN_A_FILE, table_of(of["map"], *_GAIN.items())),
        ],
        beside=beside("tempo"),
        summary={"within": near, "of": len(published), "gains": published},
        pictures=[
            Bars(
                name="tempo",
                caption=f"Throughput of one {HARDWARE} at the largest batch, sequences a second.",
                groups=[*dict.fromkeys(row["model"] for row in ways)],
                series={way: [r["rate"] for r in ways if r["way"] == way] for way in WAYS},
                y="sequences/s",
                number=".0f",
            )
        ],
    )


def _of_tuned(rows: Sequence[Row]) -> list[str]:
    """The batch sizes of the authors' script of fine-tuning, and the largest ones predicted."""
    batches = " and ".join(str(batch) for batch in TUNED_BATCHES.values())
    return [
        f"The authors' script of fine-tuning BERT Large there ({TUNED_LENGTH} tokens, fp32) takes "
        f"{batches} sequences; predicted are {row['plain_batch']} and {row['lean_batch']}, with "
        "logits of the vocabulary, which it does not compute."
        for row in rows
    ]


_SHARES = {
    "model": "{model}",
    "GPUs": _GAIN["GPUs"],
    "ms a step": "{plain_ms:,.0f}",
    "of them whatever the batch": "{fixed_ms:,.0f}",
    "share": "{fixed:.1%}",
    "gain by any batch at most": "{most:+.1%}",
    "by the lean batch": "{by_batch:+.1%}",
    "by the operators": "{by_operators:+.1%}",
}
_CONDITIONS = (
    ("GPUs", "{gpus}"),
    ("engine", "{engine}"),
    ("precision", "{precision}"),
    *_BATCHES,
    *_FASTER,
)
SETTING = (
    f"As the authors' launch script of pretraining has it: {LAUNCHED_IN} without tensor cores, all "
    f"GPUs of a node (engine `{LAUNCHED_BY}`), one bucket of gradients, reduced after the backward "
    "pass, one micro-batch a step, as large as fits, attention written out, dropout 0.1, nothing "
    "recomputed. It gives BERT Large 8 sequences of 512 tokens, and has no GPT-2 (here medium) and "
    "RoBERTa. Otherwise than there: AdamW in place of fused LAMB (44 for 52 bytes a parameter); "
    "logits of all tokens, not of masked ones alone; no next-sentence head; lean operators of one "
    "kernel a pass. Batches and throughput are of one GPU; recomputed blocks are the fastest "
    f"number of {len(SHARES)}. All figures are predictions; no GPU has run them."
)
