"""Imports launch lines of Megatron-LM and its forks as jobs, with remarks."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from mistlab.core.values import InputError, reject
from mistlab.engines.engine import Precision
from mistlab.export.found import Found
from mistlab.export.given import Given, Imported, MissingError, Remark
from mistlab.export.megatron.launched_ranks import (
    is_decoder,
    read_ranks,
    refusal_of,
    trains_bert,
    with_hints,
)
from mistlab.export.megatron.megatron_deepspeed import ENGINES as ENGINES_OF_DEEPSPEED
from mistlab.export.megatron.megatron_deepspeed import (
    Files,
    is_by_deepspeed,
    read_deepspeed,
    read_ulysses,
)
from mistlab.export.megatron.megatron_flags import (
    IDLE,
    KNOWN,
    REFUSED,
    UNSAID,
    Option,
    Options,
    is_of_deepspeed,
    is_of_epfl,
)
from mistlab.export.megatron.megatron_model import model_of, with_key_heads
from mistlab.export.megatron.megatron_plan import (
    read_activations,
    read_experts,
    read_optimizer,
    read_precision,
    read_stages,
    read_states,
)
from mistlab.export.megatron.option_tables import TELLING
from mistlab.export.target import is_of_today
from mistlab.plan.workload import Attention, ModelSpec
from mistlab.schedule.context_ways import GATHER, HEADS, RING
from mistlab.shell.launch import Launch, launch_of
from mistlab.shell.session import LaunchFile
from mistlab.shell.shell_text import Word

# An unknown option counts as misspelt if its edit distance to a known option is at most the first
# number and its length at least the second.
_FARTHEST, _SHORTEST = 2, 10
# Matches names of unknown options that probably affect cost.
_COSTLY = re.compile(
    r"parallel|expert|moe|layer|head|hidden|zero|offload|swap|recompute|checkpoint-act|shard|seq"
    r"|batch|precision|quant|fp8|lora|freeze|stage|pipeline|chunk|attention|attn|window|vocab|mamba"
)
_ONE_UNKNOWN = "is an unknown option"
# A remark on options without effect names this many of them.
_FEW_NAMED = 5
_CALM = "without effect on a step's predicted time or memory"


@dataclass(slots=True, kw_only=True)
class OptionRemarks:
    """Remarks on a launch line's options: ``first`` on those that may hide a cost, ``said`` on
    those that plans cannot express, ``unknown`` on unknown names, and ``count`` on the number of
    all others.
    """

    first: list[Remark] = field(default_factory=list)
    said: list[Remark] = field(default_factory=list)
    unknown: list[Remark] = field(default_factory=list)
    count: list[Remark] = field(default_factory=list)

    @classmethod
    def of(cls, options: Options) -> "OptionRemarks":
        """Make the remarks that depend only on which options are present, not on their values."""
        return cls(
            first=[_of_stray(word) for word in options.strays],
            said=[*_of_spellings(options), *_unsaid(options), *_repeated(options)],
            unknown=[*_unknown(options)],
            count=[*_count(options)],
        )

    def around(self, remarks: Sequence[Remark]) -> tuple[Remark, ...]:
        """Return all remarks in the order shown; ``remarks``, made while values were read, come
        after ``first``.
        """
        return (*self.first, *remarks, *self.said, *self.unknown, *self.count)


def check_refused(options: Options) -> None:
    """Refuse options that change the model or the task of a launch line."""
    for name, reason in REFUSED.items():
        option = options.given.get(name)
        if option is None or (option.words and option.words[0].lower() in IDLE):
            continue
        values = f" {' '.join(option.words)}:" if option.words else ""
        message = f"{options.where(name)}:{values} {reason}"
        raise InputError(message if ": " in reason else f"{message}: import a line without it")


def _of_stray(word: Word) -> Remark:
    assert word.unknown is not None
    unknown = word.unknown
    line = f"line {unknown.line}: " if unknown.line else ""
    text = f"{line}{unknown.reason}: taken as empty; {unknown.remedy}"
    return Remark(kind="assumed", choice=word.text, text=text)


def _of_spellings(options: Options) -> Iterator[Remark]:
    for short, name in options.shortened.items():
        if name in TELLING:
            text = f"read as {name}, the option that begins with it"
            yield Remark(kind="assumed", choice=short, text=text)


def _unsaid(options: Options) -> Iterator[Remark]:
    for name, instead in UNSAID.items():
        option = options.given.get(name)
        if option is not None and not _is_off(option):
            option_text = " ".join((name, *option.words))
            yield Remark(kind="ignored", choice=option_text, text=f"{instead}{_line_of(option)}")


def _is_off(option: Option) -> bool:
    return bool(option.words) and option.words[0].lower() in ("false", "none", "null", "0")


def _line_of(option: Option) -> str:
    return f" (line {option.line})" if option.line else ""


def _repeated(options: Options) -> Iterator[Remark]:
    for name, before in options.repeated.items():
        last = " ".join(options.words[name]) or "on"
        if any(value != last for value in before) and name in TELLING:
            values = ", ".join((*before, last))
            text = f"is given several times, as {values}: the last value, {last}, is used"
            yield Remark(kind="contradicting", choice=name, text=text)


def _unknown(options: Options) -> Iterator[Remark]:
    """Make remarks on unknown options: on each of the first misspelt names, one on names that
    suggest an effect on cost, and one on all others.
    """
    costly: list[str] = []
    others: list[str] = []
    misspelt = 0
    for name in options.unknown:
        option_text = " ".join((name, *options.words[name]))
        near = nearest_name(name) if misspelt < _FEW_NAMED else None
        if near is not None:
            misspelt += 1
            text = f"is unknown: did you mean {near!r}?{_line_of(options.given[name])}"
            yield Remark(kind="ignored", choice=option_text, text=text)
        else:
            (costly if _COSTLY.search(name) else others).append(option_text)
    if costly:
        text = "unknown, though the name suggests an effect on time or memory: left out"
        yield Remark(kind="ignored", choice=" ".join(costly), text=text)
    if others:
        several = "are unknown options" if len(others) > 1 else _ONE_UNKNOWN
        text = f"{several}: the prediction assumes no effect on time or memory"
        yield Remark(kind="ignored", choice=" ".join(others), text=text)


def _count(options: Options) -> Iterator[Remark]:
    if number := len(options.harmless):
        names = " ".join([*options.harmless][:_FEW_NAMED]) + " ..." * (number > _FEW_NAMED)
        text = f"{number} option{'s' * (number > 1)} {_CALM}: {names}"
        yield Remark(kind="noted", choice="options", text=text)


def nearest_name(name: str) -> str | None:
    """Return the known option whose name is nearest to a misspelt one, or None if none is near.

    >>> nearest_name("--micro-bath-size")
    '--micro-batch-size'
    >>> nearest_name("--llm-ep") is None
    True
    """
    if len(name) < _SHORTEST:
        return None
    near = [
        (distance, known)
        for known in KNOWN
        if abs(len(known) - len(name)) <= _FARTHEST
        and (distance := _distance(name, known)) <= _FARTHEST
    ]
    return min(near)[1] if near else None


def _distance(name: str, other: str) -> int:
    """Return the edit distance of two names: how many letters to add, drop or change."""
    row = list(range(len(other) + 1))
    for index, letter in enumerate(name, 1):
        before, row[0] = row[0], index
        for column, target in enumerate(other, 1):
            change = before + (letter != target)
            before = row[column]
            row[column] = min(change, row[column] + 1, row[column - 1] + 1)
    return row[-1]


# Imports launch lines of Megatron-LM and its forks.
#
# ``read`` takes the text of a launch line or a script, ``read_launch`` a parsed command, and
# ``read_options`` only options, as other files of Megatron-LM hold them.


# The engines that can predict a launch line: Megatron-LM's, and this package's, which can run every
# plan.
ENGINES = ("megatron", "mistlab")
# The engines that predict current models and machines, tried before the others.
ENGINES_OF_TODAY = ("megatron-core", "megatron-fsdp")
# Matches the comment in an exported launch line that names the engine of its plan.
_ENGINE = re.compile(r"^# predicted under engine ([\w-]+)$", re.MULTILINE)
# Matches notes on assumed addresses, ranks and accounts, which do not affect cost.
_IDLE_NOTE = re.compile(
    r"^line \d+: (MASTER_ADDR|MASTER_PORT|NODE_RANK|RANK|LOCAL_RANK|PYTHONPATH|HOME|USER|WANDB_\w+)"
    " is taken as"
)
# The way in which context-parallel ranks exchange keys and values, for each value of
# ``--cp-comm-type``.
EXCHANGES: Mapping[str, int] = {"p2p": RING, "all_gather": GATHER, "a2a": HEADS}
# The way in which context-parallel ranks exchange keys and values, for each value of MindSpeed's
# ``--context-parallel-algo``.
_ALGORITHMS: Mapping[str, int] = {
    "megatron_cp_algo": RING,
    "kvallgather_cp_algo": GATHER,
    "ulysses_cp_algo": HEADS,
}
# Options that describe a model; every launch line of Megatron-LM or a fork has at least one of
# them.
_SHAPE = (
    *("--num-layers", "--hidden-size", "--num-attention-heads", "--hybrid-layer-pattern"),
    *("--use-checkpoint-args", "--encoder-num-layers"),
)
# Options that a launch line may lack, or have with an unknown value, if the user gives the choice
# on the left instead.
_EXCUSES: Mapping[str, tuple[str, ...]] = {
    "sequence_length": ("--seq-length", "--encoder-seq-length"),
    "global_batch": ("--global-batch-size",),
    "micro_batch": ("--micro-batch-size",),
    "attention": ("--attention-backend", "--use-flash-attn"),
    "vocab_size": ("--vocab-size", "--padded-vocab-size", "--tokenizer-type"),
}

_EXCUSED = frozenset(name for names in _EXCUSES.values() for name in names)
# How alike an unknown option and a missing one are, of 1, where the one is taken for the other.
_ALIKE = 0.75


def read(text: str, given: Given) -> Imported:
    """Import a launch line or a script as a job, with remarks on what was assumed."""
    source = LaunchFile(text=text)
    return read_launch(launch_of(source), source, given)


def read_options(
    options: Sequence[Word | str],
    given: Given,
    *,
    launch: Launch | None = None,
    source: LaunchFile | None = None,
) -> Imported:
    """Import a job from options alone, as in the YAML of Megatron-LM's tests; ``launch`` holds the
    launcher and the files that a script writes, where known.
    """
    words = tuple(word if isinstance(word, Word) else Word(text=word) for word in options)
    launch = replace(launch or Launch(), arguments=words)
    return read_launch(launch, source or LaunchFile(text=""), given)


def read_launch(launch: Launch, source: LaunchFile, given: Given) -> Imported:
    """Import a command that starts training as a job, with remarks on what was assumed."""
    try:
        return _read_launch(launch, source, given)
    except MissingError as error:
        message = f"{error}{_misspelled(error.choice, Options.of(launch.arguments, _EXCUSED))}"
        missing = MissingError(message, choice=error.choice, variable=error.variable)
        raise with_hints(missing, launch, source, given) from None
    except InputError as error:
        raise with_hints(error, launch, source, given) from None


def _misspelled(choice: str, options: Options) -> str:
    """The end of an error about a missing choice: the unknown option that may be meant to give it,
    or an empty text.
    """
    for known in _EXCUSES.get(choice, ()):
        alike = {name.replace("-", ""): name for name in options.unknown}
        near = get_close_matches(known.replace("-", ""), alike, n=1, cutoff=_ALIKE)
        if near:
            return f", or {known} in place of {alike[near[0]]}, which is unknown"
    return ""


def _read_launch(launch: Launch, source: LaunchFile, given: Given) -> Imported:
    options = Options.of(launch.arguments, _excused(given))
    draft = Found(shares_experts=not is_by_deepspeed(options))
    for note in launch.notes:
        if not _IDLE_NOTE.search(note):
            draft.remark("assumed", "script", note)
    _check_program(launch, draft)
    check_refused(options)
    _check_stage(options)
    if given.model is None:
        _check_shape(launch, options)
    draft.engine = engine_told(source.text)
    files = Files(written=launch.written, source=source, unknown=launch.unknown_in)
    read_ranks(launch, source.text, draft, given, files.text)
    _world(options, draft)
    model = _model(options, draft, given, launch.program)
    _degrees(options, draft)
    read_experts(options, draft, has_experts=model.experts is not None)
    _workload(options, draft, launch)
    read_precision(options, draft, given.hardware)
    read_activations(options, draft, model.layers)
    _engine_s_states(options, draft, files)
    read_stages(options, draft, model.layers)
    by_deepspeed = is_by_deepspeed(options)
    engines = ENGINES_OF_DEEPSPEED if by_deepspeed else engines_for(model, draft.precision)
    imported = draft.job(given if given.model is None else replace(given, model=model), engines)
    remarks = OptionRemarks.of(options).around(imported.remarks)
    return replace(imported, remarks=remarks)


def engines_for(model: ModelSpec, precision: Precision | None) -> tuple[str, ...]:
    """Return the engines that can predict a launch line of this model, the best first."""
    return (*ENGINES_OF_TODAY, *ENGINES) if is_of_today(model, precision) else ENGINES


def engine_told(text: str) -> str | None:
    """Return the engine that a comment in the file names, or None without such a comment."""
    match = _ENGINE.search(text)
    return None if match is None else match[1]


def engine_line(engine: str) -> str:
    """Write the comment that names the engine of a plan in an exported launch line."""
    return f"# predicted under engine {engine}\n"


def _excused(given: Given) -> Iterable[str]:
    for choice, names in _EXCUSES.items():
        if getattr(given, choice) is not None:
            yield from names


def _check_program(launch: Launch, draft: Found) -> None:
    """Refuse a program that trains neither a decoder nor BERT; add a remark on an unknown one."""
    program = launch.program
    if not program:
        return
    line = f"line {launch.line}: " if launch.line else ""
    if (reason := refusal_of(program)) is not None:
        reject(f"{line}{program} {reason}: give a launch line that trains a decoder or BERT")
    if not (is_decoder(program) or trains_bert(program)):
        text = f"{program} is unknown: taken as a program that trains a decoder"
        draft.remark("assumed", "program", text)


def _check_stage(options: Options) -> None:
    """Refuse MindSpeed-LLM's ``--stage`` if it trains by preferences or rewards."""
    stage = options.text("--stage")
    if stage not in (None, "sft", "pretrain", "pt"):
        reject(
            f"{options.where('--stage')}: {stage} trains by preferences or rewards, which is not "
            "supported: give a launch line of pre-training or supervised fine-tuning"
        )


