"""The grids that users of Megatron-LM and DeepSpeed try: every plan of their own small spaces."""

import numpy as np

from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.ledger import Ledger
from searchers.strategies.exhaustive import exhaustive
from searchers.strategy import Ending, Strategy


def grid_of(engine: str) -> Strategy:
    """The grid of one engine; refuses spaces of other engines."""

    def grid(
        problem: Problem, space: SearchSpace, ledger: Ledger, draw: np.random.Generator
    ) -> Ending:
        if space.engine != engine:
            reason = f"tries plans of engine {engine}, and space {space.name} has {space.engine}'s"
            return Ending(status="REFUSED", reason=reason)
        return exhaustive(problem, space, ledger, draw)

    return grid
