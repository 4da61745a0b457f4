"""Collects options of Megatron-LM from files that state them as settings, and imports them like a
launch line.

Files name options by their key (``tensor_model_parallel_size: 2``), or by the name that the
value has inside Megatron-LM, which for some is another word or the opposite (``add_bias_linear:
false`` is ``--disable-bias-linear``).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mistlab.core.values import InputError
from mistlab.export.given import Given, Imported, MissingError, Remark
from mistlab.export.megatron.megatron_read import read_options
from mistlab.shell.launch import Launch
from mistlab.shell.session import LaunchFile
from mistlab.shell.shell_text import Word

# Settings that negate an option of Megatron-LM: false means that the option is on.
OPPOSITES: Mapping[str, str] = {
    "add_bias_linear": "--disable-bias-linear",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "bias_swiglu_fusion": "--no-bias-swiglu-fusion",
    "bias_dropout_fusion": "--no-bias-dropout-fusion",
    "apply_rope_fusion": "--no-rope-fusion",
    "persist_layer_norm": "--no-persist-layer-norm",
    "create_attention_mask_in_dataloader": "--no-create-attention-mask-in-dataloader",
    "mmap_bin_files": "--no-mmap-bin-files",
    "check_for_nan_in_loss_and_grad": "--no-check-for-nan-in-loss-and-grad",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "async_tensor_model_parallel_allreduce": "--no-async-tensor-model-parallel-allreduce",
    "fp8_wgrad": "--no-fp8-wgrad",
    "pin_cpu_grads": "--no-pin-cpu-grads",
    "pin_cpu_params": "--no-pin-cpu-params",
    "initialization": "--no-initialization",
    "use_flash_attn_v1": "",
    "use_mcore_models": "",
}
# Settings of Megatron-core whose name differs from that of Megatron-LM's option.
RENAMED: Mapping[str, str] = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "num_moe_experts": "--num-experts",
    "layernorm_epsilon": "--norm-epsilon",
    "encoder_seq_length": "--seq-length",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "moe_router_enable_expert_bias": "--moe-router-enable-expert-bias",
}


# Matches the option's name at the beginning of an error message about a launch line.
_OPTIONS = re.compile(r"^--[a-z0-9][\w-]*(, --[a-z0-9][\w-]*)*")


@dataclass(slots=True, kw_only=True)
class Flags:
    """Options of Megatron-LM collected from a file, and the remarks made while it was read.

    A value of None is a switch that is on. ``places`` are the paths of settings by option, and
    ``where`` the section that would have a missing one; both are empty for files that name the
    options themselves. ``nodes`` and ``gpus_per_node`` are the processes that the file starts,
    ``program`` the program of Megatron-LM for which the file stands, empty if it trains a decoder.
    """

    where: str = ""
    options: dict[str, str | None] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    nodes: int | None = None
    gpus_per_node: int | None = None
    program: str = ""

    def put(self, name: str, value: object, where: str = "") -> None:
        """Record a setting of the file as an option of Megatron-LM; ``name`` is the option's name
        in Python.
        """
        option = RENAMED.get(name, f"--{name.replace('_', '-')}")
        if name in OPPOSITES:
            option = OPPOSITES[name]
            if value is False and option:
                self.options[option] = None
        elif value is True:
            self.options[option] = None
        elif value is not None and value is not False:
            self.options[option] = _text(value)
        if where:
            self.places[option] = where

    def remark(self, choice: str, text: str) -> None:
        """Add a remark that the import ignores a setting which affects the run's cost, with what is
        assumed instead.
        """
        self.remarks.append(Remark(kind="ignored", choice=choice, text=text))

    def note(self, choice: str, text: str) -> None:
        """Add a remark on settings that do not affect cost."""
        self.remarks.append(Remark(kind="noted", choice=choice, text=text))

    def assume(self, choice: str, text: str) -> None:
        """Add a remark on what is assumed where the file states nothing."""
        self.remarks.append(Remark(kind="assumed", choice=choice, text=text))

    def read(self, given: Given) -> Imported:
        """Import the collected options of Megatron-LM as a job."""
        words = [word for option in self.options for word in self._words(option)]
        launch = Launch(program=self.program, launcher="torchrun", started=tuple(self._started()))
        try:
            imported = read_options(words, given, launch=launch, source=LaunchFile(text=""))
        except MissingError as error:
            message = self._placed(str(error))
            raise MissingError(message, choice=error.choice, variable=error.variable) from None
        except InputError as error:
            raise InputError(self._placed(str(error))) from None
        placed_remarks = (
            replace(remark, choice=self._placed(remark.choice)) for remark in imported.remarks
        )
        return Imported(job=imported.job, remarks=(*self.remarks, *placed_remarks))

    def _placed(self, message: str) -> str:
        """Replace the options at the beginning of an error message by the paths of the settings in
        the file, and a line to which options are to be added by the file.
        """
        match = _OPTIONS.match(message)
        if match is None or not (self.where or self.places):
            return message
        paths = ", ".join(self._path(option) for option in match[0].split(", "))
        return paths + message[match.end() :].replace(" to the line", " to the file", 1)

    def _path(self, option: str) -> str:
        missing = f"{self.where}.{option.lstrip('-').replace('-', '_')}".lstrip(".")
        return self.places.get(option, missing)

    def _started(self) -> Iterator[Word]:
        yield Word(text="torchrun")
        for option, number in (("--nnodes", self.nodes), ("--nproc-per-node", self.gpus_per_node)):
            if number:
                yield Word(text=option)
                yield Word(text=str(number))

    def _words(self, option: str) -> Iterator[Word]:
        yield Word(text=option)
        for text in (self.options[option] or "").split():
            yield Word(text=text)


def _text(value: Any) -> str:
    if isinstance(value, list):
        if all(isinstance(item, int) for item in value) and len(value) > 1:
            return str(value).replace(" ", "")
        return " ".join(map(str, value))
    return str(value)
