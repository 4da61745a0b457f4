"""The named search spaces: the one of the published evaluation of Mist, those of users of other
systems, and those of current engines.
"""

from collections.abc import Mapping
from dataclasses import replace

from mistlab.core.values import near_matches, reject
from mistlab.engines.engine import ENGINES
from mistlab.plan.space import OffloadRatios, SearchSpace
from mistlab.schedule.orders import DEFAULT_ORDER, INTERLEAVED, ORDERS

_POWERS = tuple(2**i for i in range(14))
_EIGHTHS = tuple(i / 8 for i in range(9))

# The search space of Mist (EuroSys 2025), extended feature by feature. Degrees and micro-batch
# sizes are powers of two, and so is the number of micro-batches if the global batch is a power of
# two. In "+zero" and all later spaces, each stage has its own choices.
_3D = SearchSpace(
    name="3d",
    data_parallel=_POWERS,
    tensor_parallel=_POWERS,
    micro_batch=(1, 2, 4),
    zero=(1,),
)
_ZERO = replace(_3D, name="+zero", zero=(1, 2, 3), unequal_stages=True)
_CHECKPOINTING = replace(_ZERO, name="+checkpointing", recomputation="any")
_OFFLOAD = replace(
    _CHECKPOINTING,
    name="+offload",
    offload=OffloadRatios(
        weights=_EIGHTHS, gradients=_EIGHTHS, optimizer=_EIGHTHS, activations=_EIGHTHS
    ),
)
_MIST = replace(_OFFLOAD, name="mist", layers_off_balance=2)
_WIDE = replace(
    _MIST,
    name="wide",
    data_parallel=None,
    tensor_parallel=None,
    tensor_parallel_in_node=False,
    micro_batch=None,
    zero=(0, 1, 2, 3),
    layers_off_balance=None,
    unequal_meshes=True,
)
# What users of other systems can choose, on the engine closest to each system. A space without
# suffix is that of a user who tunes; the suffix ":published" is for baselines of Mist's evaluation,
# which recompute every block and shard the optimizer states.
_MEGATRON = SearchSpace(
    name="megatron",
    engine="megatron",
    tensor_parallel=_POWERS,
    micro_batch=(1, 2, 4, 8, 16),
    zero=(0, 1),
)
# The "megatron" space with the features that Megatron-LM has gained since: sequence and context
# parallelism, recomputation of attention's core, interleaved stages.
_MEGATRON_TODAY = replace(
    _MEGATRON,
    name="megatron-today",
    context_parallel=(1, 2, 4, 8, 16),
    sequence_parallel=(0, 1),
    orders=(DEFAULT_ORDER, *INTERLEAVED),
    recomputation="any",
    core_recomputed_layers=None,
)
# The plans that any Megatron-core launch line can express: with one pipeline schedule, so that a
# search can prove its best plan. Degrees of context parallelism are at most two, since more were
# hardly measured at usual sequence lengths.
_MEGATRON_CORE = replace(
    _MEGATRON_TODAY,
    name="megatron-core",
    engine="megatron-core",
    context_parallel=(1, 2),
    orders=(DEFAULT_ORDER,),
    core_recomputed_layers=(0,),
)
# The search space of pipelines whose weight-gradient passes fill bubbles, as in the zero-bubble
# fork of Megatron-LM.
_ZERO_BUBBLE = replace(
    _MEGATRON,
    name="zero-bubble",
    engine="zero-bubble",
    orders=(DEFAULT_ORDER, *ENGINES["zero-bubble"].orders),
    recomputation="any",
)
_DEEPSPEED = replace(
    _MEGATRON, name="deepspeed", engine="deepspeed", tensor_parallel=(1,), zero=(0, 1, 2, 3)
)
_AS_PUBLISHED = tuple(
    replace(tuned, name=f"{tuned.name}:published", recomputation="all", zero=(1,))
    for tuned in (_MEGATRON, _DEEPSPEED)
)
_ACESO = SearchSpace(
    name="aceso",
    engine="aceso",
    data_parallel=_POWERS,
    tensor_parallel=_POWERS,
    recomputation="any",
    unequal_stages=True,
    layers_off_balance=None,
    unequal_meshes=True,
)
_ALPA = replace(_ACESO, name="alpa", engine="megatron", recomputation="none_or_all")
# Search spaces for current training: Megatron with experts, whose pipelines may give the last stage
# fewer blocks; torch with sharded weights; and this package's own engine with every choice.
_MOE = SearchSpace(
    name="moe",
    engine="megatron-core",
    data_parallel=_POWERS,
    tensor_parallel=_POWERS[:4],
    micro_batch=(1, 2, 4, 8),
    sequence_parallel=(0, 1),
    expert_parallel=_POWERS[:7],
    zero=(1,),
    layers_off_balance=2,
)
_FSDP = SearchSpace(
    name="fsdp",
    engine="fsdp",
    tensor_parallel=_POWERS[:4],
    pipeline=(1,),
    micro_batch=_POWERS[:6],
    sequence_parallel=(0, 1),
    expert_parallel=_POWERS[:7],
    state_replicas=_POWERS,
    zero=(2, 3),
    offload=OffloadRatios(activations=(0.0, 1.0)),
)
# The plans that recipes of Hugging Face's programs for fine-tuning can express: replicas, each with
# all states, or sharded by FSDP2.
_TRAINER = replace(
    _FSDP,
    name="trainer",
    engine="trainer",
    tensor_parallel=(1,),
    sequence_parallel=(0,),
    expert_parallel=(1,),
    state_replicas=(1,),
    zero=(0, 2, 3),
)
# The search space of plans on one GPU or on data-parallel GPUs, whose blocks use lean operators
# (Tempo, NeurIPS 2022) or are recomputed.
_TEMPO = SearchSpace(
    name="tempo",
    data_parallel=_POWERS,
    tensor_parallel=(1,),
    pipeline=(1,),
    zero=(0, 1),
    recomputation="any",
    lean_layers=None,
)
_EVERYTHING = replace(
    _WIDE,
    name="everything",
    sequence_parallel=(0, 1),
    expert_parallel=_POWERS[:7],
    state_replicas=_POWERS,
)
# The plans of space "everything" under any pipeline schedule (order of forward and backward
# passes).
_IN_ANY_ORDER = replace(_EVERYTHING, name="everything:orders", orders=tuple(ORDERS))

