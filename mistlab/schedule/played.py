"""The buffers that tasks of simulated passes use where the runtime would make tasks share one.

In the closed form all tasks of a slot run side by side, and the event simulator gives them room to
do so. In the runtime some of these tasks share a buffer and wait for one another
(docs/decisions/0016-waits.md). Each function here is a task whose buffers differ, and says how.
"""

from collections.abc import Mapping

from mistlab.schedule.buffers import TOUCHES, Buffer, Buffers, Touched, Touches


def _forward(touched: Touched) -> tuple[Buffers, Buffers]:
    """F takes an entry of the ring of weights, even if the weights of its layer stay in place."""
    reads, writes = touched.forward()
    return (*reads, ("weight slot", touched.entry)), writes


def _backward(touched: Touched) -> tuple[Buffers, Buffers]:
    """B waits for fetched gradients, which have their own buffer while others leave."""
    reads, writes = touched.backward()
    return (*reads, *_fetched_gradients(touched)), writes


def _step(touched: Touched) -> tuple[Buffers, Buffers]:
    """S needs no entry of the ring of weights, where only U brings weights. It writes weights that
    P> carries away into a buffer of their own."""
    reads, writes = touched.step()
    if touched.shape.offload_of(touched.layer).weights > 0:
        writes = (*writes, ("stepped weights", touched.entry))
    else:
        writes = tuple(buffer for buffer in writes if buffer != ("weight slot", touched.entry))
    return (*reads, *_fetched_gradients(touched)), writes


def _fetch_gradients(touched: Touched) -> tuple[Buffers, Buffers]:
    """G< fetches gradients into their own buffer."""
    return touched.kept("gradients"), (("fetched gradients", touched.entry),)


def _evict_weights(touched: Touched) -> tuple[Buffers, Buffers]:
    """P> carries stepped weights away."""
    return (("stepped weights", touched.entry),), touched.kept("weights")


def _evict_activations(touched: Touched) -> tuple[Buffers, Buffers]:
    """A> copies into a buffer on the host that no other layer and micro-batch shares."""
    return (("leaving", touched.entry),), (_away(touched),)


def _fetch_activations(touched: Touched) -> tuple[Buffers, Buffers]:
    """A< takes the memory from which activations left; the runtime frees both together."""
    return (_away(touched),), (("returned", touched.entry), ("leaving", touched.entry))


def _away(touched: Touched) -> Buffer:
    return (*touched.away, touched.layer, touched.micro_batch)


def _fetched_gradients(touched: Touched) -> Buffers:
    comes = touched.shape.offload_of(touched.layer).gradients > 0
    return (("fetched gradients", touched.entry),) if comes else ()


PLAYED: Mapping[str, Touches] = {
    **TOUCHES,
    "F": _forward,
    "B": _backward,
    "S": _step,
    "G<": _fetch_gradients,
    "P>": _evict_weights,
    "A>": _evict_activations,
    "A<": _fetch_activations,
}
# Tasks of memory that the runtime has and that are not played.
NOT_PLAYED = ("let go",)
