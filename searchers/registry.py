"""All searchers by name. A new one is a file with its strategy, and one line here."""

from collections.abc import Mapping

from searchers.strategies.aceso import aceso
from searchers.strategies.alpa import alpa
from searchers.strategies.exact import exact
from searchers.strategies.exhaustive import exhaustive
from searchers.strategies.grids import grid_of
from searchers.strategies.mist import mist_with
from searchers.strategies.optuna_search import optuna_strategy
from searchers.strategies.random_search import random_search
from searchers.strategies.rl import rl
from searchers.strategy import Strategy

# After a colon, what else a searcher can be made with.
SEARCHERS: Mapping[str, Strategy] = {
    "mist": mist_with("highs"),
    "mist:cbc": mist_with("cbc"),
    "exact": exact,
    "exhaustive": exhaustive,
    "optuna": optuna_strategy("tpe"),
    "optuna:cmaes": optuna_strategy("cmaes"),
    "optuna:nsgaii": optuna_strategy("nsgaii"),
    "optuna:random": optuna_strategy("random"),
    "aceso": aceso,
    "alpa": alpa,
    "rl": rl,
    "random": random_search,
    "megatron": grid_of("megatron"),
    "deepspeed": grid_of("deepspeed"),
}
