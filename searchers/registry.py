"""All searchers by name. A new searcher is a file with its strategy, and one line here."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mistlab.values.on_use import OnUse

if TYPE_CHECKING:
    from searchers.strategy import Strategy


def _named(strategy: str) -> Any:
    """Import the file of a strategy."""
    return import_module(f"searchers.strategies.{strategy}")


# After a colon: further arguments with which a searcher can be made.
SEARCHERS: "OnUse[Strategy]" = OnUse(
    {
        "mist": lambda: _named("mist").mist_with("highs"),
        "mist:published": lambda: _named("published").published(),
        "mist:cbc": lambda: _named("mist").mist_with("cbc"),
        "exact": lambda: _named("exact").exact,
        "exhaustive": lambda: _named("exhaustive").exhaustive,
        "optuna": lambda: _named("optuna_search").optuna_strategy("tpe"),
        "optuna:cmaes": lambda: _named("optuna_search").optuna_strategy("cmaes"),
        "optuna:nsgaii": lambda: _named("optuna_search").optuna_strategy("nsgaii"),
        "optuna:random": lambda: _named("optuna_search").optuna_strategy("random"),
        "aceso": lambda: _named("aceso").aceso,
        "alpa": lambda: _named("alpa").alpa,
        "rl": lambda: _named("rl").rl,
        "random": lambda: _named("random_search").random_search,
        "megatron": lambda: _named("grids").grid_of("megatron"),
        "deepspeed": lambda: _named("grids").grid_of("deepspeed"),
        "megatron:published": lambda: _named("grids").grid_of("megatron"),
        "deepspeed:published": lambda: _named("grids").grid_of("deepspeed"),
    }
)