def _check_shape(launch: Launch, options: Options) -> None:
    """Refuse a program of another framework: none of its options describes a model."""
    if launch.program and not options.strays and not any(name in options for name in _SHAPE):
        line = f"line {launch.line}: " if launch.line else ""
        reject(
            f"{line}{launch.program} has none of Megatron-LM's options {', '.join(_SHAPE[:3])}: "
            "give a launch line of Megatron-LM or of a fork, or the configuration file that it "
            "reads"
        )


def _world(options: Options, draft: Found) -> None:
    option = options.given.get("--world-size")
    world = None if option is None or option.unknown else options.whole("--world-size")
    if world and draft.nodes and draft.gpus_per_node and world != draft.nodes * draft.gpus_per_node:
        text = (
            f"--world-size is {world}, but the launcher starts {draft.nodes} x "
            f"{draft.gpus_per_node} processes: the launcher's number is used"
        )
        draft.remark("contradicting", "gpus_per_node", text)


def _model(options: Options, draft: Found, given: Given, program: str) -> ModelSpec:
    """Return the user's model, or else the one that the options describe."""
    if given.model is None:
        draft.model = model_of(options, draft, given.vocab_size, program)
        if options.has("--use-checkpoint-args"):
            text = "the model is read from the options, as the checkpoint is not read"
            draft.remark("assumed", "--use-checkpoint-args", text)
        return draft.model
    if "--num-layers" in options:
        aside = Found()
        try:
            draft.model = model_of(options, aside, given.vocab_size, program)
        except InputError:
            # If the user gives a model, options that describe one may be missing.
            return with_key_heads(options, draft, given.model)
        draft.remarks += aside.remarks
    return with_key_heads(options, draft, given.model)


