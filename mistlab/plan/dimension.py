"""The type of a row in the table of dimensions: a dimension is one choice that a plan makes for
each stage, such as its ZeRO level. A row has the choice's allowed values, its wording in texts, its
checks and its effects on costs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mistlab.core.values import Metadata, bounded, ratio
from mistlab.engines.engine import Engine
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.schedule.context_ways import GATHER, HEADS, RING

# The groups of choices that a plan makes for a stage. "layers": how many blocks the stage has, and
# how many of them are recomputed or run in another way; "mesh": its parallel degrees and
# micro-batch size; "savings": its ways to save memory.
Part = Literal["layers", "mesh", "savings"]
# The steps in which a stage of a plan is checked against its job (workload, cluster and plan); each
# step reports at most one problem.
Step = Literal["batch", "tensors", "experts", "states", "tokens"]
# A function from a dimension's values, such as the share of weights that is offloaded, to a factor
# on seconds or on bytes.
Factor = Callable[[Any], Any]


class Setting(NamedTuple):
    """What one choice for a stage is checked against: the stage's other choices, its number of
    GPUs, the workload and the number of micro-batches.
    """

    degree: Callable[[str], int]
    value: Callable[[str], float]
    gpus: int
    gpus_per_node: int
    workload: Workload
    micro_batches: int


# A function that returns what is wrong with a stage's value of a dimension, given the stage's other
# choices and its job; empty if the value is valid.
Check = Callable[[Setting], str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineLimit:
    """Which values of a dimension (such as the ZeRO level) an engine supports, and the text with
    which other values are refused.

    ``runs`` returns the values that an engine supports, with or without a pipeline of several
    stages; None stands for all. ``why`` is the reason why it does not support others, to follow the
    engine's name in a message; ``remedy`` replaces the list of supported values there. If values
    are levels (``is_level``), it is enough that a search space has a level that is low enough;
    otherwise the engine must support each value of the space.
    """

    runs: Callable[[Engine, bool], tuple[float, ...] | None]
    why: Callable[[Engine, bool], str]
    remedy: str = ""
    is_level: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dimension:
    """A dimension: one choice that a plan makes for each stage, such as its ZeRO level. Its key in
    ``DIMENSIONS`` is the name of its column in tables of candidates.

    Values: ``path`` is where a stage of a plan file has the value, if that is not the name. A stage
    without a value gets the ``default``; without a default, every stage must have a value. With
    ``is_ratio`` a value is a share, otherwise a whole number. Search spaces list the values if
    ``is_listed``; otherwise another field of the space determines them. This package's runtime
    trains with other values than the default if ``is_trained``, or if the dimension counts blocks.

    Costs: ``symbol`` stands for the value in expressions, and with ``is_size`` also in layer
    graphs. If it ``chooses_graph``, layers of a stage with the value 1 have other graphs. The value
    is the degree along the mesh's ``axes`` (``mistlab.plan.dimensions``). A choice ``shared_by``
    the ranks of a group has no effect if the group has one rank; if blocks have experts, whose
    states other ranks share, the group ``experts_shared_by`` must have one rank, too. ``of_tasks``
    has factors by kind of task, on the bytes that a task moves (U, R, P, G, O, A) or on its time
    (F, B, S). ``of_states`` has factors on the bytes of weights, gradients or optimizer states
    (fields of ``mistlab.engines.engine.EngineMemory``).

    Texts: ``amount`` and ``noun`` put a value into words ("ZeRO-2", or "3" and "blocks
    recomputed"), unless each value has its ``words``. ``brief`` replaces them in a plan's one-line
    summary. With ``is_told`` even the default is mentioned. ``label`` is a short name in searchers'
    choices.

    Limits: ``checks`` say, by step of checking, why a stage cannot have the value. Searches only
    try values that ``is_tried`` accepts. Coarse searches divide ratios into ``coarse_parts``. Where
    a proof splits sets of strategies, a step of this dimension counts ``box_weight`` times.
    ``limit`` says which values engines support.
    """

    part: Part
    path: str = ""
    symbol: str = ""
    is_size: bool = False
    chooses_graph: bool = False
    is_ratio: bool = False
    minimum: float = 0
    maximum: float | None = None
    default: float | None = None
    is_listed: bool = True
    is_trained: bool = False
    axes: tuple[str, ...] = ()
    shared_by: str = ""
    experts_shared_by: str = ""
    label: str = ""
    amount: str = "{}"
    noun: str = ""
    words: tuple[str, ...] = ()
    brief: str = ""
    is_told: bool = False
    checks: Mapping[Step, Check] = field(default_factory=dict)
    is_tried: Callable[[Setting], bool] | None = None
    coarse_parts: int = 2
    box_weight: int = 1
    limit: EngineLimit | None = None
    of_tasks: Mapping[str, Factor] = field(default_factory=dict)
    of_states: Mapping[str, Factor] = field(default_factory=dict)

    @property
    def holder(self) -> str:
        """The field of a stage that groups this dimension with others, such as ``offload`` for all
        offload ratios; empty if there is none.
        """
        return self.path.rpartition(".")[0]

    @property
    def changes_passes(self) -> bool:
        """Whether the dimension affects how long forward and backward passes take."""
        return not self.of_tasks.keys().isdisjoint("FB")

    @property
    def numbers(self) -> Metadata:
        """The range of the dimension's values, in the form that the metadata of a dataclass field
        has.
        """
        return ratio() if self.is_ratio else bounded(minimum=self.minimum, maximum=self.maximum)

    def number(self, value: float) -> float:
        """A value from a NumPy column, as a Python float or int."""
        return float(value) if self.is_ratio else int(value)


# The checks of dimensions: each returns what is wrong with a stage's value of a dimension, and what
# to give instead.
#
# The text follows the dimension's name in a message; it is empty if there is no problem.


def batch_problem(setting: Setting) -> str:
    """A text that says that data-parallel ranks x micro-batch size x micro-batches is not the
    global batch; empty if it is.
    """
    batch, size = setting.workload.global_batch, setting.degree("micro_batch")
    replicas = setting.degree("data_parallel")
    others = replicas * setting.micro_batches
    if size * others == batch:
        return ""
    remedy = (
        f"give {batch // others}"
        if batch % others == 0
        else f"give data_parallel and micro_batches whose product divides {batch}"
    )
    return (
        f"{size} x data_parallel {replicas} x micro_batches {setting.micro_batches} = "
        f"{size * others}, but global_batch is {batch}: {remedy}"
    )


def tensor_problem(setting: Setting) -> str:
    """A text that says why tensor-parallel ranks cannot split the model evenly; empty if they
    can.
    """
    return degree_problem(setting.workload.model, setting.degree("tensor_parallel"))


def degree_problem(model: ModelSpec, degree: int) -> str:
    """A text that says why ``degree`` tensor-parallel ranks cannot split a model evenly; empty if
    they can.
    """
    if model.tensor_parallel_degrees is not None:
        if degree in model.tensor_parallel_degrees:
            return ""
        can = ", ".join(map(str, model.tensor_parallel_degrees))
        return f"{degree}, but the traced model's code supports only {can}: give one of these"
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "ffn": model.ffn}
    for name, size in sizes.items():
        if size % degree:
            return f"{degree} does not divide {name} {size}: give a divisor of {size}"
    return ""


def tokens_of_experts_problem(setting: Setting) -> str:
    """A text that says that tensor-parallel ranks cannot split a sequence's tokens evenly, as
    blocks with experts need; empty if they can.
    """
    tokens, tensor = setting.workload.sequence_length, setting.degree("tensor_parallel")
    if setting.workload.model.experts is None or tokens % tensor == 0:
        return ""
    return (
        f"{tensor} does not divide sequence_length {tokens}, as blocks with experts need: give a "
        f"divisor of {tokens}"
    )


def experts_problem(setting: Setting) -> str:
    """A text that says why a stage cannot divide its experts evenly among its expert-parallel
    ranks; empty if it can.
    """
    experts, ranks = setting.workload.model.experts, setting.degree("expert_parallel")
    if experts is None:
        return _without_experts(ranks)
    if experts.count % ranks:
        return f"{ranks} does not divide experts {experts.count}: give a divisor of {experts.count}"
    parts = setting.degree("expert_tensor_parallel")
    # Where ranks cannot split the width of experts, ``expert_widths_problem`` reports it.
    if experts.ffn % parts == 0 and setting.gpus % (ranks * parts):
        return (
            f"{ranks} x expert_tensor_parallel {parts} does not divide the stage's {setting.gpus} "
            "GPUs: give degrees whose product does"
        )
    if setting.workload.reduces_plainly:
        return ""
    how = setting.workload.reduction
    gpus = setting.gpus // how.replicas_of(setting.degree("data_parallel"))
    if gpus % (ranks * parts):
        return (
            f"{ranks} x expert_tensor_parallel {parts} does not divide the {gpus} "
            f"GPU{'s' if gpus > 1 else ''} of a replica, which workload.reduction {how.kind} "
            "makes: give degrees whose product does"
        )
    return ""


def expert_widths_problem(setting: Setting) -> str:
    """A text that says why a stage's ranks cannot split the width of each expert evenly; empty if
    they can.
    """
    experts, parts = setting.workload.model.experts, setting.degree("expert_tensor_parallel")
    if experts is None:
        return _without_experts(parts)
    if experts.ffn % parts:
        return (
            f"{parts} does not divide experts' ffn {experts.ffn}: give a divisor of {experts.ffn}"
        )
    return ""


def _without_experts(degree: int) -> str:
    if degree == 1:
        return ""
    return f"{degree}, but the model has no experts: give 1, or a model with experts"


def averaging_problem(setting: Setting) -> str:
    """A text that says why a stage's data-parallel ranks cannot average gradients or weights as the
    workload's ``reduction`` asks; empty if they can.
    """
    if setting.workload.reduces_plainly:
        return ""
    ranks = setting.degree("data_parallel")
    if problem := setting.workload.reduction.ranks_problem(ranks):
        return f"{ranks}, but workload.reduction does not go with it: {problem}"
    return ""


def axis_order_problem(setting: Setting) -> str:
    """A text that says why tensor-parallel ranks must be adjacent, if ``axis_order`` separates
    them; empty if there is no problem.
    """
    order = setting.degree("axis_order")
    if not order:
        return ""
    if setting.workload.model.experts is not None:
        return f"{order}, but models with experts need adjacent tensor-parallel ranks: give 0"
    if setting.degree("state_replicas") > 1 or setting.workload.averages_weights:
        return f"{order}, but replicas of states need adjacent tensor-parallel ranks: give 0"
    return ""


def level_problem(setting: Setting) -> str:
    """A text that says why the stage's ZeRO level is incompatible with the workload's gradient
    reduction; empty if it is compatible.
    """
    if setting.workload.reduces_plainly:
        return ""
    return setting.workload.reduction.sharding_problem(setting.degree("zero"))


def weights_stay(setting: Setting) -> str:
    """A text that says why weights cannot be offloaded, if the workload's gradient reduction needs
    them on the GPU; empty if they can.
    """
    return _stays(setting, "offload_weights")


def gradients_stay(setting: Setting) -> str:
    """A text that says why gradients cannot be offloaded, if the workload's gradient reduction
    needs them on the GPU; empty if they can.
    """
    return _stays(setting, "offload_gradients")


def optimizer_stays(setting: Setting) -> str:
    """A text that says why optimizer states cannot be offloaded, if the workload's gradient
    reduction needs them on the GPU; empty if they can.
    """
    return _stays(setting, "offload_optimizer")


def _stays(setting: Setting, name: str) -> str:
    how, share = setting.workload.reduction, setting.value(name)
    if not share or setting.workload.reduces_plainly:
        return ""
    return f"{share:g}, but workload.reduction {how.kind} needs all of it on the GPU: give 0"


def replicas_problem(setting: Setting) -> str:
    """A text that says why a stage's ranks cannot hold ``state_replicas`` copies of the sharded
    states (HSDP replicas); empty if they can.
    """
    replicas, data = setting.degree("state_replicas"), setting.degree("data_parallel")
    how = setting.workload.reduction
    if replicas > 1 and not setting.workload.reduces_plainly:
        return f"{replicas}, but workload.reduction {how.kind} makes replicas itself: leave it out"
    if data % replicas:
        return f"{replicas} does not divide data_parallel {data}: give a divisor of {data}"
    gpus = setting.gpus // replicas
    ranks = setting.degree("expert_parallel") * setting.degree("expert_tensor_parallel")
    if replicas > 1 and gpus % ranks:
        return (
            f"{replicas} leaves {gpus} GPUs to a replica, which expert_parallel x "
            f"expert_tensor_parallel {ranks} does not divide: give fewer replicas"
        )
    return ""


def replicas_are_nodes(setting: Setting) -> bool:
    """Whether a stage has a single copy of the sharded states (weights, gradients, optimizer
    states), or one copy in each node that it fills.
    """
    replicas = setting.degree("state_replicas")
    return replicas == 1 or setting.gpus == replicas * setting.gpus_per_node


def context_problem(setting: Setting) -> str:
    """A text that says why context-parallel ranks cannot cut each sequence into two equal parts for
    each rank; empty if they can.
    """
    tokens, ranks = setting.workload.sequence_length, setting.degree("context_parallel")
    if setting.workload.model.family == "custom" and ranks > 1:
        return _traced_without(ranks, 1)
    if ranks > 1 and tokens % (2 * ranks):
        return (
            f"{ranks} ranks need a sequence in {2 * ranks} equal parts, but {2 * ranks} does not "
            f"divide sequence_length {tokens}: give a degree of which twice divides {tokens}"
        )
    return ""


def exchange_problem(setting: Setting) -> str:
    """A text that says why context-parallel ranks cannot exchange parts of the sequence for
    attention heads (all-to-all); empty if they can.
    """
    if setting.degree("context_exchange") != HEADS:
        return ""
    model = setting.workload.model
    ranks = setting.degree("tensor_parallel") * setting.degree("context_parallel")
    for name, count in (("heads", model.heads), ("kv_heads", model.kv_heads)):
        if count % ranks:
            return (
                f"{HEADS}, but tensor_parallel x context_parallel {ranks} does not divide {name} "
                f"{count}: give {RING} (ring) or {GATHER} (gather)"
            )
    return ""


def sequence_problem(setting: Setting) -> str:
    """A text that says why tensor-parallel ranks cannot split a sequence's tokens evenly; empty if
    they can.
    """
    tensor = setting.degree("tensor_parallel")
    if not setting.degree("sequence_parallel") or tensor == 1:
        return ""
    if setting.workload.model.family == "custom":
        return _traced_without(1, 0)
    tokens = setting.workload.sequence_length // setting.degree("context_parallel")
    if tokens % tensor:
        return (
            f"1, but tensor_parallel {tensor} does not divide the {tokens} tokens of a rank: give "
            "0, or a tensor_parallel that divides them"
        )
    return ""


def _traced_without(value: int, default: int) -> str:
    return f"{value}, but traced models do not support it: give {default}, or a catalogue model"
