"""All searchers by name. A new searcher is a file with its strategy, and one line here."""

from typing import TYPE_CHECKING

from mistlab.values.on_use import OnUse, called, imported

if TYPE_CHECKING:
    from searchers.strategy import Strategy


# After a colon: further arguments with which a searcher can be made.
SEARCHERS: "OnUse[Strategy]" = OnUse(
    {
        "mist": called("searchers.strategies.mist:mist_with", "highs"),
        "mist:published": called("searchers.strategies.published:published"),
        "mist:cbc": called("searchers.strategies.mist:mist_with", "cbc"),
        "exact": imported("searchers.strategies.exact:exact"),
        "exhaustive": imported("searchers.strategies.exhaustive:exhaustive"),
        "optuna": called("searchers.strategies.optuna_search:optuna_strategy", "tpe"),
        "optuna:cmaes": called("searchers.strategies.optuna_search:optuna_strategy", "cmaes"),
        "optuna:nsgaii": called("searchers.strategies.optuna_search:optuna_strategy", "nsgaii"),
        "optuna:random": called("searchers.strategies.optuna_search:optuna_strategy", "random"),
        "aceso": imported("searchers.strategies.aceso:aceso"),
        "alpa": imported("searchers.strategies.alpa:alpa"),
        "rl": imported("searchers.strategies.rl:rl"),
        "random": imported("searchers.strategies.random_search:random_search"),
        "megatron": called("searchers.strategies.grids:grid_of", "megatron"),
        "deepspeed": called("searchers.strategies.grids:grid_of", "deepspeed"),
        "megatron:published": called("searchers.strategies.grids:grid_of", "megatron"),
        "deepspeed:published": called("searchers.strategies.grids:grid_of", "deepspeed"),
    }
)
