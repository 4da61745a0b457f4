"""Predicts all plans of a group of pipelines that may beat the best plan, if they are few.

Pipelines are joined, and bounded, by a closed form of the iteration time. A plan may be predicted
to take longer, since its passes and sends are played one by one; then no bound reaches the time of
the group's best plan, however small its boxes. Where few plans take less by the closed form than
the best plan does, predicting them all proves it the best.
"""

from dataclasses import replace
from math import inf

from searchers.exact.candidates import Menus, Options
from searchers.exact.programme import all_within, plan_of
from searchers.strategy import PLANS_AT_ONCE, ROUNDING

# The most plans of a group of pipelines that are predicted, since only all of them prove anything.
MOST_PLANS = 256


def are_all_predicted(menus: Menus, limit_s: float) -> bool:
    """Predict the plans of a group that take less than ``limit_s`` by the closed form, up to the
    best plan's time; False if there may be more of them than are tried.
    """
    if limit_s == inf:
        return False
    listing, ledger = replace(menus, pick=every), menus.ledger
    pipelines = all_within(listing, limit_s, MOST_PLANS)
    if pipelines is None:
        return False
    for start in range(0, len(pipelines), PLANS_AT_ONCE):
        together = pipelines[start : start + PLANS_AT_ONCE]
        if together[0][0] >= ledger.best_s * (1 - ROUNDING):
            break
        ledger.predict([plan_of(listing, chosen) for _, chosen in together])
    return True


def every(options: Options) -> Options:
    """All candidates for a stage: one that others dominate may still be played faster."""
    return options
