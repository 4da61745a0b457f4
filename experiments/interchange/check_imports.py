"""Imports launch files from public repositories, and compares each with facts that people who read
it have recorded.
"""

import argparse
import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.interchange.source_files import source_of
from experiments.pages.charts import Bars
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study
from experiments.pages.tables import table
from mistlab import catalog
from mistlab.core.files import parse_yaml, text_in
from mistlab.core.values import InputError, reject
from mistlab.export.given import Given, Imported
from mistlab.formats.file_formats import format_of
from mistlab.job.job import Job, hardware_from
from mistlab.plan.plan import StagePlan
from mistlab.plan.workload import ModelSpec

OWN = Path(__file__).parent / "real_files"
ENDS = ("as it is", "with options", "started as its words say", "refused", "crashed", "missing")
# Matches an absolute path, such as one on the machine of a file's author.
_MACHINE_S = re.compile(r"(?<![\w./`)}])/(?:[^\s/:,)]+/)+([^\s/:,)]+)")
_MODEL = frozenset(
    ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "experts_active")
)


def check_imports(options: argparse.Namespace) -> int:
    """Import launch files from public repositories, and compare them with facts that people who
    read them recorded.

    FOLDER holds files of public repositories as OWNER__NAME/PATH; a list that comes with this
    package names them, but the files themselves are not part of the package. Each file is imported
    as a user would do it: first without options, then with the options that the refusal asks for.
    The facts of some files were written by readers who had not seen the imported plan.
    """
    study = Study.begin("check_imports", options)
    files = _listed(options.list or OWN / "list.csv")
    facts = _entries(options.facts or OWN / "facts.yaml")
    answers = _entries(options.answers or OWN / "answers.yaml")
    given = Given(hardware=hardware_from(options.hardware, Path()))
    for entry in study.counted(files[:20] if options.quick else files, "files"):
        name = entry["file"]
        study.add(_row(options.folder, entry, facts.get(name), answers.get(name, {}), given))
    return study.end(_report(study.rows))


def _listed(path: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader(text_in(path).splitlines()))
    if not rows or not {"repo", "path", "kind"} <= rows[0].keys():
        reject(
            f"{path}: is not a list of launch files: give as --list a CSV file with the columns "
            "repo, path and kind, and a row for each file"
        )
    return [
        {**row, "file": row.get("file") or f"{row['repo'].replace('/', '__')}/{row['path']}"}
        for row in rows
    ]


def _entries(path: Path) -> Mapping[str, Mapping[str, Any]]:
    if not path.is_file():
        return {}
    content = parse_yaml(f"files:\n{text_in(path)}", str(path))
    return {entry["file"]: entry for entry in content["files"]}


def _row(
    folder: Path,
    entry: Mapping[str, str],
    judged: Mapping[str, Any] | None,
    answers: Mapping[str, Any],
    given: Given,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        **{name: entry[name] for name in ("repo", "path", "kind")},
        **dict.fromkeys(("end", "format", "options", "reason", "told", "silent"), ""),
        "facts": "" if judged is None else len(judged.get("facts") or {}),
    }
    path = folder / entry["file"]
    if not path.is_file():
        return row | {"end": "missing"}
    facts = (judged or {}).get("facts") or {}
    attempt = Attempt(path=path, given=given, known={**answers, "facts": facts})
    try:
        attempt.run()
    except Exception as error:
        return row | {"end": "crashed", "reason": f"{type(error).__name__}: {error}"}
    row |= {"format": attempt.format, "options": " ".join(attempt.answered)}
    if attempt.imported is None:
        return row | {"end": "refused", "reason": attempt.refusal}
    if attempt.gave_model:
        facts = {name: value for name, value in facts.items() if name not in _MODEL}
    wrong = list(wrong_facts(facts, attempt.imported))
    starts = any(word == "--" or word.startswith("--set") for word in attempt.answered)
    end = "started as its words say" if starts else "with options"
    return row | {
        "end": end if attempt.answered else "as it is",
        "told": "; ".join(f"{name}: {words}" for name, words, is_told in wrong if is_told),
        "silent": "; ".join(f"{name}: {words}" for name, words, is_told in wrong if not is_told),
    }


