"""Gradient sums of norms and biases that every tensor-parallel rank holds whole, where each rank's
gradients cover only its own tokens.

Each of these gradients has few numbers, but every block has some in every micro-batch. Each rank
accumulates them here; a layer's last backward pass of an iteration sums them over the ranks in one
call, and adds them to the layer's gradients. The only matrix that all ranks hold whole is the table
of positions. Its gradient is summed over the ranks by a hook in each backward pass, because its
accumulated sum may be sharded over data-parallel ranks by the end.
"""

from collections.abc import Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor, nn

from runtime.engine.storage.state import ParameterPlaces, StageState
from runtime.engine.streams.lanes import StreamedRanks
from runtime.models.parallel import parameters_of_own_tokens


class SharedVectors:
    """A stage's gradient sums of shared vectors, by layer. They are empty unless tensor-parallel
    ranks split tokens (sequence parallelism, or tokens of experts), or heads have norms.
    """

    def __init__(
        self,
        state: StageState,
        modules: Mapping[int, nn.Module],
        places: ParameterPlaces,
        ranks: StreamedRanks,
        device: torch.device,
    ) -> None:
        self._places, self._ranks = places, ranks
        # For each layer: which of its vectors are shared, and their gradient sums as one tensor and
        # separately.
        self._is_shared: dict[int, list[bool]] = {}
        self._sums: dict[int, Tensor] = {}
        self._each: dict[int, list[Tensor]] = {}
        for layer, module in modules.items() if ranks.size > 1 else ():
            of_own = parameters_of_own_tokens(module, splits_tokens=ranks.splits_tokens)
            shared = {id(one) for one in of_own}
            vectors = places.vectors(layer)
            are_shared = [id(one) in shared for one in vectors]
            if any(are_shared):
                shapes = [one.shape for one in compress(vectors, are_shared)]
                sizes = [shape.numel() for shape in shapes]
                dtype = state.layers[layer].gradients.resident.dtype
                self._is_shared[layer] = are_shared
                self._sums[layer] = torch.zeros(sum(sizes), dtype=dtype, device=device)
                parts = zip(self._sums[layer].split(sizes), shapes, strict=True)
                self._each[layer] = [part.view(shape) for part, shape in parts]

    @property
    def sizes(self) -> dict[int, int]:
        """The number of elements in the gradient sum of each layer."""
        return {layer: one.numel() for layer, one in self._sums.items()}

    def add(
        self, layer: int, gradients: Sequence[Tensor], *, is_first: bool, is_last: bool
    ) -> None:
        """Add the vector gradients of one backward pass of a layer; ``is_first`` and ``is_last``
        say whether it is the layer's first or last in the iteration.
        """
        if layer not in self._sums:
            self._places.add_vectors(layer, list(gradients))
            return
        is_shared, each = self._is_shared[layer], self._each[layer]
        if is_first:
            self._sums[layer].zero_()
        torch._foreach_add_(each, list(compress(gradients, is_shared)))
        if not is_last:
            split = [not shared for shared in is_shared]
            self._places.add_vectors(layer, list(compress(gradients, split)), split)
            return
        self._ranks.all_reduce_(self._sums[layer])
        sums = iter(each)
        pairs = zip(gradients, is_shared, strict=True)
        self._places.add_vectors(layer, [next(sums) if shared else one for one, shared in pairs])