SPACES: Mapping[str, SearchSpace] = {
    **{space.name: space for space in (_3D, _ZERO, _CHECKPOINTING, _OFFLOAD, _MIST, _WIDE)},
    "+imbalance": _MIST,
    **{
        space.name: space
        for space in (
            *(_MEGATRON, _MEGATRON_TODAY, _MEGATRON_CORE, _ZERO_BUBBLE, _DEEPSPEED),
            *(*_AS_PUBLISHED, _ACESO, _ALPA),
            *(_MOE, _FSDP, _TRAINER, _TEMPO, _EVERYTHING, _IN_ANY_ORDER),
        )
    },
}


# The search space for users of each framework, by the framework's usual name.
SPACE_OF_FRAMEWORK = {
    **dict.fromkeys(("torchtitan", "fsdp2", "accelerate"), "fsdp"),
    **dict.fromkeys(("axolotl", "trl", "llama-factory", "llamafactory"), "trainer"),
    **dict.fromkeys(("megatron-lm", "megatron-bridge", "nemo"), "megatron-core"),
    **dict.fromkeys(
        ("zero", "zero1", "zero2", "zero3", "zero-1", "zero-2", "zero-3", "zero-offload"),
        "deepspeed",
    ),
}


def space_of(name: str) -> SearchSpace:
    """The search space with this name; refuses an unknown name.

    >>> space_of("mist").layers_off_balance
    2
    """
    if framework_space := SPACE_OF_FRAMEWORK.get(name.lower()):
        reject(f"space {name!r} is unknown: give {framework_space}, the space of plans for {name}")
    if name not in SPACES and name in ENGINES:
        reject(f"space {name!r} is unknown: it is an engine: give --engine {name}, in any space")
    if name not in SPACES:
        reject(f"space {name!r} is unknown{near_matches(name, SPACES)}")
    return SPACES[name]
