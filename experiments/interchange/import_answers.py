"""An import as a user goes through it: what a refusal asks for is given, until a plan comes out."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.interchange.source_files import source_of
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import Given, Imported
from mistlab.formats.file_formats import format_of

# What a user gives by an option for what a file does not say.
ANSWERS: Mapping[str, Any] = {
    "nodes": 2,
    "gpus_per_node": 8,
    "model": "llama-7b",
    "sequence_length": 2048,
    "global_batch": 256,
    "micro_batch": 1,
    "vocab_size": 50_304,
    "precision": "bf16",
}
WITH_EXPERTS = "mixtral-8x7b"
# Values of a script's variables that the answers of the file do not have, by a part of their names.
VARIABLES: Mapping[str, str] = {
    "RANK": "0",
    "GPU": "8",
    "NPROC": "8",
    "DEVICES": "8",
    "HOSTS": "2",
    "NODE": "2",
    "WORLD": "2",
    "ADDR": "localhost",
    "PORT": "6000",
}
_ASKED_OPTION = re.compile(r"(?:give|or|by) (?:another |other )?--([a-z][a-z-]+)")
_ASKED_VARIABLE = re.compile(r"--set (\w+)=(\S*)")
_REPLICA = re.compile(r"(\d+) GPUs: a copy of the model takes (\d+)")
_NO_EXPERTS = re.compile(r"the model has no experts")
_NODE = re.compile(r"gpus_per_node: (\d+) is more than a node")
_TOGETHER = re.compile(r"no multiple of micro_batch (\d+) x data_parallel (\d+)")
_PLACEHOLDER = re.compile(r"[A-Z]*")
_MOST_NODES = 2048
_MOST_ROUNDS = 16


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A file's way through the import: options, variables and arguments given, and the end.

    ``known`` are values that a reader found for the file: ``arguments`` and ``set`` of its script,
    and sizes under ``facts``.
    """

    path: Path
    given: Given
    known: Mapping[str, Any]
    settings: dict[str, str] = field(default_factory=dict)
    arguments: Sequence[str] | None = None
    answered: list[str] = field(default_factory=list)
    format: str = ""
    imported: Imported | None = None
    refusal: str = ""

    def run(self) -> None:
        """Import, and give what each refusal asks for."""
        for _ in range(_MOST_ROUNDS):
            try:
                settings = [f"{name}={value}" for name, value in self.settings.items()]
                source = source_of(self.path, settings, self.arguments)
                row = format_of(source)
                self.format = row.name
                self.imported = row.read(source, self.given)
            except InputError as error:
                self.refusal = str(error)
                ways: tuple[Callable[[], bool], ...] = (
                    self._start_as_known,
                    self._give_more_gpus,
                    self._give_a_multiple,
                    self._give_experts,
                    self._give_options,
                    self._set_variables,
                )
                if not any(way() for way in ways):
                    return
            else:
                self.refusal = ""
                return

    @property
    def gave_model(self) -> bool:
        """Whether the model is not the file's, but was given."""
        return "--model" in self.answered

    def _start_as_known(self) -> bool:
        """Give the script the arguments and variables that its readers found."""
        asks = "give its arguments" in self.refusal or "--set" in self.refusal
        is_known = "arguments" in self.known or "set" in self.known
        if not asks or not is_known or "--" in self.answered:
            return False
        if "arguments" in self.known:
            self.arguments = [str(word) for word in self.known["arguments"]]
        named = self.known.get("set") or {}
        text = self.path.read_text(encoding="utf-8", errors="replace")
        self.settings |= {name: str(value) for name, value in named.items() if name in text}
        self.answered.append("--")
        return True

    def _give_more_gpus(self) -> bool:
        """Give more nodes, where the given ones hold no copy of the model."""
        if match := _NODE.search(self.refusal):
            self.given = replace(self.given, nodes=-(-int(match[1]) // 8), gpus_per_node=8)
            self.answered += ["--nodes", "--gpus-per-node"]
            return True
        if "does not divide the stage's" in self.refusal and self.given.nodes is None:
            self.given = replace(self.given, nodes=2)
            self.answered.append("--nodes")
            return True
        nodes = self.given.nodes
        if "--nodes" not in self.answered or nodes is None or nodes >= _MOST_NODES:
            return False
        if match := _REPLICA.search(self.refusal):
            needed = nodes * int(match[2]) // int(match[1])
            self.given = replace(self.given, nodes=max(2 * nodes, needed))
            return True
        if "does not divide the stage's" in self.refusal:
            self.given = replace(self.given, nodes=2 * nodes)
            return True
        return False

    def _give_a_multiple(self) -> bool:
        """Give a batch that divides, where the given one does not."""
        match = _TOGETHER.search(self.refusal)
        if match is None or "--global-batch" not in self.answered:
            return False
        batch = 4 * int(match[1]) * int(match[2])
        if self.given.global_batch == batch:
            return False
        self.given = replace(self.given, global_batch=batch)
        return True

    def _give_experts(self) -> bool:
        """Give a model with experts, where the file divides experts that the given one has not."""
        with_experts = catalog.model(WITH_EXPERTS)
        if not (self.gave_model and _NO_EXPERTS.search(self.refusal)):
            return False
        if self.given.model == with_experts:
            return False
        self.given = replace(self.given, model=with_experts)
        return True

    def _give_options(self) -> bool:
        facts = self.known.get("facts") or {}
        for option in _ASKED_OPTION.findall(self.refusal):
            name = option.replace("-", "_")
            if name in ANSWERS and getattr(self.given, name) is None:
                answers: dict[str, Any] = {name: facts.get(name, ANSWERS[name])}
                if name == "model":
                    answers = {name: catalog.model(ANSWERS[name])}
                self.given = replace(self.given, **answers)
                self.answered.append(f"--{option}")
                return True
        return False

    def _set_variables(self) -> bool:
        for name, suggested in _ASKED_VARIABLE.findall(self.refusal):
            by_name = (text for part, text in VARIABLES.items() if part in name.upper())
            is_example = _PLACEHOLDER.fullmatch(suggested.strip(",;:"))
            value = next(by_name, None) if is_example else suggested.strip(",;:")
            if value is not None and name not in self.settings:
                self.settings[name] = value
                self.answered.append(f"--set {name}")
                return True
        return False
