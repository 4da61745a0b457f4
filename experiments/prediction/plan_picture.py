"""Draws a plan as an SVG picture: a simulated iteration, the memory of the fullest GPU, and what
the time is spent on.

Its colours follow the reader's light or dark theme, and its bytes depend on nothing but the plan.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from xml.sax.saxutils import escape

from experiments.bench.problem import lacking_bytes
from mistlab.core.files import naming
from mistlab.core.units import GIB_BYTES
from mistlab.cost.breakdown import breakdown_of
from mistlab.cost.memory import allocator_of, room_of_plan
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction
from mistlab.machine.slowdowns import STREAMS
from mistlab.plan.plan_words import plan_line
from mistlab.schedule.slots import Kind
from simulators.events import EventSimulator, PlayedTask, Simulation
from simulators.graph import SENDS
from simulators.timeline import WORDS as KINDS

WIDTH, MARGIN, GAP = 920, 20, 18
# Light colours of areas, on which dark text is readable in a light and in a dark theme (after Okabe
# and Ito).
FILLS = (
    *("#8ccbee", "#f2c14e", "#7fd1b0", "#f0a58f", "#d3b3e5", "#c9d46a", "#c8ccd1", "#e9b6d2"),
    *("#a7b6ff", "#d7c4a3", "#9fe0e6", "#ffd9a8", "#bcd9a5"),
)
# If there are more stages than this, only the first and the last ones are drawn.
MOST_STAGES = 8
# The picture shows the beginning of an iteration, until the first stage has run this many
# micro-batches.
PASSES = 4
# The share of the picture's width that the left column takes, which shows memory.
SHARE_OF_MEMORY = 0.42
LANE, STAGE_GAP = 12, 8
# The width of a letter of small text in pixels.
LETTER = 6.6
# The smallest width and height of an area that gets a label, in pixels.
NAMED = (58.0, 32.0)
# Parts of the iteration's time below this share of it are not drawn.
LEAST_SHARE = 5e-3
STYLE = """
svg { font: 12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif }
.paper { fill: #ffffff } text { fill: #17191c } .soft { fill: #535a62 } .lane { fill: #eef1f5 }
.bar { fill: #0072b2 } .on { fill: #101214 } .h { font-size: 19px; font-weight: 650 }
.t { font-weight: 600; font-size: 13px }
@media (prefers-color-scheme: dark) {
.paper { fill: #14171b } text { fill: #e9ebee } .soft { fill: #a9b1ba } .lane { fill: #232930 }
.bar { fill: #56b4e9 } .on { fill: #101214 }
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """A rectangle in a picture."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A named part of a whole, such as the weights in a GPU's memory, with its size as a number and
    as text.
    """

    name: str
    size: float
    words: str
    fill: str = ""


def write_picture(
    job: Job, prediction: Prediction, part_words: Mapping[str, str], path: Path
) -> None:
    """Write the picture of a plan to a file; ``part_words`` are the names of the parts of an
    iteration's time.
    """
    simulation = EventSimulator(workload=job.workload, cluster=job.cluster).simulate(job.plan)
    with naming(path):
        path.write_text(picture_of(job, prediction, simulation, part_words), encoding="utf-8")


def picture_of(
    job: Job, prediction: Prediction, simulation: Simulation, part_words: Mapping[str, str]
) -> str:
    """The SVG text of a picture with a plan, its prediction and a simulated iteration."""
    plan, cluster = job.plan, job.cluster
    bounds = f"{prediction.iteration_s_low:.3f} to {prediction.iteration_s_high:.3f} s"
    fits = "fits in memory" if prediction.fits else "does not fit in memory"
    gpus = f"{plan.num_gpus} x {cluster.hardware.name}"
    head = f"{job.workload.model.name} on {gpus}: {prediction.iteration_s:.3f} s an iteration"
    subtitle = f"90 % of measurements: {bounds}; MFU {prediction.mfu:.0%}; {fits}"
    body = [
        _text(MARGIN, 34, head, "h"),
        _text(MARGIN, 56, subtitle, "soft"),
        _text(MARGIN, 74, plan_line(plan), "soft"),
    ]
    drawn, below = _timeline(simulation, plan.num_stages, 104)
    body += drawn
    left = SHARE_OF_MEMORY * (WIDTH - 2 * MARGIN - GAP)
    right = WIDTH - 2 * MARGIN - GAP - left
    rows = _time_parts(job, prediction, part_words)
    height = max(190.0, 22.0 * len(rows))
    number = _fullest(job, prediction)
    body.append(_text(MARGIN, below, f"Memory of a GPU of stage {number}, the fullest", "t"))
    area = Area(x=MARGIN, y=below + 12, width=left, height=height)
    parts = _memory_parts(job, prediction, number)
    body += _treemap(parts, area)
    x = MARGIN + left + GAP
    body.append(_text(x, below, "Where a GPU's time goes", "t"))
    body += _bars(rows, Area(x=x, y=below + 12, width=right, height=height))
    body.append(_text(MARGIN, below + height + 29, _unnamed(parts, area), "soft"))
    whole = below + height + 29 + MARGIN
    label = escape(f"{head}; {subtitle}", {'"': "&quot;"})
    head_of_file = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{whole:.0f}" '
        f'viewBox="0 0 {WIDTH} {whole:.0f}" role="img" aria-label="{label}">'
    )
    paper = f'<rect class="paper" width="{WIDTH}" height="{whole:.0f}" rx="8"/>'
    return "\n".join([head_of_file, f"<style>{STYLE}</style>", paper, *body, "</svg>", ""])


def squares(sizes: Sequence[float], area: Area) -> list[Area]:
    """Rectangles whose areas are proportional to ``sizes``, the largest first, in rows that make
    them as close to squares as possible.
    """
    scale = area.width * area.height / sum(sizes)
    rest, areas, start = area, [], 0
    while start < len(sizes):
        short = min(rest.width, rest.height)
        end, taken, worst = start, 0.0, float("inf")
        while end < len(sizes):
            more = taken + sizes[end] * scale
            most, least = sizes[start] * scale, sizes[end] * scale
            ratio = max(short**2 * most / more**2, more**2 / (short**2 * least))
            if ratio > worst:
                break
            worst, taken, end = ratio, more, end + 1
        thick, along = taken / short, 0.0
        is_wide = rest.width >= rest.height
        for size in sizes[start:end]:
            long = size * scale / thick
            areas.append(
                Area(x=rest.x, y=rest.y + along, width=thick, height=long)
                if is_wide
                else Area(x=rest.x + along, y=rest.y, width=long, height=thick)
            )
            along += long
        rest = (
            Area(x=rest.x + thick, y=rest.y, width=rest.width - thick, height=rest.height)
            if is_wide
            else Area(x=rest.x, y=rest.y + thick, width=rest.width, height=rest.height - thick)
        )
        start = end
    return areas


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of the timeline; it stands for consecutive tasks of one pass of a stage."""

    stage: int
    stream: str
    of_pass: tuple[Kind, int]
    start_s: float
    end_s: float


def _timeline(simulation: Simulation, stages: int, top: float) -> tuple[list[str], float]:
    """The bars of each stream that a stage uses, from the start of the iteration, and the time at
    which the drawing ends.
    """
    whole, first_passes = simulation.iteration_s, [("B", number) for number in range(PASSES)]
    returned = [
        task.end_s
        for task in simulation.tasks()
        if task.action.stage == 0 and task.action.of_pass in first_passes
    ]
    end = min(whole, max(returned, default=whole))
    shown = [one for one in _together(simulation.tasks()) if one.start_s < end]
    first = min(stages, MOST_STAGES // 2) if stages > MOST_STAGES else stages
    chosen = [*range(first), *range(max(first, stages - MOST_STAGES // 2), stages)]
    streams = [name for name in STREAMS if any(one.stream == name for one in shown)]
    kinds = [kind for kind in KINDS if any(one.of_pass[0] == kind for one in shown)]
    part = f"The first {end:.2f} s of an iteration" if end < 0.9 * whole else "One iteration"
    body = [_text(MARGIN, top, f"{part}, played task by task", "t")]
    left = MARGIN + 62.0
    scale, room, y = (WIDTH - MARGIN - left) / end, WIDTH - MARGIN - left, top + 12
    for stage in chosen:
        body.append(_text(MARGIN, y + LANE * len(streams) / 2 + 4, f"stage {stage}", "soft"))
        for lane in range(len(streams)):
            at = Area(x=left, y=y + lane * LANE, width=room, height=LANE - 2)
            body.append(_rect(at, css="lane"))
        for bar in shown:
            if bar.stage == stage:
                area = Area(
                    x=left + bar.start_s * scale,
                    y=y + streams.index(bar.stream) * LANE,
                    width=(min(bar.end_s, end) - bar.start_s) * scale - 0.5,
                    height=LANE - 2,
                )
                body.append(_rect(area, FILLS[kinds.index(bar.of_pass[0])]))
        y += LANE * len(streams) + STAGE_GAP
    x = left
    for number, kind in enumerate(kinds):
        body.append(_rect(Area(x=x, y=y + 1, width=11, height=11), FILLS[number]))
        body.append(_text(x + 16, y + 11, KINDS[kind], "soft"))
        x += 34 + LETTER * len(KINDS[kind])
    return body, y + 42


def _together(tasks: Iterable[PlayedTask]) -> list[Bar]:
    """The tasks of a stream as bars in order of time; consecutive tasks of one pass become one
    bar.
    """
    bars: list[Bar] = []
    last: dict[tuple[int, str], int] = {}
    for task in sorted(tasks, key=lambda one: (one.start_s, one.end_s)):
        action, stream = task.action, _stream(task)
        bar = Bar(
            stage=action.stage,
            stream=stream,
            of_pass=action.of_pass,
            start_s=task.start_s,
            end_s=task.end_s,
        )
        index = last.get((bar.stage, stream))
        if index is not None:
            before = bars[index]
            if bar.of_pass == before.of_pass and bar.start_s <= before.end_s * (1 + 1e-9):
                bars[index] = replace(before, end_s=max(before.end_s, bar.end_s))
                continue
        last[bar.stage, stream] = len(bars)
        bars.append(bar)
    return bars


def _stream(task: PlayedTask) -> str:
    """The stream in whose row a task is drawn; sends are drawn with collectives, since they use the
    same links.
    """
    return "gpu_to_gpu" if task.lane == SENDS else task.lane


def _fullest(job: Job, prediction: Prediction) -> int:
    lacks = lacking_bytes(job.cluster, job.plan, prediction)
    return lacks.index(max(lacks))


def _memory_parts(job: Job, prediction: Prediction, number: int) -> list[Part]:
    """What the memory of a stage's GPU contains (weights, activations, ...), largest first, and
    what is free.
    """
    stage = prediction.stages[number]
    sizes = {one.name: float(getattr(stage.memory, one.name)) for one in fields(stage.memory)}
    reserved = float(stage.peak_reserved_bytes)
    sizes["fragments"] = reserved - sum(sizes.values())
    sizes["outside torch"] = float(allocator_of(job.cluster).outside_bytes)
    sizes["free"] = float(room_of_plan(job.cluster, job.plan)[number]) - reserved
    fills = {name: FILLS[place] for place, name in enumerate(sizes)} | {"free": "#e0e3e7"}
    parts = [
        Part(name=name, size=size, words=f"{size / GIB_BYTES:.1f} GiB", fill=fills[name])
        for name, size in sizes.items()
        if size > 0
    ]
    return sorted(parts, key=lambda part: -part.size)


def _time_parts(job: Job, prediction: Prediction, part_words: Mapping[str, str]) -> list[Part]:
    """What the time of a GPU is spent on (arithmetic, exposed communication, ...), largest
    first.
    """
    parts = breakdown_of(job, prediction.iteration_s).parts
    rows = [
        Part(name=words, size=getattr(parts, name), words="") for name, words in part_words.items()
    ]
    whole = prediction.iteration_s
    return [
        Part(
            name=time_part.name,
            size=time_part.size,
            words=f"{time_part.size:.3f} s, {time_part.size / whole:.0%}",
        )
        for time_part in sorted(rows, key=lambda part: -part.size)
        if time_part.size > LEAST_SHARE * whole
    ]


def _treemap(parts: Sequence[Part], area: Area) -> Iterator[str]:
    places = squares([part.size for part in parts], area)
    for part, corner_area in zip(parts, places, strict=True):
        inner = Area(
            x=corner_area.x,
            y=corner_area.y,
            width=corner_area.width - 2,
            height=corner_area.height - 2,
        )
        title = escape(f"{part.name}: {part.words}")
        yield f"<g><title>{title}</title>{_rect(inner, part.fill)}"
        if _has_room(corner_area):
            most = max(1, int((corner_area.width - 10) / LETTER))
            yield _text(corner_area.x + 6, corner_area.y + 16, part.name[:most], "on")
            yield _text(corner_area.x + 6, corner_area.y + 31, part.words[:most], "on")
        yield "</g>"


def _has_room(area: Area) -> bool:
    return area.width > NAMED[0] and area.height > NAMED[1]


def _unnamed(parts: Sequence[Part], area: Area) -> str:
    """A text that names the parts whose areas are too small for their names."""
    places = squares([part.size for part in parts], area)
    small = [
        f"{part.name} {part.words}"
        for part, area in zip(parts, places, strict=True)
        if not _has_room(area)
    ]
    return f"and {', '.join(small)}" if small else ""


def _bars(parts: Sequence[Part], area: Area) -> Iterator[str]:
    """For each part of a whole its name, and beside it a bar as long as the part is large."""
    names, numbers = 0.6 * area.width, 94
    most = max(part.size for part in parts)
    for number, part in enumerate(parts):
        y = area.y + 22 * number
        long = max(1.0, (area.width - names - numbers) * part.size / most)
        yield _text(area.x, y + 13, part.name, "")
        yield _rect(Area(x=area.x + names, y=y + 2, width=long, height=14), css="bar")
        yield _text(area.x + names + long + 6, y + 13, part.words, "soft")


def _rect(area: Area, fill: str = "", css: str = "") -> str:
    colour = f'class="{css}"' if css else f'fill="{fill}"'
    corner = f'x="{area.x:.1f}" y="{area.y:.1f}"'
    size = f'width="{max(0.3, area.width):.1f}" height="{max(0.3, area.height):.1f}"'
    return f'<rect {corner} {size} rx="1" {colour}/>'


def _text(x: float, y: float, text: str, css: str) -> str:
    kind = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{escape(text)}</text>'
