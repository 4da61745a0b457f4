"""Recognises launchers (programs such as torchrun and srun that start training processes) and finds
where their own options end.
"""

import re
from collections.abc import Mapping, Sequence

from mistlab.core.values import word_set
from mistlab.shell.shell_text import Text

_PYTHON = re.compile(r"python(?:\d(?:\.\d+)?)?$|pypy3?$|ipython$")
_TORCHRUN = word_set(
    """
    --standalone --no-python --no_python -m --module --run-path --run_path --use-env --use_env
    --no-use-env --signals-to-handle
    """
)
# For each launcher, its options that take no value.
_SWITCHES: Mapping[str, frozenset[str]] = {
    "torchrun": _TORCHRUN,
    "torchrun_npu": _TORCHRUN,
    "msrun": frozenset(("--bind_core",)),
    "deepspeed": word_set(
        """
        --module --no_python --no_local_rank --save_pid --force_multi --bind_cores_to_rank
        --elastic_training --no_ssh --no_ssh_check -m
        """
    ),
    "accelerate": word_set(
        """
        --multi_gpu --cpu --tpu --ipex --use_deepspeed --use_fsdp --use_megatron_lm --quiet -q
        --debug --module -m --no_python --enable_cpu_affinity --same_network --use_xpu
        --use_parallelism_config --dynamo_use_dynamic --dynamo_use_fullgraph
        """
    ),
    "composer": frozenset(["--module_mode", "-m", "--command_mode", "-c", "--verbose", "-v"]),
    "colossalai": frozenset(("-m", "--module")),
    "horovodrun": frozenset(("--verbose",)),
    "python": frozenset(
        ["-u", "-O", "-OO", "-B", "-s", "-S", "-E", "-I", "-v", "-q", "-i", "-x", "-b", "-d", "-m"]
    ),
    "coverage": frozenset(("-m", "-p", "-a", "--append", "--parallel-mode")),
}
_MODULES = frozenset(("-m", "--module", "--module_mode"))
# The subcommand by which a launcher starts training, such as ``launch`` in ``accelerate launch``.
_VERBS = {"accelerate": "launch", "colossalai": "run", "lightning": "run", "fabric": "run"}
_VERBS |= {"coverage": "run"}
# Programs with many options of their own that start another program.
_WRAPPERS = frozenset(
    (
        *("srun", "mpirun", "mpiexec", "mpiexec.hydra", "aprun", "jsrun", "prun", "orterun"),
        *("numactl", "docker", "singularity", "apptainer", "timeout", "taskset"),
    )
)
# Training programs with subcommands, and the subcommands that train.
_TRAINERS: Mapping[str, frozenset[str]] = {
    "llamafactory-cli": frozenset(("train",)),
    "xtuner": frozenset(("train",)),
    "swift": frozenset(("sft", "pt", "rlhf")),
    "megatron": frozenset(("sft", "pt", "rlhf")),
    "axolotl": frozenset(("train",)),
    "tune": frozenset(("run",)),
    "trl": frozenset(("sft", "dpo", "grpo", "kto", "reward", "rloo")),
    "nemo": frozenset(("llm",)),
    "litgpt": frozenset(("pretrain", "finetune", "finetune_full", "finetune_lora")),
    "autotrain": frozenset(("llm",)),
}
_MODULE_NAMES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "paddle.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed",
    "torch_xla.distributed.xla_dist": "torchrun",
    "colossalai.launch": "colossalai",
}


def name_of(word: str) -> str:
    """Return the name of a program without its folder."""
    return word.rpartition("/")[2]


def launcher_name(word: str) -> str:
    """Return the launcher that a word of a command names, such as ``torchrun``, or an empty
    text.
    """
    name = name_of(word).removesuffix(".exe")
    if _PYTHON.match(name):
        return "python"
    if word in _MODULE_NAMES:
        return _MODULE_NAMES[word]
    return name if name in _SWITCHES or name in _TRAINERS or name in _VERBS else ""


def is_launcher(word: str) -> bool:
    """Return whether a word of a command names a launcher."""
    return bool(launcher_name(word))


class CommandParts:
    """A command divided in two: the words up to its training program, and the words after it."""

    def __init__(self, launcher: str, at: int, first: int, start: int = 0) -> None:
        self.launcher = launcher
        self.start = start
        self.at = at
        self.first = first


def parts_of(words: Sequence[Text]) -> CommandParts | None:
    """Find the training program in a command, or return None if the command starts none.

    ``at`` is its index, -1 for none; ``first`` the index of its first argument; ``start`` that of
    its launcher.
    """
    launchers = _launchers(words)
    if not launchers:
        return _without_launcher(words)
    number, launcher = launchers[-1]
    at = _program(words, number + 1, launcher)
    if at is None:
        return None
    if at < 0:
        return CommandParts(launcher, -1, len(words), number)
    return CommandParts(launcher, at, at + 1, number)


def _launchers(words: Sequence[Text]) -> list[tuple[int, str]]:
    """Find the launchers in a command, such as ``srun`` and ``torchrun``, each of which starts the
    next.
    """
    launchers, number = list[tuple[int, str]](), 0
    while number < len(words):
        chars = words[number].chars
        launcher = launcher_name(chars)
        if launcher:
            launchers.append((number, launcher))
            if launcher in _TRAINERS:
                break
        elif chars.endswith(".py") or (launchers and _ends(words, number)):
            break
        number += 1
    return launchers


def _ends(words: Sequence[Text], number: int) -> bool:
    """Return whether a word is the module after ``-m``; all later words are the module's
    arguments.
    """
    return words[number - 1].chars in _MODULES


def _without_launcher(words: Sequence[Text]) -> CommandParts | None:
    """Return the position of a training program that no launcher starts, or of a line with only
    options.
    """
    is_wrapped = name_of(words[0].chars) in _WRAPPERS
    for number, word in enumerate(words):
        if word.chars.startswith("-") and not is_wrapped:
            return CommandParts("", -1, 0) if number == 0 else None
        if word.chars.endswith(".py"):
            return CommandParts("", number, number + 1)
    return None


def _program(words: Sequence[Text], start: int, launcher: str) -> int | None:
    """Return the index of the program that a launcher starts; -1 on a line with only options, None
    if there is none.
    """
    if launcher in _TRAINERS:
        verb = words[start].chars if start < len(words) else ""
        return start if verb in _TRAINERS[launcher] else None
    verb = _VERBS.get(launcher, "")
    if verb and start < len(words) and words[start].chars == verb:
        start += 1
    elif verb:
        is_module = start > 1 and words[start - 1].chars in _MODULE_NAMES
        if not is_module:
            return None
    switches, number = _SWITCHES.get(launcher, frozenset()), start
    while number < len(words):
        chars = words[number].chars
        if launcher == "python" and chars in ("-c", "-"):
            return None
        if not chars.startswith("-"):
            if words[number].is_known or not _goes_on(words, number):
                return number
            number += 1
        elif chars in switches or "=" in chars or chars in _MODULES:
            number += 1
        else:
            number += _taken(words, number)
    return -1 if number > start and launcher != "python" else None


def _goes_on(words: Sequence[Text], number: int) -> bool:
    """Return whether a program follows an unknown word, which is then assumed to hold the
    launcher's options.
    """
    return any(word.chars.endswith(".py") or word.chars in _MODULES for word in words[number + 1 :])


def _taken(words: Sequence[Text], number: int) -> int:
    """Return how many words an option occupies: 2 with a value, otherwise 1."""
    after = words[number + 1].chars if number + 1 < len(words) else "-"
    return 1 if after.startswith("-") or after.endswith(".py") else 2
