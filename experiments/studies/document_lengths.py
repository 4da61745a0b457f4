"""The command ``document_lengths``: how long training steps take if documents have different
lengths, for several ways to pack documents into micro-batches.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from experiments.cli.commandline import as_options
from experiments.pages.charts import Bars
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, table
from mistlab.core.arrays import Floats
from mistlab.core.values import reject
from mistlab.job.job import Job, load_job
from mistlab.plan.lengths import DocumentLengths, lengths_from
from mistlab.plan.workload import ModelSpec, Workload
from simulators.events import EventSimulator
from simulators.lengths import (
    ARRANGEMENTS,
    Arrangement,
    Arranger,
    LengthCosts,
    played_steps,
    sequences_of,
)

QUICK_SAMPLES = 8
# What is measured on a CPU: the distribution of documents' lengths, a transformer block, and the
# numbers of steps and micro-batches. Lengths are heavy-tailed: a ninth of the documents have half
# of the tokens.
MEASURED = "lognormal:80:1.2"
CONTEXT, RANKS, MICRO_BATCHES, STEPS, CALIBRATING, REPETITIONS = 1024, 4, 4, 16, 4, 2
QUICK_STEPS = 4
# The random seeds of the documents to which costs are fitted, and of the documents whose steps are
# simulated.
FITTED, PLAYED = 1001, 1002
WAYS: tuple[Arrangement, ...] = ("packed", "balanced")


def document_lengths(options: argparse.Namespace) -> int:
    """Simulate how long the steps of a plan take if documents have different lengths: the mean and
    the slowest steps.

    Documents come from a file or a distribution. They are padded, sorted by length, packed into
    sequences with attention inside each document, or distributed over micro-batches by cost. Each
    step is played with its own documents: every data-parallel rank has different ones, and the step
    takes as long as its slowest rank. With --replay, micro-batches of packed documents are measured
    on this CPU, and compared with steps played with costs fitted to other documents.
    """
    study = Study.begin("document_lengths", options)
    if options.replay:
        for row in _replayed(options):
            study.add(row)
        return study.end(_report_of_replays(study.rows))
    if options.plan is None:
        reject("PLAN.yaml: is missing: give a plan file, or --replay, which needs none")
    job = load_job(options.plan)
    with as_options():
        lengths = lengths_from(options.lengths).within(
            job.workload.sequence_length, cuts=options.cut
        )
    samples = QUICK_SAMPLES if options.quick else options.samples
    if samples < 1:
        reject(f"--samples {samples}: give a whole number of at least 1")
    for row in _played(job, lengths, samples, options.seed):
        study.add(row)
    sentence = (
        f"Documents {options.lengths}: {lengths.mean:,.0f} tokens in the mean, the longest "
        f"{lengths.tokens[-1]:,}; sequences of {job.workload.sequence_length:,}."
    ) + "".join(f" Note: {remark}." for remark in job.workload.remarks)
    return study.end(_report(study.rows, sentence))


def _report(rows: Sequence[Row], sentence: str) -> Report:
    shown = [
        (
            *(row["arrangement"], round(row["mean_s"], 4), round(row["q95_s"], 4)),
            *(round(row["tokens_per_s"]), f"{row['padding']:.1%}", f"{row['waits']:.1%}"),
        )
        for row in rows
    ]
    head = ["arrangement", "mean step s", "95 % s", "documents' tokens/s", "padding", "ranks wait"]
    full = f"A step without padding or waits takes {rows[0]['full_step_s']:.4g} s."
    return Report(
        title="Steps of documents that are not equally long",
        words=[f"{sentence} {full}", table(head, shown)],
        summary={row["arrangement"]: row["tokens_per_s"] for row in rows},
        pictures=[
            Bars(
                name="document_lengths",
                caption="Tokens of documents a second, by their arrangement.",
                groups=[row["arrangement"] for row in rows],
                series={"": [row["tokens_per_s"] for row in rows]},
                y="tokens a second",
            )
        ],
    )


def _report_of_replays(rows: Sequence[Row]) -> Report:
    shown = [
        (
            *(row["arrangement"], row["steps"], f"{row['timing']['replayed_ms']:.1f}"),
            *(f"{row['timing']['played_ms']:.1f}", f"{row['timing']['apart']:+.1%}"),
        )
        for row in rows
    ]
    most = max(abs(row["timing"]["apart"]) for row in rows)
    sentence = (
        f"A step has {RANKS} ranks of {MICRO_BATCHES} micro-batches of at most {CONTEXT:,} tokens, "
        f"and documents {MEASURED}, cut at that. Means differ by at most {most:.1%}."
    )
    head = ["arrangement", "steps", "replayed ms", "played ms", "apart"]
    return Report(
        title="Steps of documents, replayed and played",
        words=[table(head, shown), sentence],
        summary={"timing": {"most_apart": most}},
    )


def _played(job: Job, lengths: DocumentLengths, samples: int, seed: int) -> list[Row]:
    """A result row for each way to pack documents into micro-batches, with the times of a plan's
    steps.
    """
    plan, work = job.plan, job.workload
    sequences = sequences_of(plan)
    simulator = EventSimulator(workload=work, cluster=job.cluster)
    costs, play = LengthCosts.of(simulator, plan), simulator.of_work(plan)
    full_s = play([1.0] * plan.micro_batches)
    rows: list[Row] = []
    for way in ARRANGEMENTS:
        arranger = Arranger(
            lengths=lengths,
            costs=costs,
            ranks=work.global_batch // (plan.micro_batches * sequences),
            micro_batches=plan.micro_batches,
            sequences=sequences,
            context=work.sequence_length,
            draw=np.random.default_rng(seed),
        )
        played = played_steps(arranger, way, play, samples, seed)
        rows.append(
            {
                "arrangement": way,
                "mean_s": played.steps.mean_s,
                "q05_s": played.steps.q05_s,
                "q95_s": played.steps.q95_s,
                "tokens_per_s": played.tokens_per_s,
                "padding": played.padding,
                "waits": played.waits,
                "samples": samples,
                "full_step_s": full_s,
            }
        )
    return rows


# Compares steps put together from measured passes with steps simulated with costs that were fitted
# to other documents.


def _replayed(options: argparse.Namespace) -> list[Row]:
    """A result row for each way to pack documents: the mean step of measured micro-batches, and the
    simulated step for other documents.
    """
    lengths = lengths_from(MEASURED).within(CONTEXT, cuts=True)
    steps = QUICK_STEPS if options.quick else STEPS
    sets = {
        way: _documents(lengths, way, options.seed + place, steps) for place, way in enumerate(WAYS)
    }
    calibrating = [
        one for step in _documents(lengths, "packed", FITTED, CALIBRATING) for one in step
    ]
    every = [*calibrating, *(one for sample in sets.values() for step in sample for one in step)]
    # All passes to be compared are measured in one random order, since the machine's speed drifts.
    order = np.random.default_rng(options.seed).permutation(len(every))
    seconds = np.zeros(len(every))
    seconds[order] = _measured([every[place] for place in order])
    costs = _fitted(calibrating, seconds[: len(calibrating)])
    measured = seconds[len(calibrating) :].reshape(len(WAYS), steps, RANKS, MICRO_BATCHES)
    rows: list[Row] = []
    for way, of_way in zip(WAYS, measured, strict=True):
        replayed = of_way.sum(axis=2).max(axis=1)
        other = _documents(lengths, way, PLAYED, 8 * steps)
        predicted = np.array([_work(step) @ costs for step in other])
        played = predicted.reshape(-1, RANKS, MICRO_BATCHES).sum(axis=2).max(axis=1)
        rows.append(
            {
                "arrangement": way,
                "steps": steps,
                "timing": {
                    "replayed_ms": 1e3 * float(replayed.mean()),
                    "played_ms": 1e3 * float(played.mean()),
                    "apart": float(played.mean() / replayed.mean() - 1),
                },
            }
        )
    return rows


def _documents(
    lengths: DocumentLengths, way: Arrangement, seed: int, steps: int
) -> list[list[list[int]]]:
    """The lengths of the documents in each micro-batch of some steps."""
    arranger = Arranger(
        lengths=lengths,
        costs=LengthCosts(token=1 / CONTEXT, square=0.5 / CONTEXT**2),
        ranks=RANKS,
        micro_batches=MICRO_BATCHES,
        sequences=1,
        context=CONTEXT,
        draw=np.random.default_rng(seed),
    )
    return [arranger.documents(way) for _ in range(steps)]


def _measured(sequences: Sequence[Sequence[int]]) -> list[float]:
    from runtime.profiling.packed_passes import seconds_of_packed  # noqa: PLC0415 (needs torch)

    model = ModelSpec.of(family="llama", hidden=128, layers=1, heads=4, vocab=64)
    work = Workload(
        model=model,
        sequence_length=CONTEXT,
        global_batch=1,
        attention="flash",
        precision="fp32",
    )
    return seconds_of_packed(work, sequences, REPETITIONS)


def _work(sequences: Sequence[Sequence[int]]) -> Floats:
    """For each micro-batch a row with its tokens, its sum of squared lengths, and its number of
    documents.
    """
    return np.array(
        [(sum(one), sum(length**2 for length in one), len(one)) for one in sequences], dtype=float
    )


def _fitted(sequences: Sequence[Sequence[int]], seconds: Floats) -> Floats:
    """The seconds that a token, a squared length and a document take, fitted by least squares."""
    return np.asarray(np.linalg.lstsq(_work(sequences), seconds, rcond=None)[0], dtype=float)