def _report(rows: Sequence[Mapping[str, Any]]) -> Report:
    ends = Counter(row["end"] for row in rows)
    kinds = sorted({row["kind"] for row in rows})
    imported = sum(ends[end] for end in ENDS[:3])
    judged = [row for row in rows if row["facts"] != ""]
    silent = [row for row in judged if row["silent"]]
    sentence = (
        f"{imported} of {len(rows)} files import, {ends['as it is']} of them without a further "
        f"word; of {len(judged)} files whose facts were read, {len(silent)} have a fact wrong "
        "in silence."
    )
    return Report(
        title="Real launch files, imported",
        words=[
            sentence,
            table(["kind", *ENDS], _by_kind(rows, kinds)),
            "Facts that imports have otherwise:",
            table(["file", "in silence", "told of"], list(_wrong(judged))),
        ],
        summary={
            "files": len(rows),
            "imported": imported,
            "judged": len(judged),
            "wrong_in_silence": len(silent),
            "wrong_and_told": sum(1 for row in judged if row["told"]),
            **{end.replace(" ", "_"): ends[end] for end in ENDS},
        },
        pictures=[_picture(rows, kinds)],
        beside=["## Refusals", IN_A_FILE, table(["file", "reason"], list(_refusals(rows)))],
    )


def _picture(rows: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> Bars:
    counts = _by_kind(rows, kinds)
    return Bars(
        name="imports",
        caption="How imports of real files end, by kind of file.",
        groups=kinds,
        series={end: [line[1 + place] for line in counts] for place, end in enumerate(ENDS)},
        y="files",
        stacked=True,
    )


def _by_kind(rows: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[tuple[Any, ...]]:
    lines = []
    for kind in kinds:
        ends = Counter(row["end"] for row in rows if row["kind"] == kind)
        lines.append((kind, *(ends[end] for end in ENDS)))
    return lines


def _wrong(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    for row in rows:
        if row["silent"] or row["told"]:
            yield f"{row['repo']}/{row['path']}", row["silent"], row["told"]


def _refusals(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for row in rows:
        if row["end"] in ("refused", "crashed"):
            reason = _MACHINE_S.sub(r".../\1", row["reason"]).replace("|", "\\|")
            yield f"{row['repo']}/{row['path']}", reason


# Compares facts about launch files, as recorded by people who read them, with the job that the
# import gives.


# For each fact, words by which one can tell that a remark of the import is about it.
_TOLD_BY: Mapping[str, tuple[str, ...]] = {
    "global_batch": ("batch",),
    "micro_batch": ("micro_batch", "micro-batch"),
    "nodes": ("nodes", "nnodes"),
    "gpus_per_node": ("gpus_per_node", "nproc"),
    "sequence_length": ("sequence_length", "seq"),
    "vocab": ("vocab",),
    "zero": ("zero", "shard", "optimizer"),
    "precision": ("precision", "fp8", "fp16", "bf16"),
    "recomputation": ("checkpointed", "recompute"),
    "offload_optimizer": ("offload",),
    "sequence_parallel": ("sequence_parallel", "sequence-parallel"),
    "tensor_parallel": ("tensor",),
    "pipeline_stages": ("pipeline", "stages"),
    "context_parallel": ("context", "cp_size"),
    "expert_parallel": ("expert",),
    "experts": ("expert",),
    "experts_active": ("expert", "topk"),
    "ffn": ("ffn",),
    "kv_heads": ("kv_heads", "query-groups"),
}


def wrong_facts(facts: Mapping[str, Any], imported: Imported) -> Iterator[tuple[str, str, bool]]:
    """The facts that an import contradicts: each one's name, both values as text, and whether a
    remark of the import mentions it.
    """
    remarks = " ".join(map(str, imported.remarks))
    for name, wanted in facts.items():
        if name not in _READ:
            continue
        value = _READ[name](imported.job)
        if not _agrees(name, wanted, value):
            is_told = any(word in remarks for word in _TOLD_BY.get(name, (name,)))
            yield name, f"{wanted} in the file, {value} imported", is_told


def _agrees(name: str, wanted: Any, value: Any) -> bool:
    if name == "vocab":
        return bool(value is not None and wanted <= value < 1.05 * wanted + 1024)
    if isinstance(value, tuple):
        return wanted in value
    return bool(wanted == value)


def _first(job: Job) -> StagePlan:
    return job.plan.stages[0]


def _ffn(model: ModelSpec) -> tuple[int, ...]:
    return (model.ffn,) if model.experts is None else (model.ffn, model.experts.ffn)


def _recomputation(job: Job) -> tuple[str, ...]:
    """The words with which a reader may describe how much the first stage recomputes; there are two
    if it recomputes only some of its blocks.
    """
    stage = _first(job)
    if stage.checkpointed_layers:
        return ("full", "selective") if stage.checkpointed_layers < stage.layers else ("full",)
    names = ("core_recomputed_layers", "products_recomputed_layers")
    return ("selective",) if any(stage.value(name) for name in names) else ("none",)


def _zero(job: Job) -> tuple[int, ...]:
    """The ZeRO levels that a reader may have recorded for a job; with a single replica every level
    is right, since there is nothing to shard.
    """
    first = _first(job)
    return (0, 1, 2, 3) if first.data_parallel == 1 and not first.zero else (first.zero,)


_READ: Mapping[str, Callable[[Job], Any]] = {
    "layers": lambda job: job.workload.model.layers,
    "hidden": lambda job: job.workload.model.hidden,
    "heads": lambda job: job.workload.model.heads,
    "kv_heads": lambda job: job.workload.model.kv_heads,
    "ffn": lambda job: _ffn(job.workload.model),
    "vocab": lambda job: job.workload.model.vocab,
    "experts": lambda job: getattr(job.workload.model.experts, "count", 0),
    "experts_active": lambda job: getattr(job.workload.model.experts, "active", 0),
    "sequence_length": lambda job: job.workload.sequence_length,
    "global_batch": lambda job: job.workload.global_batch,
    "precision": lambda job: job.workload.precision,
    "nodes": lambda job: job.cluster.nodes,
    "gpus_per_node": lambda job: job.cluster.gpus_per_node,
    "micro_batch": lambda job: _first(job).micro_batch,
    "tensor_parallel": lambda job: _first(job).tensor_parallel,
    "pipeline_stages": lambda job: job.plan.num_stages,
    "context_parallel": lambda job: _first(job).degree("context_parallel"),
    "expert_parallel": lambda job: _first(job).degree("expert_parallel"),
    "sequence_parallel": lambda job: bool(_first(job).value("sequence_parallel")),
    "zero": _zero,
    "recomputation": _recomputation,
    "offload_optimizer": lambda job: _first(job).offload.optimizer > 0,
}


# Imports files as a user would: gives every setting that a refusal asks for, until a plan results.


# The values that the simulated user gives for options that a refusal asks for.
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
# The values that the simulated user gives for variables of a script, by a part of the variable's
# name.
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
_TOGETHER = re.compile(r"not a multiple of micro_batch (\d+) x data_parallel (\d+)")
_PLACEHOLDER = re.compile(r"[A-Z]*")
_MOST_NODES = 2048
_MOST_ROUNDS = 16


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The import of one file: the options, variables and arguments that were given, and the
    outcome.

    ``known`` are values that a reader of the file has recorded: the ``arguments`` of its script,
    its variables (``set``), and sizes under ``facts``.
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
        """Import the file, and give each setting that a refusal asks for, until a plan results."""
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
        """Whether the user had to give the model, which could not be read from the file."""
        return "--model" in self.answered

    def _start_as_known(self) -> bool:
        """Begin with the script's arguments and variables that a reader has recorded; returns
        whether there are any that were not given yet.
        """
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
        """Give more nodes, if the nodes given are too few for one replica of the model; returns
        whether they were given.
        """
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
        """Give a batch that can be divided among the replicas, if the one given cannot; returns
        whether it was given.
        """
        match = _TOGETHER.search(self.refusal)
        if match is None or "--global-batch" not in self.answered:
            return False
        batch = 4 * int(match[1]) * int(match[2])
        if self.given.global_batch == batch:
            return False
        self.given = replace(self.given, global_batch=batch)
        return True

    def _give_experts(self) -> bool:
        """Give a model with experts, if the file has expert parallelism but the model given has no
        experts; returns whether it was given.
        """
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
