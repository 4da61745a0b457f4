"""The command ``measure_speedup``: tries several plans of every training system, then repeats the
best plan of each, in turn with the others.
"""

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from experiments.bench.problem import workload_of
from experiments.cli.commandline import DONE, as_options, check_torch, progress
from experiments.pages.study import Report, Study
from experiments.pages.tables import TIMING, Row, number, table
from experiments.speedup.contenders import OURS, TARGET, Contender, contenders
from experiments.speedup.nodes import Nodes
from experiments.speedup.same_training import CONFIGURATION, configurations, held_against
from experiments.speedup.trial import run_trial, take_part
from experiments.training.run_options import check_node
from mistlab.core.values import InputError, near_matches, reject
from mistlab.export.found import checked_whole
from mistlab.export.targets import TARGETS
from mistlab.job.job import hardware_from, job_to_mapping, model_from
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan_words import plan_line

HEAD = (
    *("model", "GiB", "batch", "system"),
    *("measured s", "spread", "predicted s", "ours is faster by"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupCase:
    """A model, a memory limit and a batch size, for which all training systems are measured."""

    model: str
    cap_gib: float
    batch: int

    @property
    def words(self) -> str:
        """The model, the memory limit and the batch size as text."""
        return f"{self.model}, {self.cap_gib:g} GiB, batch {self.batch}"


def report_of(
    cases: Sequence[SpeedupCase], rows: Sequence[Row], systems: Sequence[str], left: int
) -> Report:
    """The table of all cases; ``left`` says how many of them are not finished."""
    lines: list[Sequence[object]] = []
    gains: dict[str, list[float]] = {system: [] for system in systems if system != OURS}
    for case in cases:
        best = {system: _best_s(rows, case, system) for system in systems}
        ours = best.get(OURS)
        for system in systems:
            seconds, spread, predicted_s = best[system] or (None, None, None)
            gain = None
            if ours is not None and ours[0] and seconds and system != OURS:
                gain = seconds / ours[0]
                gains[system].append(gain)
            lines.append(
                (
                    *(case.model, f"{case.cap_gib:g}", case.batch, _name(rows, system)),
                    _tried(rows, case, system) if seconds is None else f"{seconds:.3f}",
                    number(spread, ".1%"),
                    number(predicted_s, ".3f"),
                    number(gain, ".2f", "x", none=""),
                )
            )
    means = {
        _name(rows, system): geometric_mean(ratios) for system, ratios in gains.items() if ratios
    }
    paragraphs = [table(HEAD, lines)]
    paragraphs += configurations([row for row in rows if TIMING in row])
    paragraphs += [f"over {name}: {mean:.2f}x in geometric mean" for name, mean in means.items()]
    if left:
        paragraphs.append(f"{left} of {len(cases)} cases are not finished.")
    return Report(
        title="Measured speedups",
        words=paragraphs,
        summary={TIMING: {"speedups": means}, "left": left},
    )


def _name(rows: Sequence[Row], system: str) -> str:
    """The name of a training system in the table; Megatron-core without fused layers is called
    "local layers".
    """
    ran = (row[CONFIGURATION] for row in rows if row["system"] == system and CONFIGURATION in row)
    return str(next(ran, {"system": system})["system"])


def _tried(rows: Sequence[Row], case: SpeedupCase, system: str) -> str:
    """What became of a system's trials, as text, if none of its plans ran."""
    outcomes = dict.fromkeys(
        row["outcome"] for row in _rows_of(rows, case, system) if row["phase"] == "trial"
    )
    return "; ".join(outcomes) or "-"


def _rows_of(rows: Sequence[Row], case: SpeedupCase, system: str) -> list[Row]:
    of = (case.model, case.cap_gib, case.batch, system)
    return [
        row for row in rows if (row["model"], row["cap_gib"], row["batch"], row["system"]) == of
    ]


def _best_s(
    rows: Sequence[Row], case: SpeedupCase, system: str
) -> tuple[float, float, float | None] | None:
    """The median time of the repeated runs of a system's best plan, the range of these times as a
    share of the median, and the predicted time; None if no plan ran.
    """
    of_system = [row for row in _rows_of(rows, case, system) if TIMING in row]
    last = [row for row in of_system if row["phase"] == "repeat"] or of_system[:1]
    if not last:
        return None
    seconds = [row[TIMING]["median_s"] for row in last]
    middle = median(seconds)
    return middle, (max(seconds) - min(seconds)) / middle, last[0]["predicted_s"]


SYSTEMS = (OURS, *TARGET)
# No run starts when less than this is left of a call's time. A run that is interrupted by the end
# of a call starts again in the next call.
SHORTEST_S = 30.0
# What ``--quick`` changes: one plan of each system is tried, it runs once, and for few steps.
QUICK = {"trials": 1, "repeats": 1, "steps": 3}


def measure(options: argparse.Namespace) -> int:
    """Measure the speedup of this package's plan over those of Megatron-core, DeepSpeed and FSDP2
    on the same machine.

    For each model, memory limit and batch, every training system tries the same number of plans:
    those of its own grid that are predicted to fit and to be fastest. The best plan of each system
    then runs several times, in turn with the others. Running out of memory counts as a result. A
    call ends after some minutes; the same call again continues, and repeats a run that was cut off.
    Needs pip install '.[baselines]'.
    """
    if options.quick:
        vars(options).update(QUICK)
    if not _leads(options, os.environ):
        return DONE
    nodes = Nodes.of(os.environ)
    if nodes.own > 0:
        take_part(nodes)
        return DONE
    try:
        return _measured(options, nodes)
    finally:
        nodes.end()


def _measured(options: argparse.Namespace, nodes: Nodes) -> int:
    systems = chosen_systems(options.systems)
    cases = [
        SpeedupCase(model=model, cap_gib=cap, batch=batch)
        for model, cap, batch in product(
            _listed(options.models), _numbers(options.cap_gib, "--cap-gib"), _batches(options)
        )
    ]
    check_node(options.device, options.gpus_per_node, options.precision, "--precision")
    study = Study.begin("measure_speedup", options)
    under_way = _UnderWay(
        options=options,
        systems=systems,
        measured={_key(row): row for row in study.earlier},
        ends_s=time.perf_counter() + options.seconds,
        nodes=nodes,
    )
    left = 0
    for case in cases:
        for row in under_way.rows(case):
            if row is None:
                left += 1
                break
            study.add(row)
    if left:
        progress(f"{left} of {len(cases)} cases are left: give the same command again")
    return study.end(report_of(cases, study.rows, systems, left), DONE)


def _leads(options: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Whether this process leads its node: under torchrun the first process of each node does.
    Plans use the nodes and GPUs that torchrun has; each run starts launchers of its own.
    """
    options.nodes = int(environment.get("GROUP_WORLD_SIZE", "1"))
    options.gpus_per_node = int(environment.get("LOCAL_WORLD_SIZE", options.gpus_per_node))
    return environment.get("LOCAL_RANK", "0") == "0"


def chosen_systems(text: str) -> list[str]:
    """The training systems that ``--systems`` names, all of which are installed."""
    names = _listed(text)
    for name in names:
        if name not in SYSTEMS:
            reject(f"--systems: {name!r} is unknown{near_matches(name, SYSTEMS)}")
    _check_installed(names)
    return names


def _check_installed(systems: Sequence[str]) -> None:
    from runtime.baselines.builds import check_installed  # noqa: PLC0415

    check_torch()
    missing = {}
    for system in systems:
        if system in ("megatron", "deepspeed", "deepcompile"):
            try:
                check_installed(TARGETS[TARGET[system]].package)
            except InputError as error:
                missing[system] = str(error)
    if missing:
        rest = ",".join(system for system in systems if system not in missing)
        problems = "; ".join(dict.fromkeys(missing.values()))
        reject(f"{problems}; or leave {', '.join(missing)} out: --systems {rest or OURS}")


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str, option: str) -> list[float]:
    try:
        return [float(word) for word in _listed(text)]
    except ValueError:
        reject(
            f"{option}: {text!r} is not a list of numbers: give numbers with commas between them"
        )


def _batches(options: argparse.Namespace) -> list[int]:
    return [checked_whole("--batches", word) for word in _listed(options.batches)]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "cap_gib", "batch", "system", "phase", "number"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    """A call under way: the measurements of this call and of earlier ones, and the call's
    deadline.
    """

    options: argparse.Namespace
    systems: Sequence[str]
    measured: Mapping[tuple[Any, ...], Row]
    ends_s: float
    nodes: Nodes

    def rows(self, case: SpeedupCase) -> Iterator[Row | None]:
        """The measured rows of a case; None if the time of the call is over."""
        options, best = self.options, dict[str, tuple[Contender, float]]()
        ours: Sequence[float] | None = None
        tried = {system: _contenders(case, system, options) for system in self.systems}
        for turn, system in product(range(options.trials), self.systems):
            if turn >= len(tried[system]):
                continue
            contender = tried[system][turn]
            row = self._row(case, system, contender, ("trial", turn), ours)
            yield row
            if row is None:
                return
            if system == OURS and TIMING in row:
                ours = ours or row["losses"]
            seconds = row.get(TIMING, {}).get("median_s")
            if seconds is not None and (system not in best or seconds < best[system][1]):
                best[system] = contender, seconds
        # The systems run in turn, so that all of them suffer equally if the machine slows down.
        for turn, system in product(range(options.repeats), best):
            row = self._row(case, system, best[system][0], ("repeat", turn), ours)
            yield row
            if row is None:
                return

    def _row(
        self,
        case: SpeedupCase,
        system: str,
        contender: Contender,
        run: tuple[str, int],
        ours: Sequence[float] | None,
    ) -> Row | None:
        """The row of one run, which is measured now unless an earlier call has measured it; None if
        the time of the call is over. Its losses are compared with those of this package (``ours``).
        """
        prediction, options = contender.prediction, self.options
        row: dict[str, Any] = {
            "model": case.model,
            "cap_gib": case.cap_gib,
            "batch": case.batch,
            "system": system,
            "phase": run[0],
            "number": run[1],
            "plan": job_to_mapping(contender.job)["plan"],
            "plan_line": plan_line(contender.job.plan),
            "predicted_s": prediction and prediction.iteration_s,
            "predicted_fits": prediction and prediction.fits,
        }
        before = self.measured.get(_key(row))
        if before is not None and before["plan"] == row["plan"]:
            return before
        left_s = self.ends_s - time.perf_counter()
        if left_s < SHORTEST_S:
            return None
        outcome = run_trial(
            system,
            contender.job,
            steps=options.steps,
            device=options.device,
            seed=options.seed,
            longest_s=left_s,
            nodes=self.nodes,
        )
        if outcome is None:
            return None
        outcome = held_against(outcome, ours, contender.job.workload.precision)
        progress(f"{case.words}: {system}, {run[0]} {run[1]}: {_outcome_words(outcome)}")
        return {**row, **outcome}


def _contenders(case: SpeedupCase, system: str, options: argparse.Namespace) -> list[Contender]:
    with as_options():
        model = model_from(case.model, Path())
        workload = workload_of(options, model=model, global_batch=case.batch)
        cluster = Cluster(
            hardware=hardware_from(options.hardware, Path()),
            nodes=options.nodes,
            gpus_per_node=options.gpus_per_node,
            memory_gib=case.cap_gib,
        )
    return contenders(system, workload, cluster, options.trials, options.seed)


def _outcome_words(outcome: Row) -> str:
    return f"{outcome[TIMING]['median_s']:.3f} s" if TIMING in outcome else str(outcome["outcome"])
