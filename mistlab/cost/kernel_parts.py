"""What the kernels of layers take, by what limits them.

Axes: T types of layers, S strategies.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.layers import CLASSES, OF_ATTENTION, of_classes
from mistlab.cost.tasks import TaskSeconds
from mistlab.symbolic.graph import PHASES
from mistlab.symbolic.sizes import size_columns
from mistlab.symbolic.symbols import layer_columns

Values = NDArray[np.float64]

# Classes whose operators do no arithmetic that counts.
OF_MEMORY = ("memory", "scan")
# What may be left of a difference of equal sums, as a share of them.
ROUNDING = 1e-12
_ATTENTION = [CLASSES.index(one) for one in OF_ATTENTION]
_MEMORY = [place for place, one in enumerate(CLASSES) if one in OF_MEMORY]
_PRODUCTS = [place for place in range(len(CLASSES)) if place not in (*_ATTENTION, *_MEMORY)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelParts:
    """Seconds (T, S) of the kernels in one forward and one backward pass, with the operations of
    those that do arithmetic. By ``launched_s`` passes take longer than their kernels, because a
    host launches them. For ``again_s`` a part of the forward pass runs a second time."""

    products_s: Values
    attention_s: Values
    memory_bound_s: Values
    launched_s: Values
    again_s: Values
    products_flop: Values
    attention_flop: Values


def kernel_parts(seconds: TaskSeconds) -> KernelParts:
    """The seconds of the kernels of each type of layer, for each strategy."""
    model, types = seconds.model.layers, seconds.model.types
    sizes = {symbol: seconds.columns[name] for symbol, name in layer_columns().items()}
    values, rates = model.work(size_columns(seconds.model.workload, sizes)), model.rates()
    shape = len(types.names), len(CLASSES), len(seconds.zero)
    flop, own_s = np.zeros(shape), np.zeros(shape)
    for number, layer in enumerate(types.names):
        for phase in PHASES:
            name = model.work.pass_of(layer, phase)
            assert name is not None, f"{layer} has no {phase}"
            flop_of_pass, seconds_of_pass = of_classes(name, values, rates)
            flop[number] += flop_of_pass[: len(CLASSES)]
            own_s[number] += seconds_of_pass[: len(CLASSES)]
    again_s = np.stack(
        [
            np.zeros(shape[-1]) if one.again is None else one.again.compute_s
            for one in seconds.of_type
        ]
    )
    whole_s = seconds.alone("F", "") + seconds.alone("B", "") - again_s
    return KernelParts(
        products_s=own_s[:, _PRODUCTS].sum(axis=1),
        attention_s=own_s[:, _ATTENTION].sum(axis=1),
        memory_bound_s=own_s[:, _MEMORY].sum(axis=1),
        launched_s=rest_of(whole_s, own_s.sum(axis=1)),
        again_s=again_s,
        products_flop=flop[:, _PRODUCTS].sum(axis=1),
        attention_flop=flop[:, _ATTENTION].sum(axis=1),
    )


def rest_of(whole_s: Values, parts_s: Values) -> Values:
    """The seconds that are no part of a whole's parts; none if only rounding is left."""
    rest_s = whole_s - parts_s
    return np.where(rest_s > ROUNDING * whole_s, rest_s, 0.0)
