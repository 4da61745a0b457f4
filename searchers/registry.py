"""All searchers by name. To add one, write its strategy in a new file under ``searchers/methods``,
and add a line here.
"""

from typing import TYPE_CHECKING

from mistlab.core.values import OnUse, called, imported

if TYPE_CHECKING:
    from searchers.strategy import Strategy


# A searcher's name may have a colon and a suffix, which selects a variant of the searcher.
SEARCHERS: "OnUse[Strategy]" = OnUse(
    {
        "mist": called("searchers.methods.mist:mist_with", "highs"),
        "mist:published": called("searchers.methods.published:published"),
        "mist:cbc": called("searchers.methods.mist:mist_with", "cbc"),
        "exact": imported("searchers.methods.exact:exact"),
        "exhaustive": imported("searchers.methods.exhaustive:exhaustive"),
        "optuna": called("searchers.methods.optuna_search:optuna_strategy", "tpe"),
        "optuna:cmaes": called("searchers.methods.optuna_search:optuna_strategy", "cmaes"),
        "optuna:nsgaii": called("searchers.methods.optuna_search:optuna_strategy", "nsgaii"),
        "optuna:random": called("searchers.methods.optuna_search:optuna_strategy", "random"),
        "aceso": imported("searchers.methods.aceso:aceso"),
        "alpa": imported("searchers.methods.alpa:alpa"),
        "rl": imported("searchers.methods.rl:rl"),
        "random": imported("searchers.methods.random_search:random_search"),
        "megatron": called("searchers.methods.exhaustive:grid_of", "megatron"),
        "deepspeed": called("searchers.methods.exhaustive:grid_of", "deepspeed"),
        "megatron:published": called("searchers.methods.exhaustive:grid_of", "megatron"),
        "deepspeed:published": called("searchers.methods.exhaustive:grid_of", "deepspeed"),
    }
)