def _degrees(options: Options, draft: Found) -> None:
    draft.values["tensor_parallel"] = options.whole("--tensor-model-parallel-size") or 1
    draft.num_stages = options.whole("--pipeline-model-parallel-size") or 1
    draft.values["context_parallel"] = options.whole("--context-parallel-size") or 1
    draft.values["sequence_parallel"] = int(options.has("--sequence-parallel"))
    _exchange(options, draft)
    read_ulysses(options, draft)


def _exchange(options: Options, draft: Found) -> None:
    """Read how context-parallel ranks exchange keys and values, if all layers do it in the same
    way.
    """
    algorithm = options.text("--context-parallel-algo")
    stated = {*options.all_words("--cp-comm-type")} or {"p2p"}
    word = stated.pop() if len(stated) == 1 else " ".join(sorted(stated))
    if algorithm is not None:
        if algorithm in _ALGORITHMS:
            draft.values["context_exchange"] = _ALGORITHMS[algorithm]
        else:
            text = f"--context-parallel-algo {algorithm} is predicted as ring attention"
            draft.remark("ignored", "context_exchange", text)
    elif word in EXCHANGES:
        draft.values["context_exchange"] = EXCHANGES[word]
    else:
        text = f"--cp-comm-type {word} is predicted as p2p"
        draft.remark("ignored", "context_exchange", text)


