"""The optimizer's step of one layer, taken apart from its gradients by an iteration: S.

Nothing here asks the host: whether a step is left out, and by what gradients are divided, are
tensors on the device.
"""

import torch
from torch import Tensor

from runtime.engine.program import Op
from runtime.engine.state import StageState
from runtime.engine.streams import Streams, Work
from runtime.engine.training import Training

GROWTH, BACKOFF = 2.0, 0.5


class Scaling:
    """The loss scale, and what the last report says of gradients."""

    def __init__(self, training: Training, device: torch.device) -> None:
        self._training = training
        self.scale = torch.full((), training.loss_scale or 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        # What gradients are divided by in the step, and whether it is left out.
        self.divisor = torch.ones((), device=device)
        self.overflow = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)

    def judge(self, squares: Tensor) -> None:
        """Take the sum of the squares of all scaled gradients."""
        training = self._training
        self.norm.copy_(squares.sqrt() / self.scale)
        self.overflow.copy_(~squares.isfinite())
        self.divisor.copy_(self.scale)
        if training.clip_norm is not None:
            # As torch.nn.utils.clip_grad_norm_ has it.
            self.divisor.div_((training.clip_norm / (self.norm + 1e-6)).clamp(max=1.0))
        if training.loss_scale is not None:
            torch._amp_update_scale_(
                *(self.scale, self.good_steps, self.overflow),
                *(GROWTH, BACKOFF, training.growth_interval),
            )


class Stepper:
    """Steps layers with the gradients of the iteration before.

    ``learning_rate`` is that iteration's; None where there are no gradients yet, and a step only
    makes the weights from their 32-bit masters.
    """

    def __init__(
        self, state: StageState, training: Training, scaling: Scaling, streams: Streams
    ) -> None:
        self.state = state
        self.training = training
        self.scaling = scaling
        self.streams = streams
        self.learning_rate: float | None = None

    def step(self, op: Op) -> Work:
        """The work of one layer's step."""
        learning_rate = self.learning_rate
        return lambda: self._step(op, learning_rate)

    def _step(self, op: Op, learning_rate: float | None) -> None:
        state, layer = self.state, op.layer
        pieces = self._pieces(op)
        if learning_rate is not None:
            gradients = state.stepped_gradients(layer, op.entry)
            self._update(op, pieces, gradients, learning_rate)
        if state.shape.rings_weights(layer):
            self.streams.spoil(state.whole_weights(layer, op.entry))
        begin = 0
        weights = state.stepped_weights(layer, op.entry)
        for master, *_ in pieces:
            weights[begin : begin + master.numel()].copy_(master)
            begin += master.numel()
        if state.shape.rings_weights(layer) and not state.shape.offload_of(layer).weights:
            state.layers[layer].weights.resident.copy_(weights)

    def _pieces(self, op: Op) -> list[list[Tensor]]:
        """Masters and moments: those on the device, and those that are staged there."""
        splits = self.state.layers[op.layer].optimizer
        staged = self.state.optimizer_slots[op.entry]
        tail = splits[0].tail.numel()
        pieces = [[split.resident for split in splits], [slot[:tail] for slot in staged]]
        return [piece for piece in pieces if piece[0].numel()]

    def _update(
        self, op: Op, pieces: list[list[Tensor]], gradients: Tensor, learning_rate: float
    ) -> None:
        training, step = self.training, self.state.layers[op.layer].step
        scaling = self.scaling if training.needs_norm else None
        step += 1
        begin = 0
        for master, *moments in pieces:
            gradient = gradients[begin : begin + master.numel()].float()
            begin += master.numel()
            torch._fused_adamw_(
                *([master], [gradient], [moments[0]], [moments[1]], [], [step]),
                lr=learning_rate,
                beta1=training.beta1,
                beta2=training.beta2,
                weight_decay=training.weight_decay,
                eps=training.epsilon,
                amsgrad=False,
                maximize=False,
                grad_scale=scaling.divisor if scaling else None,
                found_inf=scaling.overflow if scaling else None,
            )
        if scaling:
            step -= scaling.overflow
