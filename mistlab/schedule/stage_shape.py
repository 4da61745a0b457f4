"""The shape of a stage: the choices of a plan that decide which tasks the stage has."""

from dataclasses import dataclass
from typing import Self

from mistlab.engines.table import ENGINES
from mistlab.schedule.places import layer_at, ring_entries
from mistlab.schedule.plan_orders import passes_of_plan
from mistlab.schedule.receipts import NO_RECEIPTS, StageReceipts, receipts_of
from mistlab.schedule.slot_table import Phase, Task, Template
from mistlab.schedule.stage_passes import NO_PASSES, StagePasses
from mistlab.values.plan import NO_OFFLOAD, Offload, Plan

# The number of entries in the rings of a stage that the runtime executes.
RING = ring_entries(ENGINES["mistlab"].template().depth)


def shares_table(plan: Plan) -> bool:
    """Whether tied embeddings are one table: in a plan of one stage that keeps whole weights.

    If weights or gradients come and go layer by layer, embedding and head have a table each.
    """
    (first, *others) = plan.stages
    return not others and (first.data_parallel == 1 or first.zero <= 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """The choices that decide which tasks a stage has; ``zero`` is 0 for a single rank.

    Tied embeddings share one table (``shares_table``), or have a table each, which ``ties`` keeps
    alike.
    """

    template: Template
    stage: int
    num_stages: int
    micro_batches: int
    first_layer: int
    num_layers: int
    blocks: range
    zero: int
    data_parallel: int
    offload: Offload
    clips: bool
    ties: bool
    shares_table: bool
    steps_on_host: bool
    passes: StagePasses = NO_PASSES
    receipts: StageReceipts = NO_RECEIPTS

    @classmethod
    def of(
        cls,
        plan: Plan,
        stage: int,
        *,
        clips: bool = False,
        tied: bool = False,
        steps_on_host: bool = False,
    ) -> Self:
        """The shape of one of a plan's stages."""
        own, before = plan.stages[stage], sum(s.layers for s in plan.stages[:stage])
        is_first, is_last = stage == 0, stage == plan.num_stages - 1
        zero = own.zero if own.data_parallel > 1 else 0
        shares = tied and shares_table(plan)
        passes = passes_of_plan(plan)
        return cls(
            template=ENGINES[plan.engine].template(
                overlap_communication=plan.overlap_communication
            ),
            stage=stage,
            num_stages=plan.num_stages,
            micro_batches=plan.micro_batches,
            passes=passes[stage],
            receipts=receipts_of(passes, RING)[stage],
            first_layer=0 if is_first else before + 1,
            num_layers=own.layers + is_first + is_last,
            blocks=range(before + 1, before + 1 + own.layers),
            zero=zero,
            data_parallel=own.data_parallel,
            offload=own.offload,
            clips=clips,
            ties=tied and (is_first or is_last) and not shares,
            shares_table=shares,
            steps_on_host=steps_on_host,
        )

    @property
    def last_layer(self) -> int:
        """The number of the stage's last layer."""
        return self.first_layer + self.num_layers - 1

    def layer_at(self, position: int, phase: Phase) -> int:
        """The layer that a pass meets at a position."""
        return self.first_layer + layer_at(position, self.num_layers, phase)

    @property
    def has_head(self) -> bool:
        """Whether the stage computes the loss."""
        return self.stage == self.num_stages - 1

    @property
    def rooms(self) -> int:
        """The number of received micro-batches that may wait for their passes."""
        return max(RING, self.receipts.rooms)

    def offload_of(self, layer: int) -> Offload:
        """The offload ratios of a layer; those of the embedding and the head are zero."""
        return self.offload if layer in self.blocks else NO_OFFLOAD

    def borrows_table(self, layer: int) -> bool:
        """Whether a layer is a head that uses the embedding's table."""
        return self.shares_table and layer == self.last_layer

    def rings_weights(self, layer: int) -> bool:
        """Whether a layer's weights come and go, so that they are whole only in a ring."""
        return self.zero >= 3 or self.offload_of(layer).weights > 0

    def rings_gradients(self, layer: int) -> bool:
        """Whether a layer's gradients come and go."""
        return self.zero >= 2 or self.offload_of(layer).gradients > 0

    def steps_tail(self, layer: int) -> bool:
        """Whether the host steps a part of a layer's parameters."""
        return self.steps_on_host and self.offload_of(layer).optimizer > 0

    def stages_tail(self, layer: int) -> bool:
        """Whether a part of a layer's optimizer state is fetched for the step on the device."""
        return not self.steps_on_host and self.offload_of(layer).optimizer > 0

    def has(self, row: Task, layer: int) -> bool:
        """Whether a layer has the task of a row of the slot table."""
        if row.kind in ("U", "R"):
            return self.data_parallel > 1 and self.zero >= row.from_zero
        if row.direction is None:
            return True
        offload = self.offload_of(layer)
        ratios = {
            "P": offload.weights,
            "G": offload.gradients,
            "O": offload.optimizer,
            "A": offload.activations,
        }
        return ratios[row.kind] > 0