def _workload(options: Options, draft: Found, launch: Launch) -> None:
    draft.sequence_length = _length(options, draft)
    draft.micro_batch = options.whole("--micro-batch-size")
    draft.global_batch = options.whole("--global-batch-size")
    positions = options.whole("--max-position-embeddings")
    if positions and draft.sequence_length and positions < draft.sequence_length:
        text = (
            f"--max-position-embeddings {positions} is less than --seq-length "
            f"{draft.sequence_length}: --seq-length is used"
        )
        draft.remark("contradicting", "sequence_length", text)
    _attention(options, draft, launch)


def _length(options: Options, draft: Found) -> int | None:
    """Read the length of the sequences on which the decoder trains."""
    length = options.whole("--seq-length") or options.whole("--encoder-seq-length")
    decoder = options.whole("--decoder-seq-length")
    if length is not None and decoder is not None and decoder != length:
        text = f"--seq-length is {length}, but --decoder-seq-length is {decoder}: {decoder} is used"
        draft.remark("contradicting", "sequence_length", text)
    return decoder or length


def _attention(options: Options, draft: Found, launch: Launch) -> None:
    """Read whether attention is fused, from options or from Transformer Engine's environment
    variables.
    """
    backend = options.choice("--attention-backend", ("flash", "fused", "unfused", "local", "auto"))
    is_flash = options.has("--use-flash-attn")
    implementation = options.text("--transformer-impl")
    if backend in ("unfused", "local"):
        draft.attention = "math"
        if is_flash:
            text = (
                f"--use-flash-attn and --attention-backend {backend} are both given: "
                "--attention-backend is used"
            )
            draft.remark("contradicting", "attention", text)
    elif is_flash and backend in (None, "auto") and _is_written_out(options, launch):
        draft.attention = "math"
        text = (
            "--use-flash-attn is given, but NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0 turn fused "
            "attention off in Transformer Engine: predicted as unfused (attention: math)"
        )
        draft.remark("contradicting", "attention", text)
    elif is_flash or backend not in (None, "auto"):
        draft.attention = "flash"
    elif (by_variables := _attention_by_variables(launch)) is not None:
        draft.attention = by_variables
    elif backend == "auto":
        draft.attention = "flash"
    elif implementation == "local" or is_of_deepspeed(options) or is_of_epfl(options):
        draft.attention = "math"
        text = "math (unfused), because --use-flash-attn is not given"
        draft.remark("assumed", "attention", text)


