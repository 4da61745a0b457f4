"""All searchers by name. A new one is a file with its strategy, and one line here."""

from collections.abc import Mapping

from searchers.aceso import aceso
from searchers.alpa import alpa
from searchers.optuna_search import optuna_strategy
from searchers.random_search import random_search
from searchers.rl import rl
from searchers.strategy import Strategy

SEARCHERS: Mapping[str, Strategy] = {
    "aceso": aceso,
    "alpa": alpa,
    "optuna": optuna_strategy("tpe"),
    "optuna:cmaes": optuna_strategy("cmaes"),
    "optuna:nsgaii": optuna_strategy("nsgaii"),
    "optuna:random": optuna_strategy("random"),
    "random": random_search,
    "rl": rl,
}
