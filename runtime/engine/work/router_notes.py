"""Statistics and losses of the expert routers on a rank in one iteration, combined over all ranks.

A micro-batch's choices are recorded in its backward pass, which runs once even where a block is
recomputed. The iteration's report sums the choices over all ranks, so that each token of the batch
counts once for each expert that it chose, whatever the plan.

Axes: L blocks of the model with experts (including those in the head), E experts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mistlab.plan.workload import ModelSpec
from mistlab.stages.stage_shape import Routers
from runtime.engine.work.stage_modules import layer_of
from runtime.models.experts import CORRECTION, Experts

# A router has collapsed if at least this share of all tokens chooses one expert, and the expert
# gets at least this many times as many tokens as the mean expert.
MOST_TOKENS, TIMES_THE_MEAN = 0.9, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lopsided:
    """A block whose router sends most tokens to one expert: the block's index, and the ``share`` of
    the tokens that this expert takes.
    """

    block: int
    expert: int
    share: float

    def __str__(self) -> str:
        return (
            f"block {self.block}: {self.share:.0%} of the tokens go to expert {self.expert}, whose "
            "ranks do all the work: give workload.model.experts.router a balance_loss, a z_loss or "
            "a correction_rate, or a lower learning rate"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _WatchedBlock:
    """The router of one block, with the block's name in the model."""

    notes: "RouterNotes"
    counts: Tensor

    def share(self) -> Tensor:
        return self.notes.share_of_loss()

    def note(self, counts: Tensor, loss: Tensor) -> None:
        self.counts.add_(counts)
        self.notes.loss.add_(loss)


class RouterNotes:
    """The router statistics of one rank."""

    def __init__(
        self,
        spec: ModelSpec,
        modules: Mapping[int, nn.Module],
        share_of_loss: Callable[[], Tensor],
        device: torch.device,
    ) -> None:
        self.share_of_loss = share_of_loss
        self.experts = spec.experts
        first = next((one for one in range(spec.layers) if spec.has_experts_in(one)), 0)
        blocks = 0 if spec.experts is None else spec.layers + spec.further_tokens - first
        count = 0 if spec.experts is None else spec.experts.count
        self._first, self._layers = first, spec.layers
        self._counts = torch.zeros(blocks, count, device=device)
        self.loss = torch.zeros((), device=device)
        self._reported = torch.zeros(1 + blocks * count, device=device)
        self._own: dict[int, Experts] = {}
        for layer, module in modules.items():
            for name, experts in module.named_modules():
                if isinstance(experts, Experts):
                    number = layer_of(layer, name) - 1 - first
                    self._own[number] = experts
                    experts.watch = _WatchedBlock(notes=self, counts=self._counts[number])
                    if experts.correction is not None:
                        experts.correction = torch.zeros(count, device=device)

    def taken(self, micro_batches: int) -> Tensor:
        """This rank's statistics as one vector, which are then reset: the mean router loss over all
        replicas' micro-batches, then the number of tokens by block and expert (L E).
        """
        made = torch.cat([self.loss[None] / micro_batches, self._counts.flatten()])
        self._counts.zero_()
        self.loss.zero_()
        return made

    def learn(self, notes: Tensor, overflow: Tensor) -> None:
        """Update the biases of this rank's routers from the statistics of all ranks, unless the
        step is skipped.
        """
        assert self.experts is not None
        self._reported = notes
        if not self.experts.router.correction_rate:
            return
        whole = notes[1:].view(self._counts.shape)
        for number, experts in self._own.items():
            assert experts.correction is not None
            missing = whole[number].mean() - whole[number]
            experts.correction += (
                self.experts.router.correction_rate * missing.sign() * (1 - overflow)
            )

    @property
    def reported_loss(self) -> float | None:
        """The loss of all routers in the last iteration; None if routers have no losses."""
        follows = self.experts is not None and self.experts.router.has_losses
        return self._reported[0].item() if follows else None

    def corrections(self) -> dict[str, Tensor]:
        """The biases of this rank's routers, by name; they are equal on all ranks of a stage."""
        return {
            f"{self._name(self._first + number)}.{CORRECTION}": experts.correction
            for number, experts in self._own.items()
            if experts.correction is not None
        }

    def _name(self, block: int) -> str:
        """The name of a block in the statistics. Blocks of multi-token prediction heads are
        numbered after the model's other blocks.
        """
        further = block - self._layers
        return f"blocks.{block}" if further < 0 else f"head.further.{further}.block"

    def lopsided(self) -> tuple[Lopsided, ...]:
        """The blocks most of whose tokens chose one expert in the last iteration."""
        if self.experts is None:
            return ()
        whole = self._reported[1:].view(self._counts.shape).cpu()
        tokens = whole.sum(-1) / self.experts.active
        shares = whole / tokens.clamp(min=1)[:, None]
        most, at = shares.max(-1)
        least = max(MOST_TOKENS, TIMES_THE_MEAN * self.experts.active / self.experts.count)
        return tuple(
            Lopsided(block=self._first + number, expert=int(at[number]), share=float(share))
            for number, share in enumerate(most.tolist())
            if share >= least
        )


def routers_of(spec: ModelSpec) -> Routers:
    """For each kind of task that concerns a block's router, the function that updates or reads the
    router.
    """
    if spec.experts is None:
        return "none"
    return "corrected" if spec.experts.router.correction_rate else "noted"
