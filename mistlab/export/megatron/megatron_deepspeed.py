"""Reads the DeepSpeed settings of a Megatron-DeepSpeed launch line: its configuration file and its
options.

The file's ZeRO level counts, whatever ``--zero-stage`` says: the option only decides where weights
are first made (Megatron-DeepSpeed, ``pretrain_gpt.py``). Batches and precision stand in both.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mistlab.core.values import InputError, reject
from mistlab.export.deepspeed import HARMLESS, read_states
from mistlab.export.found import Found, Section, harmless_names, parse_json
from mistlab.export.megatron.megatron_flags import Options
from mistlab.schedule.context_ways import HEADS
from mistlab.shell.session import LaunchFile, known_part
from mistlab.shell.shell_text import Unknown

ENGINES = ("deepspeed", "mistlab")
_CONFIG, _STAGE = "--deepspeed-config", "--zero-stage"
_HALVES = ("fp16", "bf16")
# Sections of DeepSpeed's configuration file that have no effect on a plan when Megatron-DeepSpeed
# reads the file.
_HARMLESS = HARMLESS | harmless_names("megatron_deepspeed")
_LEVELS = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files that a launch line may name: first those that its script writes, then those in the
    script's folder.

    ``unknown`` tells of such files what is not known of their text.
    """

    written: Mapping[str, str]
    source: LaunchFile
    unknown: Mapping[str, Unknown] = field(default_factory=dict)

    def text(self, path: str) -> str | None:
        """Return the text of a file that the launch line names, or None if it cannot be found."""
        written = self._as_written(path, self.written)
        return self.source.beside(known_part(path)) if written is None else self.written[written]

    def unknown_in(self, path: str) -> Unknown | None:
        """List the parts of a file that a script writes whose values are unknown."""
        written = self._as_written(path, self.unknown)
        return None if written is None else self.unknown[written]

    def _as_written(self, path: str, paths: Iterable[str]) -> str | None:
        plain = path.removeprefix("./")
        return next((known for known in paths if known.removeprefix("./") == plain), None)


def is_by_deepspeed(options: Options) -> bool:
    """Whether a launch line trains with DeepSpeed's engine."""
    return options.has("--deepspeed")


def read_deepspeed(options: Options, draft: Found, files: Files) -> None:
    """Read ZeRO level, offloading, batch sizes and precision of a launch line that trains with
    DeepSpeed's engine.
    """
    draft.overlaps = False
    level = options.whole(_STAGE, minimum=0)
    if level is not None and level not in _LEVELS:
        reject(f"{options.where(_STAGE)}: {level} is unknown: give 0, 1, 2 or 3")
    name, text = _configuration(options, files)
    if text is None:
        _without_configuration(options, draft, name, level)
    else:
        try:
            _with_configuration(text, name, draft, level)
        except InputError as error:
            unknown = files.unknown_in(options.words[_CONFIG][0])
            reject(f"{_CONFIG}: {unknown or f'{name}: {error}'}")
    _offloads(options, draft)


def read_ulysses(options: Options, draft: Found) -> None:
    """Read the degree of DeepSpeed-Ulysses, which splits sequences over ranks and exchanges tokens
    for heads in attention.
    """
    ranks = options.whole("--ds-sequence-parallel-size")
    if ranks is not None and ranks > 1:
        draft.values["context_parallel"] = ranks
        draft.values["context_exchange"] = HEADS


def _configuration(options: Options, files: Files) -> tuple[str, str | None]:
    """Return the name of DeepSpeed's configuration file, and its text if the file can be found."""
    if _CONFIG not in options:
        return "", None
    option = options.given[_CONFIG]
    name = option.words[0] if option.words else ""
    options.taken.add(_CONFIG)
    line = f" (line {option.line})" if option.line else ""
    return f"{name}{line}", files.text(name) if name else None


