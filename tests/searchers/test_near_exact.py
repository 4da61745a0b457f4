"""``mist`` beside ``exact`` on fifty problems small enough for a proof.

Models of the catalogue with fewer blocks, or all of them where the space has few ways to save
memory; on a third stages of unequal numbers of GPUs are fastest, and half leave a GPU less memory
than the fastest plan would take.
"""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.workload import Workload
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor

# How much slower than the best plan one of ``mist`` may be.
WITHIN = 0.01

# Which ones are tried in every run; space, model and blocks, GPUs, sequences of a step and their
# tokens, attention, and a GPU's memory in GiB if not all.
TABLE = """
slow  aceso falcon-2.7b  6 v100-32gb 1x1   16 2048 flash     -
slow  aceso falcon-7b   12 a100-80gb 1x1   64 2048 flash     -
slow  aceso falcon-2.7b 20 a100-80gb 1x2  128 2048 flash 50.45
slow  aceso gpt3-1.3b   23 a100-80gb 1x2   64 2048 flash 68.29
slow  aceso falcon-2.7b  - a100-40gb 1x3  128 4096 math  34.97
slow  aceso falcon-2.7b  9 v100-32gb 1x3  128 2048 flash   8.5
quick aceso gpt3-1.3b    - a100-80gb 1x3    8 4096 math  22.62
slow  aceso gpt3-7b     18 a100-40gb 1x3   48 4096 flash 28.89
slow  aceso llama-2.7b   - a100-40gb 1x3  128 4096 flash 34.02
quick aceso falcon-7b   16 l4-24gb   1x5   16 4096 flash     -
quick aceso gpt3-2.7b   10 a100-80gb 1x5  128 4096 flash     -
slow  aceso falcon-1.3b  - v100-32gb 2x3   48 4096 flash 12.62
slow  aceso gpt3-7b      - a100-80gb 2x3   24 4096 flash 51.82
slow  aceso falcon-1.3b  - l4-24gb   1x8   64 1024 math   9.31
slow  aceso gpt3-13b    15 a100-40gb 2x6   64 1024 flash 10.95
slow  aceso falcon-2.7b  - a100-40gb 2x8   64 1024 flash     -
slow  aceso gpt3-2.7b   15 l4-24gb   2x8  128 1024 math   8.86
slow  aceso gpt3-2.7b    - v100-32gb 1x8 1024 2048 math      -
quick mist  falcon-13b   5 v100-32gb 1x1    8 1024 flash     -
slow  mist  falcon-2.7b  7 a100-40gb 1x2   16 2048 flash 13.89
slow  mist  gpt3-13b     9 v100-32gb 1x2  128 4096 flash     -
slow  mist  gpt3-13b     6 l4-24gb   1x2   48 1024 flash     -
slow  mist  gpt3-2.7b    7 a100-80gb 1x2   48 2048 flash     -
slow  mist  gpt3-7b      8 a100-80gb 1x2   48 4096 flash 38.02
slow  mist  gpt3-7b      4 a100-80gb 1x2   64 1024 flash 16.23
slow  mist  llama-7b     7 a100-80gb 1x2   48 2048 flash 26.53
slow  mist  llama-7b    12 a100-80gb 1x2   64 4096 flash     -
slow  mist  llama-1.3b   3 a100-80gb 1x4   48 2048 math   7.67
slow  mist  llama-7b    12 a100-40gb 1x4  128 1024 flash     -
slow  mist  falcon-22b  11 a100-80gb 2x4  128 1024 math      -
slow  mist  gpt3-1.3b    7 a100-80gb 1x8   64 1024 math      -
slow  mist  gpt3-2.7b   11 a100-40gb 1x8   48 4096 math  34.73
slow  mist  llama-22b    5 a100-80gb 1x8   64 4096 flash     -
slow  mist  falcon-22b   8 a100-80gb 2x8  128 1024 flash 25.46
slow  wide  falcon-13b   6 a100-40gb 1x1   32 4096 flash 35.26
quick wide  falcon-13b   7 a100-80gb 1x1  128 1024 math      -
slow  wide  gpt3-7b      6 a100-80gb 1x1   32 4096 flash     -
slow  wide  llama-22b    7 a100-80gb 1x1   64 2048 flash 70.69
slow  wide  llama-7b     6 a100-40gb 1x1   64 2048 flash 33.82
slow  wide  falcon-13b   3 a100-80gb 1x2   16 2048 flash     -
slow  wide  llama-13b    7 a100-40gb 1x2   32 2048 math  31.83
slow  wide  llama-2.7b   6 a100-40gb 1x2   32 1024 math      -
slow  wide  llama-1.3b   4 a100-40gb 1x3   16 4096 math  11.72
slow  wide  gpt3-13b     5 v100-32gb 1x4  128 2048 math  28.51
slow  wide  gpt3-2.7b    4 a100-40gb 2x2    8 4096 flash   6.4
slow  wide  gpt3-22b     5 v100-32gb 1x4  128 1024 flash 28.16
slow  wide  llama-22b    3 a100-40gb 1x4   32 2048 flash     -
slow  wide  falcon-7b    5 l4-24gb   2x3   32 2048 flash 11.05
slow  wide  falcon-7b    4 v100-32gb 2x6  128 1024 flash     -
slow  wide  llama-7b     4 v100-32gb 2x6   16 2048 flash  4.48
"""
ROWS = [line.split() for line in TABLE.strip().splitlines()]

# The problems that ``exact`` cannot decide, each with the largest gap that it may leave: its bound
# is of the closed form, pipelines of three stages and more may be played longer, and too many of
# them are left to predict them all.
OPEN = {"wide falcon-7b 5 l4-24gb 2x3 32 2048 flash 11.05": 0.011}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row[1:], id=" ".join(row[1:]), marks=[pytest.mark.slow] if row[0] == "slow" else []
        )
        for row in ROWS
    ],
)
def test_mist_is_within_one_percent_of_the_best_plan(row: list[str]) -> None:
    problem, space = problem_of(*row[1:]), space_of(row[0])
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    exact, mist = (
        StrategySearcher(strategy=SEARCHERS[name], predictor=predictor).search(
            problem, space, Budget(seconds=1000), 0
        )
        for name in ("exact", "mist")
    )
    name = " ".join(row)
    assert exact.status == ("FEASIBLE" if name in OPEN else "OPTIMAL")
    assert exact.gap is not None
    assert exact.gap <= OPEN.get(name, 0.0)
    assert exact.prediction is not None
    assert mist.plan is not None
    assert mist.prediction is not None
    assert contains(problem, space, mist.plan)
    best_s, found_s = exact.prediction.iteration_s, mist.prediction.iteration_s
    assert best_s * (1 - 1e-9) <= found_s <= best_s * (1 + WITHIN)
    assert mist.gap is not None
    assert found_s * (1 - mist.gap) <= best_s * (1 + 1e-9)


def problem_of(
    model: str, blocks: str, hardware: str, gpus: str, batch: str, tokens: str, *rest: str
) -> Problem:
    attention, memory_gib = rest
    spec = catalog.model(model)
    nodes, gpus_per_node = map(int, gpus.split("x"))
    return Problem(
        workload=Workload(
            model=spec if blocks == "-" else replace(spec, layers=int(blocks)),
            sequence_length=int(tokens),
            global_batch=int(batch),
            attention=attention,  # type: ignore[arg-type]
            precision="fp16",
        ),
        cluster=Cluster(
            hardware=catalog.hardware(hardware),
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            memory_gib=None if memory_gib == "-" else float(memory_gib),
        ),
    )
