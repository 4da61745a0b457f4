"""The engine ``fsdp-te``: FSDP2 of models whose kernels are Transformer Engine's, as AutoModel's.

Products are those of other engines of FSDP. Attention is cuDNN's, which hardware files have the
rates of. Copies of tokens go to experts as in Megatron-Bridge, by DeepEP; experts' products run one
after another.
"""

from dataclasses import replace

from mistlab.engines.fsdp import FSDP
from mistlab.engines.fsdp_of_torch import MEMORY_SHARE
from mistlab.engines.megatron_core import MEGATRON_BRIDGE
from mistlab.schedule.orders import INTERLEAVED

FSDP_TE = replace(
    FSDP,
    name="fsdp-te",
    orders=(*FSDP.orders, *INTERLEAVED),
    attention_share=1.0,
    memory_share=MEMORY_SHARE,
    shares_on={
        name: (products, 1.0, moved) for name, (products, _, moved) in FSDP.shares_on.items()
    },
    expert_exchange=MEGATRON_BRIDGE.expert_exchange,
    measured_as="fsdp",
)
