"""The optimizer's step of one layer, one iteration after its gradients: the task S.

The host waits for nothing in a step: the divisor of gradients, and whether the step is skipped, are
tensors on the device.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mistlab.schedule.stage_program import Op
from runtime.engine.storage.state import StageState
from runtime.engine.streams.lanes import LaneWork, Streams
from runtime.engine.training import Training

GROWTH, BACKOFF = 2.0, 0.5
# So many elements are stepped at once, to limit the 32-bit copy of their gradients.
CHUNK = 2**24


class Scaling:
    """The loss scale, and the norm and overflow of the last gradients."""

    def __init__(self, training: Training, device: torch.device) -> None:
        self._training = training
        self.scale = torch.full((), training.loss_scale or 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        # The divisor of gradients in the step, and whether the step is skipped.
        self.divisor = torch.ones((), device=device)
        self.overflow = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)

    def judge(self, squares: Tensor) -> None:
        """Set divisor, overflow and loss scale from the sum of squares of all scaled gradients."""
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

    def said(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Divisor and overflow as tensors on a device, for a step on this device."""
        return self.divisor.to(device), self.overflow.to(device)


class Stepper:
    """Steps layers with the gradients of the iteration before.

    ``learning_rate`` is that iteration's. It is None before the first gradients; then a step only
    rounds the 32-bit masters to weights.
    """

    def __init__(
        self, state: StageState, training: Training, scaling: Scaling, streams: Streams
    ) -> None:
        self.state = state
        self.training = training
        self.scaling = scaling
        self.streams = streams
        self.learning_rate: float | None = None

    def step(self, op: Op) -> LaneWork:
        """The work of one layer's step, as far as the device does it."""
        learning_rate = self.learning_rate
        return lambda: self._step(op, learning_rate)

    def step_on_host(self, op: Op) -> LaneWork:
        """The work of the host's part of a step: from the exchanged gradients to weights."""
        learning_rate = self.learning_rate
        return lambda: self._step_on_host(op, learning_rate)

    def _step(self, op: Op, learning_rate: float | None) -> None:
        state, layer = self.state, op.layer
        pieces = self._pieces(op)
        if learning_rate is not None:
            own = state.layers[layer]
            gradients = state.stepped_gradients(layer, op.entry)
            self._update(pieces, gradients, own.step, learning_rate)
        if state.shape.rings_weights(layer):
            self.streams.spoil(state.whole_weights(layer, op.entry))
        begin = 0
        for master, *_ in pieces:
            state.set_stepped(layer, op.entry, begin, master)
            begin += master.numel()

    def _step_on_host(self, op: Op, learning_rate: float | None) -> None:
        own = self.state.layers[op.layer]
        master, *_ = tail = [split.tail for split in own.optimizer]
        if learning_rate is not None:
            self._update([tail], own.exchange, own.host_step, learning_rate)
        own.exchange.copy_(master)

    def _pieces(self, op: Op) -> list[list[Tensor]]:
        """Masters and moments to step on the device: the resident ones, and the staged ones."""
        splits = self.state.layers[op.layer].optimizer
        pieces = [[split.resident for split in splits]]
        if self.state.shape.stages_tail(op.layer):
            pieces.append(self.state.staging.of(op.entry, splits[0].tail.numel()))
        return [piece for piece in pieces if piece[0].numel()]

    def _update(
        self, pieces: list[list[Tensor]], gradients: Tensor, step: Tensor, learning_rate: float
    ) -> None:
        training, begin = self.training, 0
        divisor, overflow = self.scaling.said(step.device) if training.needs_norm else (None, None)
        step += 1
        for master, first, second in (chunk for piece in pieces for chunk in _chunks(piece)):
            gradient = gradients[begin : begin + master.numel()].float()
            begin += master.numel()
            torch._fused_adamw_(
                *([master], [gradient], [first], [second], [], [step]),
                lr=learning_rate,
                beta1=training.beta1,
                beta2=training.beta2,
                weight_decay=training.weight_decay,
                eps=training.epsilon,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=overflow,
            )
        if overflow is not None:
            step -= overflow


def _chunks(piece: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(whole.split(CHUNK) for whole in piece), strict=True)
