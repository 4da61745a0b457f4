"""All searchers by name. A new one is a file with its strategy, and one line here."""

from typing import TYPE_CHECKING

from mistlab.values.on_use import OnUse
from searchers import strategies

if TYPE_CHECKING:
    from searchers.strategy import Strategy

# After a colon, what else a searcher can be made with.
SEARCHERS: "OnUse[Strategy]" = OnUse(
    {
        "mist": lambda: strategies.mist.mist_with("highs"),
        "mist:cbc": lambda: strategies.mist.mist_with("cbc"),
        "exact": lambda: strategies.exact.exact,
        "exhaustive": lambda: strategies.exhaustive.exhaustive,
        "optuna": lambda: strategies.optuna_search.optuna_strategy("tpe"),
        "optuna:cmaes": lambda: strategies.optuna_search.optuna_strategy("cmaes"),
        "optuna:nsgaii": lambda: strategies.optuna_search.optuna_strategy("nsgaii"),
        "optuna:random": lambda: strategies.optuna_search.optuna_strategy("random"),
        "aceso": lambda: strategies.aceso.aceso,
        "alpa": lambda: strategies.alpa.alpa,
        "rl": lambda: strategies.rl.rl,
        "random": lambda: strategies.random_search.random_search,
        "megatron": lambda: strategies.grids.grid_of("megatron"),
        "deepspeed": lambda: strategies.grids.grid_of("deepspeed"),
    }
)
