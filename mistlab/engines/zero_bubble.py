"""The engine ``zero-bubble``: the fork of Megatron-LM that divides backward passes in two.

Gradients of weights are computed apart from gradients of inputs, and fill the bubbles of a
pipeline (Qi et al. 2024). All else is Megatron-LM.
"""

from dataclasses import replace

from mistlab.engines.megatron import MEGATRON

ZERO_BUBBLE = replace(
    MEGATRON,
    name="zero-bubble",
    orders=(*MEGATRON.orders, "zb-h1"),
    measured_as=MEGATRON.measured_as or MEGATRON.name,
)
