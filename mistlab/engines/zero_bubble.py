"""The engines ``zero-bubble`` and ``zero-bubble-waiting``: a fork of Megatron-LM for split passes.

Gradients of weights are computed apart from gradients of inputs, and fill the bubbles of a pipeline
(Qi et al. 2024). Each stage steps as soon as its own passes are over, and checks the norm of all
gradients afterwards. Under 1F1B and interleaved orders stages of the fork wait for their sends
(``zero-bubble-waiting``): its examples turn overlapping of sends off. All else is Megatron-LM.
"""

from dataclasses import replace

from mistlab.engines.megatron import MEGATRON
from mistlab.schedule.orders import SPLIT
from mistlab.values.context_ways import RING

# Its orders with passes for weights; DualPipeV is torch's and DeepSeek's.
_ORDERS = tuple(order for order in SPLIT if order != "dualpipe-v")

ZERO_BUBBLE = replace(
    MEGATRON,
    name="zero-bubble",
    orders=_ORDERS,
    context_exchanges=(RING,),
    steps_apart=True,
    # The paper has the seconds of sends of 10 to 28 MB over NVLink and RoCE: they lie on a line of
    # 73 GB/s that begins at 0.24 ms.
    send_wait_s=0.24e-3,
    measured_as=MEGATRON.measured_as or MEGATRON.name,
)
ZERO_BUBBLE_WAITING = replace(
    ZERO_BUBBLE,
    name="zero-bubble-waiting",
    orders=MEGATRON.orders,
    sends="blocking",
)
