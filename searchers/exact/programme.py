"""Joins stages into the fastest pipeline by dynamic programming, from the last stage to the first.

A partial pipeline (the last stages) is described by its stages, blocks and GPUs, and by the delays
that it imposes on stages added in front (``mistlab.cost.chains``). A longer delay never makes
another shorter. So a partial pipeline is pruned if another dominates it, or if no way to complete
it beats the best known pipeline.

Axes: K partial pipelines.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from mistlab.core.arrays import Floats, Rows
from mistlab.cost.memory import host_room_at
from mistlab.graph.library import graph_of
from mistlab.job.search import Problem
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from searchers.exact.candidates import Menus, Options, StagePosition
from searchers.exact.divisions import like_blocks
from searchers.exact.groups import Group, LeastWork
from searchers.exact.order_costs import chains_in_front
from searchers.exact.partials import (
    Completions,
    Partials,
    PlaceOptions,
    Taken,
    chosen_chains,
    each_of,
    in_parts,
    joined,
    rounded_down,
)
from searchers.exact.relaxed import Relaxed
from searchers.meshes import Mesh, even_layers, layer_counts, lies_well
from searchers.strategy import Ledger

# The beam width: how many partial pipelines a beam search keeps for each pair of numbers of blocks
# and GPUs in use.
BEAM = 16
# The number of fastest pipelines that a beam search returns.
FEW = 16
# When times are rounded, dominated partial pipelines are pruned as soon as there are more partial
# pipelines than this.
MOST = 1 << 17
# All pipelines of a group are listed only if there are at most this many candidates for its stages
# and, for each number of stages, partial pipelines and stages that may come in front of them.
MOST_LISTED = 1 << 14


class StageMenus(Protocol):
    """What the dynamic programme needs: the list of candidates for each stage of a group of
    pipelines.
    """

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    group: Group
    work: Mapping[Mesh, LeastWork]
    with_host: bool

    def __getitem__(self, position: StagePosition) -> Options:
        """The candidates for a stage that ``prepare`` has evaluated."""
        ...

    def prepare(self, places: Iterable[StagePosition], limit_s: float) -> None:
        """Evaluate the candidates for these stages, and prune those that no pipeline faster than
        ``limit_s`` can contain.
        """


# The stages of a pipeline, each with the index of its candidate.
Chosen = tuple[tuple[StagePosition, int], ...]


def join(menus: Menus, limit_s: float) -> tuple[float, Plan] | None:
    """The fastest pipeline of a group, with its closed-form iteration time; None if no pipeline
    takes less than ``limit_s``.
    """
    return _Join(menus=menus).fastest(limit_s)


def join_hastily(menus: Menus, limit_s: float) -> tuple[float, Plan] | None:
    """The best pipeline of a group that a beam search finds, with its closed-form iteration time.
    It is usually as fast as the pipeline that ``join`` finds, and found much sooner.
    """
    return _Join(menus=menus, beam=BEAM).fastest(limit_s)


def near_best(menus: Menus, limit_s: float) -> list[tuple[float, Plan, tuple[StagePosition, ...]]]:
    """The fastest pipelines of a beam search that differ in more than memory savings, fastest
    first: the time, plan and stages of each.
    """
    # Host memory, which stages on a node share, may rule out every partial pipeline that a beam
    # would keep. So all partial pipelines are kept until a first plan is known.
    beam = None if menus.with_host and limit_s == np.inf else BEAM
    return _Join(menus=menus, beam=beam).pipelines(limit_s, FEW)


def fastest_few(
    menus: StageMenus,
    limit_s: float,
    count: int,
    *,
    completions: Completions | None,
    relaxed: Relaxed | None = None,
    grain_s: float = 0.0,
    beam: int | None = None,
) -> list[tuple[float, Chosen]]:
    """The fastest pipelines under ``limit_s`` that differ in more than memory savings, with their
    times, fastest first. If ``grain_s`` is above zero, times are lower bounds, rounded down to its
    multiples, and far fewer partial pipelines are examined.
    """
    joined = _Join(
        menus=menus, beam=beam, completions=completions, relaxed=relaxed, grain_s=grain_s
    )
    return joined.found(limit_s, count)


def all_within(menus: Menus, limit_s: float, most: int) -> list[tuple[float, Chosen]] | None:
    """All pipelines of a group that take less than ``limit_s`` by the closed form, dominated ones
    too, with their times, fastest first; None if they are more than ``most``, or if partial
    pipelines are too many to tell.
    """
    return _Join(menus=menus).all_within(limit_s, most, menus.number_of_ways)


def plan_of(menus: StageMenus, chosen: Chosen) -> Plan:
    """The plan of a pipeline, given the candidate chosen for each stage."""
    stages = tuple(
        menus[place].stage_plan(option, place.mesh, place.layers) for place, option in chosen
    )
    return Plan(
        engine=menus.space.engine,
        micro_batches=menus.group.micro_batches,
        order=menus.group.order,
        stages=stages,
    )


def places_by_stage(menus: StageMenus, limit_s: float) -> list[list[StagePosition]]:
    """For each stage, from the last to the first, the choices of mesh, blocks and ranks that it may
    have; the candidates for all of them are evaluated.
    """
    stages = _Join(menus=menus).places_by_stage(limit_s)
    menus.prepare([place for places in stages for place in places], limit_s)
    return stages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Join:
    menus: StageMenus
    beam: int | None = None
    completions: Completions | None = None
    relaxed: Relaxed | None = None
    grain_s: float = 0.0

    def fastest(self, limit_s: float) -> tuple[float, Plan] | None:
        fastest = self.pipelines(limit_s, 1)
        return fastest[0][:2] if fastest else None

    def pipelines(
        self, limit_s: float, count: int
    ) -> list[tuple[float, Plan, tuple[StagePosition, ...]]]:
        """The fastest pipelines that differ in more than memory savings: the time, plan and stages
        of each.
        """
        return [
            (seconds, plan_of(self.menus, chosen), tuple(place for place, _ in chosen))
            for seconds, chosen in self.found(limit_s, count)
        ]

    def found(self, limit_s: float, count: int) -> list[tuple[float, Chosen]]:
        """The fastest pipelines that differ in more than memory savings: the time and chosen
        candidates of each.
        """
        known: dict[tuple[StagePosition, ...], tuple[float, Partials, int]] = {}
        partials = Partials.nothing()
        for after in range(self._stages_within(limit_s)):
            partials = self._extended(partials, after, limit_s)
            is_whole = partials.gpus == self._all[1]
            whole = partials.chosen(is_whole)
            in_order = np.argsort(whole.chains.whole, kind="stable")
            near = in_order[whole.chains.whole[in_order] < limit_s]
            for row in whole.first_with_each_places(near).tolist():
                seconds = float(whole.chains.whole[row])
                self.menus.ledger.check_time()
                if seconds >= limit_s:
                    break
                places = tuple(place for place, _ in whole.stages(row))
                known[places] = seconds, whole, row
                if len(known) > count:
                    del known[max(known, key=lambda places: known[places][0])]
                if len(known) == count:
                    limit_s = max(seconds for seconds, _, _ in known.values())
            partials = self._worth(partials.chosen(~is_whole), after + 1, limit_s)
            if not len(partials):
                break
        fastest = sorted(known.values(), key=lambda entry: entry[0])
        return [(seconds, tuple(whole.stages(row))) for seconds, whole, row in fastest]

    def all_within(
        self, limit_s: float, most: int, number_of_ways: Callable[[StagePosition], int]
    ) -> list[tuple[float, Chosen]] | None:
        """All pipelines under a limit with their times, fastest first; None if they are more than
        ``most``, or if too many candidates or partial pipelines lead to them. ``number_of_ways``
        counts the candidates for a stage, before they are evaluated.
        """
        menus, partials = self.menus, Partials.nothing()
        pipelines: list[tuple[float, Chosen]] = []
        listed: set[StagePosition] = set()
        ways = 0
        for after in range(self._stages_within(limit_s)):
            where = {taken: rows.stop - rows.start for taken, rows in partials.by_taken()}
            steps: list[tuple[Taken, StagePosition]] = []
            # Steps are counted as they come, since there may be millions, too many for a list.
            for taken, position in self._steps(where, after, limit_s):
                steps.append((taken, position))
                if position not in listed:
                    listed.add(position)
                    ways += number_of_ways(position)
                if max(ways, len(steps)) > MOST_LISTED:
                    return None
            menus.prepare(listed, limit_s)
            if sum(where[taken] * len(menus[place]) for taken, place in steps) > MOST_LISTED:
                return None
            partials = self._extended(partials, after, limit_s)
            is_whole = partials.gpus == self._all[1]
            whole = partials.chosen(is_whole & (partials.chains.whole < limit_s))
            if len(pipelines) + len(whole) > most:
                return None
            pipelines += [
                (float(seconds), tuple(whole.stages(row)))
                for row, seconds in enumerate(whole.chains.whole)
            ]
            partials = partials.chosen(~is_whole)
        return sorted(pipelines, key=lambda entry: entry[0])

    def _worth(self, partials: Partials, stages: int, limit_s: float) -> Partials:
        """The partial pipelines of ``stages`` stages that may still become the fastest pipeline."""
        least_s = self._least_s(partials, stages)
        kept = [np.empty(0, dtype=np.intp)]
        for _, here in partials.by_taken():
            self.menus.ledger.check_time()
            rows = here.start + np.flatnonzero(least_s[here] < limit_s)
            if self.beam is not None:
                rows = rows[np.argsort(least_s[rows], kind="stable")[: self.beam]]
            if len(rows):
                kept.append(partials.undominated(rows))
        return partials.chosen(np.concatenate(kept))

    def places_by_stage(self, limit_s: float) -> list[list[StagePosition]]:
        """For each stage, from the last to the first, the choices of mesh, blocks and ranks that it
        may have.
        """
        taken: Iterable[Taken] = [(0, 0)]
        stages = []
        for after in range(self._most_stages):
            # Sets are filled element by element, since thousands of GPUs allow millions of pairs of
            # a partial pipeline and a stage, too many for a list.
            places, behind = set(), set()
            for before, position in self._steps(taken, after, limit_s):
                places.add(position)
                behind.add(_with(before, position))
            stages.append(sorted(places))
            taken = behind
        return stages

    @property
    def _all(self) -> Taken:
        problem = self.menus.problem
        return problem.workload.model.layers, problem.cluster.num_gpus

    @property
    def _most_stages(self) -> int:
        layers, gpus = self._all
        smallest = min(mesh.num_gpus for mesh in self.menus.group.meshes)
        return self.menus.group.num_stages or min(layers, gpus // smallest)

    def _stages_within(self, limit_s: float) -> int:
        """The most stages that a pipeline that takes less than ``limit_s`` can have."""
        if self.relaxed is None:
            return self._most_stages
        return min(self._most_stages, self.relaxed.most_stages(limit_s))

    def _extended(self, partials: Partials, after: int, limit_s: float) -> Partials:
        """Extend every partial pipeline by one stage in front, in every possible way; prune those
        that cannot become faster than ``limit_s``.
        """
        where = dict(partials.by_taken())
        steps = sorted(self._steps(where, after, limit_s), key=lambda step: _with(*step))
        places = sorted({place for _, place in steps})
        self.menus.prepare(places, limit_s)
        options = PlaceOptions.of(self.menus, places, limit_s)
        number = {place: row for row, place in enumerate(places)}
        position = np.array([number[place] for _, place in steps], dtype=np.intp)
        first = np.array([where[taken].start for taken, _ in steps], dtype=np.intp)
        behind = np.array([where[taken].stop for taken, _ in steps], dtype=np.intp) - first
        sizes = behind * options.counts[position]
        parts: list[Partials] = []
        for steps_of_part in in_parts(sizes):
            self.menus.ledger.check_time()
            step, nth = each_of(steps_of_part, sizes[steps_of_part])
            option, row = np.divmod(nth, behind[step])
            option += options.starts[position[step]]
            part = self._in_front(options, option, partials, first[step] + row, after)
            if self.grain_s:
                part = replace(part, chains=rounded_down(part.chains, self.grain_s))
            parts.append(part.chosen(self._least_s(part, after + 1) < limit_s))
            if self.grain_s and sum(map(len, parts)) > MOST:
                parts = [self._fewer(joined(parts), after + 1, limit_s)]
        return joined(parts)

    def _fewer(self, partials: Partials, stages: int, limit_s: float) -> Partials:
        """Prune dominated partial pipelines; while too many are left, round their times more
        coarsely and prune again.
        """
        grain_s = self.grain_s
        partials = self._worth(partials.in_order(), stages, limit_s)
        while len(partials) > MOST // 2:
            grain_s *= 2
            rounded = replace(partials, chains=rounded_down(partials.chains, grain_s))
            partials = self._worth(rounded, stages, limit_s)
        return partials

    def _steps(
        self, partials: Iterable[Taken], after: int, limit_s: float
    ) -> Iterator[tuple[Taken, StagePosition]]:
        """For each pair of numbers of blocks and GPUs in use, the stages that may come in front.
        Stages are left out if they are too slow, or if the other stages could not hold the
        remaining blocks.
        """
        problem, group, work = self.menus.problem, self.menus.group, self.menus.work
        layers, gpus = self._all
        each_s = limit_s / group.micro_batches
        most = group.most_blocks(problem, work, each_s)
        blocks_within = {mesh: work[mesh].blocks_within(each_s, layers) for mesh in group.meshes}
        counts = self._counts(after, limit_s)
        like = like_blocks(graph_of(problem.workload).pattern, layers)
        for taken in partials:
            self.menus.ledger.check_time()
            for mesh in group.meshes:
                first_rank = gpus - taken[1] - mesh.num_gpus
                if not (
                    blocks_within[mesh] and counts[mesh] and self._may_be(first_rank, mesh, after)
                ):
                    continue
                left, is_first = layers - taken[0], first_rank == 0
                for count in self._layer_counts(left, after, counts[mesh], is_first=is_first):
                    fewest = max(left - most[first_rank], group.fewest_blocks)
                    if fewest <= count <= blocks_within[mesh]:
                        position = self._place(mesh, count, first_rank, after)
                        yield taken, position._replace(first_block=int(like[left - count, count]))

    def _counts(self, after: int, limit_s: float) -> Mapping[Mesh, Sequence[int]]:
        """How many blocks a stage on each mesh can have, with ``after`` stages behind it, in a
        pipeline faster than ``limit_s``.
        """
        (layers, gpus), meshes = self._all, self.menus.group.meshes
        if self.relaxed is None:
            return dict.fromkeys(meshes, range(1, layers + 1))
        by_mesh = self.relaxed.counts(after, limit_s)
        alone = [layers] if after == 0 else []
        return {mesh: alone if mesh.num_gpus == gpus else by_mesh.get(mesh, []) for mesh in meshes}

    def _may_be(self, first_rank: int, mesh: Mesh, after: int) -> bool:
        """Whether a stage on this mesh may begin at rank ``first_rank``."""
        num_stages, cluster = self.menus.group.num_stages, self.menus.problem.cluster
        if first_rank < 0 or not lies_well(first_rank, mesh.num_gpus, cluster):
            return False
        return num_stages is None or (first_rank == 0) == (after == num_stages - 1)

    def _place(self, mesh: Mesh, layers: int, first_rank: int, after: int) -> StagePosition:
        return StagePosition(
            mesh=mesh,
            layers=layers,
            in_flight=self.menus.group.held(after),
            place_in_node=self.menus.problem.cluster.like_rank(first_rank, mesh.num_gpus),
            is_first=first_rank == 0,
            is_last=after == 0,
            stage=self.menus.group.number(after),
        )

    def _layer_counts(
        self, left: int, after: int, every: Sequence[int], *, is_first: bool
    ) -> Sequence[int]:
        if self.menus.group.num_stages is None:
            if is_first:
                return [left] if left in every else []
            return every[: bisect_left(every, left)]
        if self.menus.space.layers_off_balance == 0:
            shares = even_layers(self._all[0], self.menus.group.num_stages)
            return shares[len(shares) - 1 - after :][:1]
        counts = layer_counts(self._all[0], self.menus.group.num_stages, self.menus.space)
        others = self.menus.group.num_stages - after - 1
        return [
            count for count in counts if others * counts[0] <= left - count <= others * counts[-1]
        ]

    def _in_front(
        self,
        options: "PlaceOptions",
        option: Rows,
        behind: Partials,
        row_behind: Rows,
        after: int,
    ) -> Partials:
        """Extend partial pipelines by one stage each: row k of the candidates goes in front of row
        k of the partial pipelines, which have ``after`` stages.
        """
        position = options.place[option]
        chains = chains_in_front(
            self.menus.group,
            self.menus.space.engine,
            options.times.chosen(option),
            chosen_chains(behind.chains, row_behind),
            after,
        )
        partials = Partials(
            layers=behind.layers[row_behind] + options.layers[position],
            gpus=behind.gpus[row_behind] + options.gpus[position],
            chains=chains,
            host_bytes=np.zeros(len(option)),
            places=options.places,
            place=position,
            option=options.row[option],
            behind=behind,
            row_behind=row_behind,
        )
        return self._with_host(partials, options, option) if self.menus.with_host else partials

    def _with_host(self, partials: Partials, options: "PlaceOptions", option: Rows) -> Partials:
        """The partial pipelines in which the stages on the first stage's node together fit in the
        node's host memory.
        """
        cluster, gpus = self.menus.problem.cluster, options.gpus[partials.place]
        place_in_node = np.array([place.place_in_node for place in options.places])[partials.place]
        held = options.host_bytes[option] * np.minimum(gpus, cluster.gpus_per_node)
        assert partials.behind is not None
        shares_node = (place_in_node + gpus) % cluster.gpus_per_node > 0
        held += shares_node * partials.behind.host_bytes[partials.row_behind]
        partials = replace(partials, host_bytes=held * (place_in_node % cluster.gpus_per_node > 0))
        return partials.chosen(held <= host_room_at(cluster, place_in_node))

    def _least_s(self, partials: Partials, stages: int) -> Floats:
        """For each partial pipeline, a lower bound in seconds of the pipelines that it can become:
        the slowest stage still missing has at least an even share of the remaining blocks, and at
        most half of its passes overlap with the stages behind it.
        """
        if self.completions is not None:
            return self.completions.least_s(partials, stages)
        group, work, chains = self.menus.group, self.menus.work, partials.chains
        layers, gpus = self._all[0] - partials.layers, self._all[1] - partials.gpus
        front_s = group.front_gpu_s(work, self._all[0])[layers]
        slowest_s = front_s / np.maximum(gpus, 1)
        if not group.has_formula:
            return np.maximum(chains.whole, group.micro_batches * slowest_s)
        ahead = min(group.micro_batches, self._most_stages) - 1
        around = np.minimum(chains.around_first, chains.around_last)
        behind = np.maximum(around - ahead / 2 * slowest_s, 0.0)
        ways = [
            chains.through + front_s / group.largest,
            chains.whole,
            group.micro_batches * slowest_s + behind,
        ]
        if self.relaxed is not None:
            rest_s = self.relaxed.rest_s(partials, stages)
            ways.append(np.where(gpus > 0, rest_s, 0.0))
        return np.asarray(np.maximum.reduce(ways))


def _with(taken: Taken, position: StagePosition) -> Taken:
    return taken[0] + position.layers, taken[1] + position.mesh.num_gpus