def _without_configuration(options: Options, draft: Found, name: str, level: int | None) -> None:
    """Read the ZeRO level from the launch line where the configuration file is missing, with a
    remark; refuses a line without that option.
    """
    del options
    missing = f"{name} was not found" if name else "the option is not given"
    remedy = "put the file beside the script" if name else "add the option with its file"
    if level is None:
        reject(
            f"{_CONFIG}: {missing}, so ZeRO's level, offloading and precision are unknown: "
            f"{remedy}, or add {_STAGE} N for a configuration with nothing else"
        )
    text = (
        f"predicted with {_STAGE} {level} and nothing offloaded, because {missing}: {remedy} if it "
        "sets more"
    )
    draft.remark("assumed", _CONFIG, text)
    draft.values["zero"] = level


def _with_configuration(text: str, name: str, draft: Found, level: int | None) -> None:
    top = Section(parse_json(text), "", draft)
    section = top.section("zero_optimization")
    read_states(section, draft)
    if level is not None and draft.values["zero"] != level:
        text_of_remark = (
            f"{_STAGE} {level}, but {name} has zero_optimization.stage {draft.values['zero']}: "
            "the file is used"
        )
        draft.remark("contradicting", "zero", text_of_remark)
    if draft.num_stages > 1 and draft.values["zero"] > 1:
        text_of_remark = (
            f"DeepSpeed refuses ZeRO-{draft.values['zero']} with a pipeline: predicted all the same"
        )
        draft.remark("contradicting", "zero", text_of_remark)
    _batches(top, name, draft)
    halves = [half for half in _HALVES if top.section(half).switch("enabled")]
    if halves and draft.precision not in (*halves, "fp8", "fp4"):
        if draft.precision != "fp32":
            text_of_remark = (
                f"--{draft.precision}, but {name} enables {halves[-1]}: the file is used"
            )
            draft.remark("contradicting", "precision", text_of_remark)
        draft.precision = "bf16" if "bf16" in halves else "fp16"
    if top.section("activation_checkpointing").switch("cpu_checkpointing"):
        draft.values["offload_activations"] = 1.0
    top.section("activation_checkpointing").get("number_checkpoints")
    _tell_of_rest(top, name, draft)


def _tell_of_rest(top: Section, name: str, draft: Found) -> None:
    """Add remarks on settings of the configuration file that nothing read; those that do not affect
    cost are only counted.
    """
    if calm := len(top.tell_of_strange(_HARMLESS)):
        text = f"{calm} of {name} without effect on a step's predicted time or memory"
        draft.remark("noted", "settings", text)


def _batches(top: Section, name: str, draft: Found) -> None:
    """Read batch sizes from DeepSpeed's configuration file where the launch line does not state
    them.
    """
    pairs = (
        ("train_batch_size", "global_batch", "--global-batch-size"),
        ("train_micro_batch_size_per_gpu", "micro_batch", "--micro-batch-size"),
    )
    for key, choice, option in pairs:
        of_file, of_line = top.whole(key), getattr(draft, choice)
        if of_line is None:
            setattr(draft, choice, of_file)
        elif of_file is not None and of_file != of_line:
            text = f"{option} {of_line}, but {name} has {key} {of_file}: the option is used"
            draft.remark("contradicting", choice, text)
    draft.micro_batches = draft.steps = top.whole("gradient_accumulation_steps")


def _offloads(options: Options, draft: Found) -> None:
    """Read from the launch line which states DeepSpeed offloads."""
    if options.has("--cpu-optimizer") and not draft.values.get("offload_optimizer"):
        text = (
            "--cpu-optimizer is given, but DeepSpeed's configuration offloads no optimizer: "
            "predicted as offloaded"
        )
        draft.remark("contradicting", "offload.optimizer", text)
        draft.values["offload_optimizer"] = draft.values["offload_gradients"] = 1.0
        draft.values["zero"] = max(draft.values["zero"], 1)
    options.has("--cpu-torch-adam")
    device = options.choice("--remote-device", ("none", "cpu", "nvme")) or "none"
    if device != "none" and draft.values["zero"] == max(_LEVELS):
        draft.values["offload_weights"] = 1.0
    elif device != "none":
        text = f"--remote-device {device} has effect with ZeRO-3 only: ignored"
        draft.remark("contradicting", "offload.weights", text)
