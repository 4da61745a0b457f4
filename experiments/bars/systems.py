"""One case of the evaluation, searched as each system would: times, plans, and what times are made
of."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.comparing.bench import BUDGET, Bench, Found
from experiments.comparing.cases import Case, measured
from mistlab.engines.mist import MIST
from mistlab.engines.mistlab import MISTLAB
from mistlab.values.plan_words import plan_line
from mistlab.values.search import Budget
from mistlab.values.space import space_of

OURS = "mist"
# Searchers of the systems that are compared with ours, in spaces of the same names.
BASELINES = {
    "megatron:published": "Megatron-LM as published",
    "deepspeed:published": "DeepSpeed as published",
    "megatron": "Megatron-LM, tuned",
    "deepspeed": "DeepSpeed, tuned",
    "aceso": "Aceso",
    "aceso:unfused": "Aceso, attention written out",
}
# Aceso's runtime is a Megatron-LM on torch 1.12, which had no fused attention.
UNFUSED = "aceso:unfused"
# What the published runtime has in place of ours, one at a time.
THEIRS = {
    "its sends": replace(MISTLAB, sends=MIST.sends),
    "its kernels": replace(MISTLAB, kernels=MIST.kernels),
    "its step": replace(MISTLAB, step_moved=MIST.step_moved),
}
# Aceso's search is ended after so many plans: more than this changed a time by 2 % at most.
ACESO_PLANS, QUICK_ACESO_PLANS = 1000, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A case, and how thoroughly to search it."""

    case: Case
    quick: bool
    seed: int


def searched(asked: Asked) -> dict[str, Any]:
    """The row of a case."""
    bench = Bench.of(asked.case.problem())
    names = [name for name in (OURS, *BASELINES) if name != UNFUSED]
    found = {name: _found(bench, name, asked) for name in names}
    benches = dict.fromkeys(found, bench)
    if asked.case.attention == "flash":
        benches[UNFUSED] = Bench.of(replace(asked.case, attention="math").problem())
        found[UNFUSED] = _found(benches[UNFUSED], "aceso", asked)
    else:
        benches[UNFUSED], found[UNFUSED] = bench, found["aceso"]
    ours = found[OURS]
    seconds = {name: one.seconds if one else None for name, one in found.items()}
    played = {
        name: benches[name].played_s(one.plan) if one else None for name, one in found.items()
    }
    return {
        "case": asked.case.name,
        **asdict(asked.case),
        "gpus": asked.case.num_gpus,
        "seconds": seconds,
        "played_s": played,
        "over": _ratios(seconds),
        "over_played": _ratios(played),
        "by_published_runtime_s": bench.run_by_s(MIST, ours.plan) if ours else None,
        "with_published_s": {
            what: bench.run_by_s(engine, ours.plan) if ours else None
            for what, engine in THEIRS.items()
        },
        "published_over": dict(measured(asked.case)),
        "terms_s": {name: asdict(one.terms) for name, one in found.items() if one},
        "plans": {name: plan_line(one.plan) for name, one in found.items() if one},
        "timing": {name: one.result.wall_s for name, one in found.items() if one},
    }


def _found(bench: Bench, name: str, asked: Asked) -> Found | None:
    plans = QUICK_ACESO_PLANS if asked.quick else ACESO_PLANS
    budget = Budget(evaluations=plans) if name == "aceso" else BUDGET
    return bench.found(name, space_of(name), budget=budget, seed=asked.seed)


def _ratios(seconds: Mapping[str, float | None]) -> dict[str, float | None]:
    """How many times as long each baseline takes as ours."""
    ours = seconds[OURS]
    return {
        name: None if ours is None or (other := seconds[name]) is None else other / ours
        for name in BASELINES
    }