def _is_written_out(options: Options, launch: Launch) -> bool:
    """Whether Transformer Engine computes attention without fused kernels, because environment
    variables disable all of them.
    """
    is_local = options.text("--transformer-impl") == "local" or options.has("--use-legacy-models")
    is_other = is_of_deepspeed(options) or is_of_epfl(options)
    return not (is_local or is_other) and _attention_by_variables(launch) == "math"


def _attention_by_variables(launch: Launch) -> Attention | None:
    """Return the attention kernels that environment variables of Transformer Engine leave
    enabled.
    """
    settings = [launch.environment.get(name) for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")]
    switches = [word.text for word in settings if word is not None and word.unknown is None]
    if "1" in switches:
        return "flash"
    return "math" if switches == ["0", "0"] else None


def _engine_s_states(options: Options, draft: Found, files: Files) -> None:
    """Read which states are sharded and offloaded, by DeepSpeed's engine or by Megatron-LM's
    optimizer.
    """
    read_optimizer(options, draft)
    if is_by_deepspeed(options):
        read_deepspeed(options, draft, files)
        return
    read_states(options, draft)
    if idle := [name for name in ("--deepspeed-config", "--zero-stage") if name in options]:
        text = f"without --deepspeed, {' and '.join(idle)} can have no effect: ignored"
        draft.remark("contradicting", "zero", text)
