"""The command ``communication``: the cost, scaling and accuracy of gradient reductions that send
less than an all-reduce.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from experiments.cli.commandline import DONE, as_options
from experiments.pages.charts import Lines
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, table_of
from experiments.reductions.image_training import WAYS, Digits, training_rows
from experiments.reductions.published_reductions import published_rows
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import Checked, bounded, quantity
from mistlab.reduction.compression import Compressor
from mistlab.reduction.convergence import ASSUMPTIONS, Noise
from mistlab.reduction.neighbours import degree_of
from mistlab.reduction.reduction_costs import RankLink, Reduction
from simulators.messages import played_exchange_s

# The gradient reductions that the study compares (all-reduce, gossip, compressed, ...), by name.
REDUCTIONS: Mapping[str, Reduction] = {
    "ring all-reduce": Reduction(),
    "one server": Reduction(kind="server"),
    "server that waits for none": Reduction(kind="server", asynchronous=True),
    "ring, two trimmed": Reduction(trimmed=2),
    "gossip, ring": Reduction(kind="gossip", topology="ring"),
    "gossip, grid": Reduction(kind="gossip", topology="grid"),
    "gossip, exponential": Reduction(kind="gossip", topology="exponential"),
    "gossip, one peer": Reduction(kind="gossip", topology="one_peer"),
    "local, every 8": Reduction(kind="local", every=8),
    "outer, every 64, 4 bits": Reduction(kind="outer", every=64, outer_bits=4),
    "top 5 %, memory": Reduction(compressor=Compressor(kind="top_k"), feedback="memory"),
    "sign, memory": Reduction(compressor=Compressor(kind="sign"), feedback="memory"),
    "power, rank 4, memory": Reduction(
        compressor=Compressor(kind="power", rank=4), feedback="memory"
    ),
}
GROWN = ("ring all-reduce", "one server", "gossip, ring", "gossip, one peer")
GROWTH = "Milliseconds of an exchange as ranks grow, drawn below:"
# The largest number of ranks for which each message is simulated (the second number is for quick
# runs); for more ranks the closed form is used.
MOST_PLAYED, QUICK_PLAYED = 512, 64
MOST_RANKS = 16_384
# Limits of options: the most values and the most ranks for which costs are computed, and the
# smallest target for the mean square gradient.
MOST_VALUES, MOST_ASKED, LEAST_GOAL = 10**15, 2**20, 1e-6
SEEDS, STEPS = 5, 600
QUICK_SEEDS, QUICK_STEPS = 1, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Checked):
    """The numbers that the options give, converted to the units of the computation."""

    values: int = field(metadata=bounded(minimum=1, most=MOST_VALUES))
    ranks: int = field(metadata=bounded(minimum=2, most=MOST_ASKED))
    gbytes_per_s: float = field(metadata=quantity())
    latency_us: float = field(metadata=quantity(or_zero=True))
    compute_ms: float = field(metadata=quantity(or_zero=True))
    goal: float = field(metadata=bounded(minimum=LEAST_GOAL))
    noise: float = field(metadata=quantity(or_zero=True))
    unlike: float = field(metadata=quantity(or_zero=True))


def communication(options: argparse.Namespace) -> int:
    """Compare gradient reductions that send less than an all-reduce: their seconds and bytes,
    scaling with ranks, bounds on the steps to a target loss, published figures, and eight workers
    that train.

    A reduction averages gradients over all ranks by a ring or by servers, or over neighbours on a
    graph; in every step or every few steps, or as outer steps; with whole or compressed gradients,
    and with or without error feedback. Costs assume one link a rank; the same messages are also
    simulated one by one. No reduction is chosen for a plan, since each changes what the model
    learns.
    """
    with as_options():
        Asked(**{one.name: getattr(options, one.name) for one in fields(Asked)})
    link = RankLink(latency_s=options.latency_us * 1e-6, bytes_per_s=options.gbytes_per_s * 1e9)
    noise = Noise(noise=options.noise, unlike=options.unlike)
    if not options.costs_alone:
        Digits.loaded()
    study = Study.begin("communication", options)
    study.add_all(_cost_rows(options, link, noise))
    most = QUICK_PLAYED if options.quick else MOST_PLAYED
    study.add_all(_growth_rows(options.values, link, most))
    study.add_all(published_rows())
    seeds, steps = (QUICK_SEEDS, QUICK_STEPS) if options.quick else (SEEDS, STEPS)
    if not options.costs_alone:
        for way in study.counted(WAYS, "ways to train"):
            study.add_all(training_rows([way], seeds, steps))
    return study.end(_report(study.rows, options, steps), DONE)


def _cost_rows(options: argparse.Namespace, link: RankLink, noise: Noise) -> Iterator[Row]:
    values, ranks, compute_s = options.values, options.ranks, options.compute_ms * 1e-3
    for name, how in REDUCTIONS.items():
        if how.ranks_problem(ranks):
            continue
        step_s = how.step_s(compute_s, values, ranks, link)
        steps = noise.steps_to(options.goal, how, ranks, values)
        yield {
            "part": "cost",
            "reduction": name,
            "degree": degree_of(how.topology, ranks) if how.kind == "gossip" else None,
            "message_bytes": how.message_bytes(values),
            "exchange_s": how.exchange_s(values, ranks, link),
            "step_s": step_s,
            "buffer_bytes": how.buffer_bytes(values, ranks),
            "steps_to_goal": steps,
            "hours_to_goal": steps * step_s / 3600,
        }


def _growth_rows(values: int, link: RankLink, most_played: int) -> Iterator[Row]:
    for name in GROWN:
        ranks = 2
        while ranks <= MOST_RANKS:
            is_played = ranks <= most_played
            played = played_exchange_s(REDUCTIONS[name], values, ranks, link) if is_played else None
            yield {
                "part": "growth",
                "reduction": name,
                "ranks": ranks,
                "exchange_s": REDUCTIONS[name].exchange_s(values, ranks, link),
                "played_s": played,
            }
            ranks *= 2


def _report(rows: Sequence[Row], options: argparse.Namespace, steps: int) -> Report:
    costs, growth, published, training = (
        [row for row in rows if row["part"] == part]
        for part in ("cost", "growth", "published", "training")
    )
    played = [row for row in growth if row["played_s"] is not None]
    apart = max(abs(row["exchange_s"] / row["played_s"] - 1) for row in played)
    most_played = max(row["ranks"] for row in played)
    asked = (
        f"{options.ranks} ranks exchange {options.values:,} values over a link of "
        f"{options.gbytes_per_s:g} GB/s and {options.latency_us:g} us each; a step computes "
        f"{options.compute_ms:g} ms. Steps and hours to a goal of {options.goal:g} are "
        f"{ASSUMPTIONS} (noise {options.noise:g}, unlike data {options.unlike:g})."
    )
    agreed = (
        f"Played message by message to {most_played} ranks, the exchanges differ from the closed "
        f"form by {apart:.1e} at most."
    )
    fitted = (
        "Published figures that were not fitted. One bandwidth is fitted to 278 ms of a ring's "
        "all-reduce; hours of ImageNet on 4 and 8 nodes give computation, transfer and latency."
    )
    beside = table_of(
        published,
        ("figure", "{figure}"),
        ("published", "{published:.3f}"),
        ("predicted", "{predicted:.3f}"),
        ("error", "{error:+.1%}"),
    )
    paragraphs = [
        asked,
        _costs(costs),
        *_left_out(options.ranks),
        agreed,
        GROWTH,
        IN_A_FILE,
        _grown(growth),
        fitted,
        beside,
    ]
    if training:
        paragraphs += [_trained(training, steps), *_order(training)]
    return Report(
        title="Data parallelism that communicates less",
        words=paragraphs,
        summary={"largest_difference_played": apart},
        pictures=[_curves(growth)],
    )


def _left_out(ranks: int) -> Iterator[str]:
    """The reason why a gradient reduction has no result row, as text."""
    for name, how in REDUCTIONS.items():
        if problem := how.ranks_problem(ranks):
            yield f"No row of {name}: {problem}."


def _costs(rows: Sequence[Row]) -> str:
    return table_of(
        rows,
        ("reduction", "{reduction}"),
        ("message (MB)", lambda row: f"{row['message_bytes'] / 1e6:.2f}"),
        ("exchange (ms)", lambda row: f"{1e3 * row['exchange_s']:.2f}"),
        ("step (ms)", lambda row: f"{1e3 * row['step_s']:.2f}"),
        ("buffers (GiB)", lambda row: f"{row['buffer_bytes'] / GIB_BYTES:.2f}"),
        ("steps to the goal", lambda row: f"{row['steps_to_goal']:,.0f}"),
        ("hours to the goal", lambda row: f"{row['hours_to_goal']:.3f}"),
    )


def _grown(rows: Sequence[Row]) -> str:
    counts = sorted({row["ranks"] for row in rows})[1::2]
    by = {(row["reduction"], row["ranks"]): row for row in rows}

    def cell(name: str, ranks: int) -> str:
        return f"{1e3 * by[name, ranks]['exchange_s']:,.2f}"

    lines: list[dict[str, Any]] = [{"ranks": ranks} for ranks in counts]
    return table_of(
        lines,
        ("ranks", "{ranks}"),
        *((f"{name} (ms)", lambda row, name=name: cell(name, row["ranks"])) for name in GROWN),
    )


def _trained(rows: Sequence[Row], steps: int) -> str:
    head = (
        "Eight workers train a network of one hidden layer on scikit-learn's 1,797 digits for "
        f"{steps} steps; 5 % of each gradient are kept but by plain, gossip (one peer), local "
        "(every 8), an asynchronous server, and where one worker lies (ten times its gradient, the "
        "other way). Rates are chosen on a validation part, from the same six for all; the "
        "accuracy is that of the test part, with its standard deviation over the seeds. Published: "
        "ResNet-18 and ResNet-20 on CIFAR-10."
    )
    table = table_of(
        rows,
        ("way", "{way}"),
        ("rate", "{rate:g}"),
        ("accuracy (%)", "{accuracy:.2f}"),
        ("spread", "{spread:.2f}"),
        ("published (%)", lambda row: ", ".join(f"{one:.2f}" for one in row["published"]) or "-"),
    )
    return f"{head}\n\n{table}"


def _order(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence with the trained methods in the order of their accuracies, as measured here and as
    published.
    """
    known = [row for row in rows if row["published"]]
    ours = sorted(known, key=lambda row: -row["accuracy"])
    theirs = sorted(known, key=lambda row: -row["published"][0])
    yield (
        f"Order here: {', '.join(row['way'] for row in ours)}; published for ResNet-18: "
        f"{', '.join(row['way'] for row in theirs)}. Differences below the spread say nothing."
    )


def _curves(rows: Sequence[Row]) -> Lines:
    curves = {
        name: [
            (float(row["ranks"]), 1e3 * row["exchange_s"])
            for row in rows
            if row["reduction"] == name
        ]
        for name in GROWN
    }
    return Lines(
        name="communication",
        caption="Seconds of an exchange as ranks grow, in closed form.",
        curves=curves,
        x="ranks",
        y="ms of an exchange",
        log_x=True,
        log_y=True,
    )
