"""How long slots take, worked out one by one."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mistlab.cost.side_by_side import overlapped
from mistlab.machine.slowdowns import STREAMS

AWAY = STREAMS.index("device_to_host")


class Slot(NamedTuple):
    """What the streams of a slot hold; for how long the next layer's weights come from the host and
    are then gathered, if both; and the least that the slot takes."""

    alone: np.ndarray
    fetched: tuple[float, float] = (0.0, 0.0)
    least: float = 0.0


def together(*slots: Slot) -> Slot:
    """Slots of several passes side by side."""
    return Slot(
        sum((slot.alone for slot in slots), np.zeros((1, len(STREAMS)))),
        max(slot.fetched for slot in slots),
        max(slot.least for slot in slots),
    )


def lasting_s(slot: Slot, factors: np.ndarray) -> float:
    """Seconds of a slot, in which weights are gathered only when they came from the host."""
    copied, gathered = slot.fetched
    if not gathered:
        return max(float(overlapped(slot.alone, factors)[0]), slot.least)
    link, host = STREAMS.index("gpu_to_gpu"), STREAMS.index("host_to_device")
    left, elapsed = slot.alone[0].copy(), 0.0
    left[link] -= gathered
    rest = left[host] - copied
    left[host] = copied
    while busy := [stream for stream in range(len(STREAMS)) if left[stream] > 1e-15]:
        slowed = factors[sum(1 << stream for stream in busy)]
        step = min(left[stream] * slowed[stream] for stream in busy)
        left[busy] -= step / slowed[busy]
        elapsed += step
        if copied and left[host] <= 1e-15:
            left[host], left[link], copied = rest, max(left[link], 0.0) + gathered, 0.0
    return max(elapsed, slot.least)


def endless(alone: np.ndarray, factors: np.ndarray) -> tuple[float, float]:
    """Seconds of a slot beside a link that never rests, and what the link does meanwhile."""
    link, left, elapsed, done = STREAMS.index("gpu_to_gpu"), alone[0].copy(), 0.0, 0.0
    left[link] = 0
    while busy := [stream for stream in range(len(STREAMS)) if left[stream] > 0]:
        slowed = factors[sum(1 << stream for stream in {*busy, link})]
        step = min(left[stream] * slowed[stream] for stream in busy)
        for stream in busy:
            rest = left[stream] - step / slowed[stream]
            left[stream] = 0 if rest < 1e-15 else rest
        elapsed, done = elapsed + step, done + step / slowed[link]
    return elapsed, done


def evicted(alone: np.ndarray, factors: np.ndarray) -> float:
    """Seconds until a slot's collective is over, if gradients leave before anything else runs."""
    link, copies = STREAMS.index("gpu_to_gpu"), STREAMS.index("device_to_host")
    both = factors[(1 << link) + (1 << copies)]
    before, left = alone[0, copies] * both[copies], alone.copy()
    left[0, copies] = 0
    left[0, link] -= before / both[link]
    if before == 0 or left[0, link] <= 0:
        return 0.0
    return before + float(overlapped(left, factors, ["gpu_to_gpu"])[0])


def lost_beside(slots: Sequence[Slot], factors: np.ndarray, send_s: float) -> float:
    """How much longer a pass takes beside a send, which has half of the link while collectives
    run."""
    if not slots:
        return 0.0
    computing_s = sum(slot.alone[0, 0] for slot in slots)
    least = min(send_s * factors[3, 1] / factors[3, 0], computing_s) * (factors[3, 0] - 1)
    longer_s, sent_s = beside_endless_send(slots, factors)
    return max(least, longer_s * min(1, send_s / sent_s))


def beside_endless_send(slots: Sequence[Slot], factors: np.ndarray) -> tuple[float, float]:
    """How much longer a pass takes beside a send without an end, and what is sent by its end."""
    longer_s = sent_s = 0.0
    for slot in slots:
        usual_s = lasting_s(slot, factors)
        (elapsed_s, done_s), collective_s = endless(slot.alone, factors), slot.alone[0, 1]
        longer_s += max(elapsed_s + max(2 * collective_s - done_s, 0), usual_s) - usual_s
        sent_s += max(done_s - collective_s, collective_s)
    return longer_s, sent_s


def stepping_in_turn(seconds: Mapping[str, float], factors: np.ndarray, blocks: int = 10) -> float:
    """Mean seconds from one block's forward pass to the next one's in the first pass, the mean of
    four after the first four, task by task: states leave when their block has stepped."""
    compute, link, host, away = range(len(STREAMS))
    turns = range(-1, blocks)
    queues: dict[int, list[tuple[str, int]]] = {
        compute: [key for at in turns for key in (("S", at + 1), ("F", at))],
        link: [("U", at + 1) for at in turns],
        host: [key for at in turns for key in (("G<", at + 1), ("O<", at + 1))],
        away: [key for at in turns for key in (("O>", at), ("P>", at), ("A>", at - 1))],
    }
    before = {
        "S": [("G<", 0), ("O<", 0), ("P>", 2)],
        "F": [("U", 0), ("A>", 2)],
        "U": [("S", 0)],
        "G<": [("begun S", 1)],
        "O<": [("begun S", 1), ("O>", 2)],
        "O>": [("S", 0)],
        "P>": [("S", 0)],
        "A>": [("F", 0)],
    }
    # The first block has stepped, and no block is before it.
    done = {(name, at) for name in (*before, "begun S") for at in (-2, -1)}
    done |= {(name, 0) for name in ("S", "begun S", "U", "G<", "O<")}
    queues = {
        stream: [(name, at) for name, at in queue if 0 <= at < blocks and (name, at) not in done]
        for stream, queue in queues.items()
    }
    running: dict[int, float] = {}
    ended: dict[int, float] = {}
    now = 0.0
    while any(queues.values()):
        for stream, queue in queues.items():
            if queue and stream not in running:
                name, at = queue[0]
                if all((other, at - back) in done for other, back in before[name]):
                    running[stream] = seconds[name]
                    if name == "S":
                        done.add(("begun S", at))
        over = [stream for stream, left in running.items() if left <= 1e-15]
        starts = [
            queue[0]
            for stream, queue in queues.items()
            if queue and stream not in running
            if all((other, queue[0][1] - back) in done for other, back in before[queue[0][0]])
        ]
        if not over and not starts:
            slowed = factors[sum(1 << stream for stream in running)]
            step = min(left * slowed[stream] for stream, left in running.items())
            for stream in running:
                running[stream] -= step / slowed[stream]
            now += step
        for stream in over:
            name, at = queues[stream].pop(0)
            done.add((name, at))
            del running[stream]
            if name == "F":
                ended[at] = now
    return (ended[8] - ended[4]) / 4
