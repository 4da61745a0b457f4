"""All searchers by name. A new one is a file with its strategy, and one line here."""

from collections.abc import Mapping

from searchers.random_search import random_search
from searchers.strategy import Strategy

SEARCHERS: Mapping[str, Strategy] = {
    "random": random_search,
}
