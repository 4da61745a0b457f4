"""An import as a user goes through it: what a refusal asks for is given, until a plan comes out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.exporting.source_files import source_of
from mistlab import catalog
from mistlab.export.given import Given, Imported
from mistlab.formats.table import format_of
from mistlab.values.errors import InputError

# What a user answers who is asked for something that a file does not say.
ANSWERS: Mapping[str, Any] = {
    "nodes": 2,
    "gpus_per_node": 8,
    "model": "llama-7b",
    "sequence_length": 2048,
    "global_batch": 256,
    "micro_batch": 1,
    "vocab_size": 50_304,
}
# The same for variables of a script, by a part of their names.
VARIABLES: Mapping[str, str] = {
    "RANK": "0",
    "GPU": "8",
    "NPROC": "8",
    "DEVICES": "8",
    "NODE": "2",
    "WORLD": "2",
    "ADDR": "localhost",
    "PORT": "6000",
}
_ASKED_OPTION = re.compile(r"give (?:another |other )?--([a-z][a-z-]+)")
_ASKED_VARIABLE = re.compile(r"--set (\w+)=")
_MOST_ROUNDS = 12


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A file's way through the import: options and variables that were given, and the end."""

    path: Path
    given: Given
    settings: dict[str, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)
    format: str = ""
    imported: Imported | None = None
    refusal: str = ""

    def run(self, facts: Mapping[str, Any]) -> None:
        """Import, and answer each refusal as far as it asks for something.

        ``facts`` are sizes that are known of the file; other answers are those of ``ANSWERS``.
        """
        for _ in range(_MOST_ROUNDS):
            try:
                source = source_of(
                    self.path, [f"{key}={value}" for key, value in self.settings.items()]
                )
                row = format_of(source)
                self.format = row.name
                self.imported = row.read(source, self.given)
            except InputError as error:
                self.refusal = str(error)
                if not self._answered(facts):
                    return
            else:
                self.refusal = ""
                return

    def _answered(self, facts: Mapping[str, Any]) -> bool:
        variable = _ASKED_VARIABLE.search(self.refusal)
        if variable is not None:
            return self._set(variable[1])
        for option in _ASKED_OPTION.findall(self.refusal):
            name = option.replace("-", "_")
            if name in ANSWERS and hasattr(self.given, name) and getattr(self.given, name) is None:
                answers: dict[str, Any] = {name: facts.get(name, ANSWERS[name])}
                if name == "model":
                    answers = {name: catalog.model(ANSWERS[name])}
                self.given = replace(self.given, **answers)
                self.options.append(f"--{option}")
                return True
        return False

    def _set(self, name: str) -> bool:
        value = next((text for part, text in VARIABLES.items() if part in name.upper()), None)
        if value is None or name in self.settings:
            return False
        self.settings[name] = value
        self.options.append(f"--set {name}")
        return True
