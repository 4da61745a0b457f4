"""Says when a space has more ways to save memory than this machine can list at once.

A search of all ways lists, for each stage, every combination of the space's ratios and levels. So a
ratio in steps of a thousandth instead of eighths, for four kinds, takes 250 million times the room.
"""

import os
from math import prod
from pathlib import Path

from mistlab.values.dimensions import names_of
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from mistlab.values.units import GIB_BYTES
from searchers.savings import counts_choices

# What a listed way takes at the peak, with the columns of its costs and times. Measured with
# llama-350m on two L4, searcher exact: 700 MiB at 331,776 ways (ratios in 23rds), and 655 MiB at
# 320,000 ways of stages that are alike (ratios in 19ths, no or all blocks recomputed).
WAY_BYTES = 2200


def ways_listed(space: SearchSpace) -> int:
    """The number of ways to save memory on a stage, without treated blocks."""
    return prod(len(space.listed(name) or ()) for name in names_of("savings"))


def too_many_ways(problem: Problem, space: SearchSpace, room_bytes: int | None = None) -> str:
    """Why all ways of a space cannot be listed in so much memory (by default what this machine has
    free); empty if they can."""
    ways = ways_listed(space)
    if not space.unequal_stages:
        ways *= len(counts_choices(space, problem.workload.model.layers))
    needed = ways * WAY_BYTES
    room = free_bytes() if room_bytes is None else room_bytes
    if needed <= room:
        return ""
    return (
        f"space {space.name} has {ways:,} ways to save memory on a stage: to list them takes about "
        f"{needed / GIB_BYTES:,.1f} GiB, and {room / GIB_BYTES:,.1f} GiB are free: give coarser "
        "ratios, or searcher mist, which goes from coarse to fine"
    )


def free_bytes() -> int:
    """The memory of this machine that may be taken; all of it where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024
