"""The most bytes that stages hold while they run their passes, layer by layer, beside their states.

From a layer's forward pass until its backward pass a stage keeps the part of its activations that
stays on the GPU. If gradients of weights have passes of their own (W), it then keeps what W needs.
Offloaded activations of a layer leave while the layer after it runs forward, and come back while
that layer runs backward.

Layers of one type that follow one another are a run: their bytes change evenly, so one of its ends
is fullest.

Axes: C candidates, V chunks of a stage, T types of layers, R runs of layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mistlab.schedule.held_moments import HeldMoments, PassMoments

Values = NDArray[np.float64]
# How long each run is (R, C), and the place of its type (R, C or R, 1).
Runs = tuple[Values, NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WalkedLayers:
    """Bytes (T, C) on the GPU of a layer of each type, for one micro-batch.

    It ``keeps`` some until its backward pass; the ``moving`` ones among its activations are on the
    host meanwhile. It has ``left`` others from its backward pass until W. If its backward pass is
    ``in_w`` (T, 1), W runs it whole.
    """

    keeps: Values
    moving: Values
    left: Values
    forward_peak: Values
    backward_peak: Values
    in_w: NDArray[np.bool_]

    def of_types(self, types: NDArray[np.int64]) -> Self:
        """The bytes of layers of such types, one for each candidate (C) or for all of them (1)."""
        if len(types) == 1:
            return type(self)(
                **{one.name: getattr(self, one.name)[types[0]] for one in fields(self)}
            )
        rows = np.arange(len(types))
        is_in_w = self.in_w[types, 0]
        others = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "in_w"}
        return type(self)(**{name: own[types, rows] for name, own in others.items()}, in_w=is_in_w)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """Layers of one type, ``count`` of them (C): ``before`` are the bytes that are on their way
    while the first of them runs, those of the layer before it."""

    count: Values
    own: WalkedLayers
    before: Values

    @property
    def is_there(self) -> NDArray[np.bool_]:
        """Whether there is a layer."""
        return self.count > 0


def _runs(layers: WalkedLayers, runs: Runs) -> Iterator[_Run]:
    moving = np.zeros(layers.keeps.shape[1])
    for count, types in zip(*runs, strict=True):
        run = _Run(count=count, own=layers.of_types(types), before=moving)
        moving = np.where(run.is_there, run.own.moving, moving)
        yield run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chunk:
    """A chunk's bytes (C) for one micro-batch: between passes, and at the most during each pass
    beyond the bytes at its begin. ``begins`` are those of its first layer's forward pass."""

    keeps: Values
    left: Values
    leaving: Values
    begins: Values
    forward: Values
    backward: Values
    of_weights: Values

    @classmethod
    def of(cls, layers: WalkedLayers, runs: Runs, sent: Values) -> Self:
        """A chunk of these layers, which holds what it has ``sent`` until its backward pass."""
        nothing = np.zeros(len(sent))
        every = [*_runs(layers, runs)]
        kept, left, leaving, begins, forward = nothing, nothing, nothing, nothing, nothing
        of_weights, is_begun = nothing, np.zeros(len(sent), dtype=np.bool_)
        for run in every:
            own, is_first = run.own, run.is_there & ~is_begun
            runs_first = kept + run.before + own.forward_peak
            runs_last = kept + (run.count - 1) * own.keeps + own.moving + own.forward_peak
            forward = _fuller(forward, runs_first, run.is_there)
            forward = _fuller(forward, runs_last, run.count > 1)
            begins = np.where(is_first, own.forward_peak, begins)
            of_weights = np.where(is_first & own.in_w, own.backward_peak, of_weights)
            leaving = np.where(run.is_there, own.moving, leaving)
            kept, left = kept + run.count * own.keeps, left + run.count * own.left
            is_begun |= run.is_there
        backward, now = nothing, -sent
        for run in reversed(every):
            own, each = run.own, run.own.left - run.own.keeps
            # The last layer, the second and the first one.
            runs_last = now - own.keeps + own.moving + own.backward_peak
            runs_second = runs_last + (run.count - 2) * each
            runs_first = now - own.keeps + (run.count - 1) * each + run.before + own.backward_peak
            backward = _fuller(backward, runs_last, (run.count > 1) & ~own.in_w)
            backward = _fuller(backward, runs_second, (run.count > 1) & ~own.in_w)
            backward = _fuller(backward, runs_first, run.is_there & ~own.in_w)
            now = now + run.count * each
        return cls(
            keeps=kept + sent,
            left=left,
            leaving=leaving,
            begins=begins,
            forward=forward,
            backward=np.maximum(backward, now),
            of_weights=np.where(of_weights > 0, of_weights - left, 0.0),
        )


def _fuller(bytes_: Values, others: Values, are_there: NDArray[np.bool_]) -> Values:
    return np.where(are_there, np.maximum(bytes_, others), bytes_)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WalkedPasses:
    """The most bytes (C) during forward passes, and during the other passes."""

    forward: Values
    backward: Values

    @classmethod
    def of(
        cls,
        moments: HeldMoments,
        layers: WalkedLayers,
        chunks: Sequence[Runs],
        *,
        sent: Sequence[Values],
        step_buffer: Values,
    ) -> Self:
        """Stages with these moments, whose ``chunks`` hold what they have ``sent``. First forward
        passes need the ``step_buffer`` too."""
        own = [_Chunk.of(layers, runs, of) for runs, of in zip(chunks, sent, strict=True)]
        each = np.stack([one.keeps for one in own] + [one.left for one in own])
        forward = backward = np.zeros(each.shape[1])
        for one in moments.begins:
            held = (one.held @ each).max(axis=0)
            if one.kind == "F":
                needs = held + _forward(one, own) + one.first_forward * step_buffer
                forward = np.maximum(forward, needs)
            else:
                of = own[one.chunk]
                needs = held + (of.backward if one.kind == "B" else of.of_weights)
                backward = np.maximum(backward, needs)
        return cls(forward=forward, backward=backward)


def _forward(passes: PassMoments, chunks: Sequence[_Chunk]) -> Values:
    """The bytes (C) of forward passes, whose first layer may run beside activations that leave."""
    own = chunks[passes.chunk]
    if passes.leaving is None:
        return own.forward
    return np.maximum(chunks[passes.leaving].leaving + own.begins, own.forward)
