"""Collects the choices that an imported file states, and makes a job of them and of the user's
options.
"""

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from typing import Any, TypeVar

from mistlab import catalog
from mistlab.core.values import InputError, near_matches, reject, shown, word_set
from mistlab.engines.engine import Optimizer, Precision, Sums, names_for_plans
from mistlab.export.given import Given, Imported, Kind, MissingError, Remark, ask_for
from mistlab.export.nearest import canonical, with_engine
from mistlab.export.target import NARROW
from mistlab.graph.library import graph_of
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster
from mistlab.plan.dimensions import DIMENSIONS, counts_of_blocks, dimensions_of_axes
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Attention, ModelSpec, Workload
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.schedule.placement import even_shares

Content = TypeVar("Content")


@dataclass(slots=True, kw_only=True)
class Found:
    """The choices read from an imported file, such as degrees and batch sizes; None where the file
    states nothing.

    ``layers`` are the numbers of blocks of the stages, if the file divides the model itself.
    ``values`` are dimensions with one value for all stages, by name; a number of treated blocks
    among them may exceed the blocks of a stage. If ``recomputed_every`` is n > 0, every n-th block
    of a stage is recomputed. With ``shares_experts`` the states of experts are also sharded among
    those ranks of one replica that divide layers.

    ``engine`` is the one under which the file says that its plan was predicted. ``trained`` holds
    fields of the workload that say what is trained, and how its loss is computed. ``steps`` is the
    number of micro-batches that the engine runs per iteration, whatever the global batch is.
    ``keys`` maps choices that the file may lack to the names that the file has for them.
    ``remarks`` grows while the file is read.
    """

    model: ModelSpec | None = None
    sequence_length: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    micro_batches: int | None = None
    attention: Attention | None = None
    precision: Precision | None = None
    optimizer: Optimizer = "adamw"
    gradients: Sums = "usual"
    trained: dict[str, Any] = field(default_factory=dict)
    expert_capacity: float | None = None
    expert_padding: bool = False
    engine: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    num_stages: int = 1
    layers: Sequence[int] | None = None
    data_parallel: int | None = None
    values: dict[str, Any] = field(default_factory=dict)
    recomputed_every: int = 0
    order: str = DEFAULT_ORDER
    overlaps: bool = True
    shares_experts: bool = False
    steps: int | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)

    def remark(self, kind: Kind, choice: str, text: str) -> None:
        """Add a remark for the user about a choice that an import assumed, ignored or found
        contradictory.
        """
        self.remarks.append(Remark(kind=kind, choice=choice, text=text))

    def settled(self, name: str, given: Content | None, default: Content | None = None) -> Content:
        """Return the value of a choice: the user's option if given, else the file's value, else a
        default. A remark says where option and file differ.
        """
        in_file: Content | None = getattr(self, name)
        option = f"--{name.replace('_', '-')}"
        if given is not None:
            if in_file is not None and in_file != given:
                text = f"the file has {in_file}, but {option} is {given}: {given} is used"
                self.remark("contradicting", name, text)
            return given
        if in_file is not None:
            return in_file
        if default is None:
            key = f", or {self.keys[name]} in the file" if name in self.keys else ""
            ask_for(name, f"{name}: is missing in the file: give {option}{key}")
        self.remark("assumed", name, f"{default}, as the file has none: {option} gives another")
        return default

    def job(self, given: Given, engines: Sequence[str]) -> Imported:
        """Make the job of an imported file under the first of ``engines`` that can run its plan; an
        engine that the user gives is tried first. The error about a fact that the file lacks names
        its misspelt keys, too.
        """
        try:
            return self._job(given, engines)
        except MissingError as error:
            near = (remark for remark in self.remarks if _MISSPELT in remark.text)
            reasons = (f"{remark.choice} {remark.text.partition(': ')[0]}" for remark in near)
            message = "; ".join([str(error), *reasons])
            raise MissingError(message, choice=error.choice, variable=error.variable) from None

    def _job(self, given: Given, engines: Sequence[str]) -> Imported:
        wanted = given.engine or self.engine
        engines = engines if wanted is None else (wanted, *engines)
        model = self._model(given)
        cluster = self._cluster(given)
        data = self._data_parallel(cluster)
        micro_batch = self.settled("micro_batch", given.micro_batch)
        global_batch = self._global_batch(given, data, micro_batch)
        plan = self._plan(model, data, micro_batch, global_batch)
        sequence_length = self.settled("sequence_length", given.sequence_length)
        workload = Workload(
            model=_named(model, sequence_length),
            sequence_length=sequence_length,
            global_batch=global_batch,
            attention=self.settled("attention", given.attention, "flash"),
            precision="bf16",
            optimizer=self.optimizer,
            gradients=self.gradients,
            **self.trained,
            expert_capacity=self.expert_capacity,
            expert_padding=self.expert_padding,
        )
        precision: Precision = self.settled("precision", given.precision, "bf16")
        if precision not in NARROW:
            workload = replace(workload, precision=precision)
        job = Job(workload=workload, cluster=cluster, plan=plan)
        job = canonical(job, shares_experts=self.shares_experts)
        job = with_engine(job, engines, overlaps=self.overlaps, precision=precision)
        known = [name for name in engines if name in names_for_plans()]
        self._tell_of_engine(job, known[0])
        if precision != job.workload.precision:
            text = f"no engine predicts {precision} GEMMs with the plan's other choices"
            self.remark("ignored", "precision", f"{text}: predicted in {job.workload.precision}")
        self._tell_of_graph(job)
        return Imported(job=job, remarks=tuple(self.remarks))

    @property
    def ranks_of_replica(self) -> int:
        """The number of GPUs that hold one replica of the model in the imported file."""
        ranks = self.num_stages
        for name, row in DIMENSIONS.items():
            if row.part == "mesh" and name in self.values and _is_degree(name):
                ranks *= self.values[name]
        return ranks

    def check_stages(self, model: ModelSpec) -> None:
        """Refuse an imported plan that has more stages than its model has blocks."""
        if self.layers is None and self.num_stages > model.layers:
            reject(
                f"the file has {self.num_stages} pipeline stages, more than the {model.layers} "
                f"blocks of {model.name or 'the model'}: set the pipeline-parallel degree in the "
                f"file to at most {model.layers}, or give another --model"
            )

    def settled_model(self, given: Given, read: Callable[[], ModelSpec]) -> ModelSpec:
        """Return the user's model, or else the model in the file, which ``read`` returns. A remark
        says if the two differ, or if the file's cannot be read.
        """
        if given.model is None:
            self.model = read()
            return self.model
        before = len(self.remarks)
        try:
            self.model = read()
        except InputError as error:
            text = f"--model is used, because the file's model cannot be read ({error})"
            self.remarks[before:] = [Remark(kind="assumed", choice="model", text=text)]
        else:
            del self.remarks[before:]
        return given.model

    def _model(self, given: Given) -> ModelSpec:
        model = given.model or self.model
        if model is None:
            ask_for(
                "model",
                "model: the file does not describe it: give --model (a name of the catalogue, or "
                "a config.json)",
            )
        differing = [] if self.model is None else _differences(self.model, model)
        if differing:
            text = f"--model differs from the file in {', '.join(differing)}: --model is used"
            self.remark("contradicting", "model", text)
        return model

    def _cluster(self, given: Given) -> Cluster:
        if self.data_parallel is not None and None in (given.nodes, given.gpus_per_node):
            ranks = self.data_parallel * self.ranks_of_replica
            in_node = given.gpus_per_node or min(ranks, given.hardware.node.gpus)
            self.nodes = self.nodes or -(-ranks // in_node)
            self.gpus_per_node = self.gpus_per_node or in_node
        return Cluster(
            hardware=given.hardware,
            nodes=self.settled("nodes", given.nodes, 1),
            gpus_per_node=self.settled("gpus_per_node", given.gpus_per_node),
        )

    def _data_parallel(self, cluster: Cluster) -> int:
        replica, ranks = self.ranks_of_replica, cluster.num_gpus
        if self.data_parallel is not None:
            return self.data_parallel
        if ranks % replica:
            reject(
                f"{ranks} GPUs are not a multiple of the {replica} GPUs of a copy of the model "
                f"(pipeline {self.num_stages} x tensor and other degrees "
                f"{replica // self.num_stages}): give --nodes and --gpus-per-node whose product is "
                f"a multiple of {replica}, or change these degrees in the file"
            )
        return ranks // replica

    def _global_batch(self, given: Given, data: int, micro_batch: int) -> int:
        together = data * micro_batch
        default = together * (self.micro_batches or 1)
        if self.micro_batches and self.global_batch is None and given.global_batch is None:
            self.global_batch = default
        self._check_steps(micro_batch, data)
        batch = self.settled("global_batch", given.global_batch, default)
        if batch % together:
            reject(
                f"global_batch: {batch} sequences are not a multiple of micro_batch "
                f"{micro_batch} x data_parallel {data}: give --global-batch as a multiple of "
                f"{together}, or another --micro-batch"
            )
        return batch

    def _check_steps(self, micro_batch: int, data: int) -> None:
        """Add a remark if micro-batch size, replicas and accumulation steps of an imported file do
        not multiply to its global batch.
        """
        product = (self.steps or 0) * micro_batch * data
        if product and self.global_batch not in (None, product):
            text = (
                f"{self.global_batch}, but {self.steps} gradient_accumulation_steps x micro_batch "
                f"{micro_batch} x data_parallel {data} are {product}: {self.global_batch} is used"
            )
            self.remark("contradicting", "global_batch", text)

    def _plan(self, model: ModelSpec, data: int, micro_batch: int, batch: int) -> Plan:
        self.check_stages(model)
        layers = self.layers or even_shares(model.layers, self.num_stages)
        counts = counts_of_blocks()
        stages = []
        for count in layers:
            values = {
                name: min(value, count) if name in counts else value
                for name, value in self.values.items()
            }
            if self.recomputed_every:
                values["checkpointed_layers"] = count // self.recomputed_every
            of_stage = {"layers": count, "data_parallel": data, "micro_batch": micro_batch}
            stages.append(StagePlan.of_values({"tensor_parallel": 1, **values, **of_stage}))
        plan = Plan(micro_batches=batch // data // micro_batch, stages=tuple(stages))
        return replace(plan, order=self.order)

    def _tell_of_engine(self, job: Job, wanted: str) -> None:
        engine = job.plan.engine
        if engine != wanted:
            text = (
                f"{engine}, because engine {wanted} cannot run this plan ({_refusal(job, wanted)})"
            )
            self.remark("assumed", "engine", text)
        if job.plan.overlap_communication != self.overlaps:
            overlaps = shown(job.plan.overlap_communication)
            text = f"{overlaps}, because engine {engine} always overlaps it"
            self.remark("assumed", "overlap_communication", text)

    def _tell_of_graph(self, job: Job) -> None:
        """Put a remark first that the plan cannot be predicted, if its model has no layer graph."""
        try:
            graph_of(job.workload)
        except InputError as error:
            text = f"this plan cannot be predicted as it is: {error}"
            self.remarks.insert(0, Remark(kind="noted", choice="prediction", text=text))


def _refusal(job: Job, engine: str) -> str:
    """The reason for which an engine cannot run a job's plan."""
    try:
        replace(job, plan=replace(job.plan, engine=engine))
    except InputError as error:
        return str(error)
    return f"with precision {job.workload.precision}"


def _is_degree(name: str) -> bool:
    return name in dimensions_of_axes() and name != "data_parallel"


def _named(model: ModelSpec, sequence_length: int) -> ModelSpec:
    """Return the catalogue's model that equals ``model`` except for its name, or ``model`` itself
    if there is none. A catalogue model with fewer learned positions than the sequence has tokens
    does not count.
    """
    for name in catalog.model_names():
        known = catalog.model(name)
        if model.context not in (None, known.context):
            continue
        if sequence_length > (known.learned_positions or sequence_length):
            continue
        if replace(known, name=model.name, trained=model.trained) == model:
            return replace(known, checkpoint=model.checkpoint)
    return model


def _differences(in_file: ModelSpec, given: ModelSpec) -> list[str]:
    """Describe in words the fields in which a file's model differs from the user's."""
    pairs = [
        (entry.name, getattr(in_file, entry.name), getattr(given, entry.name))
        for entry in fields(in_file)
        if entry.name not in ("name", "trained", "checkpoint")
    ]
    return [
        f"{name} ({shown(by_user)} instead of {shown(by_file)})"
        for name, by_file, by_user in pairs
        if by_file != by_user
    ]


def checked_whole(where: str, content: object, *, minimum: int = 1) -> int:
    """Return the whole number that a setting of a file holds; an error names the setting if it
    holds anything else.
    """
    try:
        number = int(str(content).replace("_", ""))
    except ValueError:
        reject(f"{where}: {shown(content)} is not a whole number: give one of at least {minimum}")
    if number < minimum:
        reject(f"{where}: {number} is too small: give at least {minimum}")
    return number


# Reads numbers and switches from the sections of a configuration file, and remembers which settings
# nobody asked for.


# The first number limits how many unknown settings get a remark each; the second limits how many
# names one remark lists.
MOST_NAMED = 3
MOST_LISTED = 5
# How alike a strange key and a known one are, of 1, where one is taken for a misspelled other.
_NEARLY_EQUAL = 0.9
# How a remark on a misspelt key begins to name the right one.
_MISSPELT = " (did you mean"
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse_json(text: str) -> Mapping[str, Any]:
    """Parse a JSON text into a mapping; refuses a text that is not a JSON object."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        reject(f"line {error.lineno}, column {error.colno}: {error.msg}: correct the JSON")
    except RecursionError:
        reject("is nested too deeply: write at most a few levels")
    if not isinstance(content, dict):
        reject("holds no JSON object: give a file with settings in braces")
    return content


def parse_toml(text: str) -> Mapping[str, Any]:
    """Parse a TOML text into nested mappings."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reject(f"{error}: correct the TOML")
    except RecursionError:
        reject("is nested too deeply: write at most a few levels")


def harmless_names(framework: str) -> frozenset[str]:
    """Return the names of a framework's settings that do not affect the cost of a step, from a list
    in this package.
    """
    file = files("mistlab.export") / "harmless" / f"{framework}.txt"
    return word_set(file.read_text(encoding="utf-8"))


class Section:
    """A section of a configuration file, which records the settings that were read, so that the
    user is told of the others.
    """

    def __init__(self, content: Mapping[str, Any], name: str, draft: Found) -> None:
        self.content, self.name, self.found = content, name, draft
        self._asked: dict[str, Section | None] = {}

    def get(self, key: str, default: object = None) -> Any:
        """Return the value of a setting of this section; the value ``auto`` counts as missing."""
        self._asked.setdefault(key, None)
        value = self.content.get(key, default)
        if value == "auto":
            text = "auto leaves this value to the training script: predicted as if it was not given"
            self.found.remark("assumed", self.path(key), text)
            return default
        return value

    def section(self, key: str) -> "Section":
        """Return the subsection with this key, or an empty one if it is missing."""
        if (known := self._asked.get(key)) is not None:
            return known
        content = self.content.get(key)
        if content is None:
            content = {}
        if not isinstance(content, Mapping):
            reject(
                f"{self.path(key)}: {shown(content)} is not a section: give a mapping of settings"
            )
        made = Section(content, self.path(key), self.found)
        self._asked[key] = made
        return made

    def whole(self, key: str, *, minimum: int = 1) -> int | None:
        """Return a setting of this section as a whole number, or None if it is missing."""
        value = self.get(key)
        return None if value is None else checked_whole(self.path(key), value, minimum=minimum)

    def number(self, key: str, default: float, *, maximum: float = 1) -> float:
        """Return a setting of this section as a number from 0 to ``maximum``."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            reject(f"{self.path(key)}: {shown(value)} is not a number: give a number")
        if not 0 <= value <= maximum:
            reject(
                f"{self.path(key)}: {value:g} is out of range: give a number from 0 to {maximum:g}"
            )
        return float(value)

    def words(self, key: str) -> list[str]:
        """Return a setting of this section as a list of strings, empty if it is missing."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            reject(f"{self.path(key)}: {shown(value)} is not a list: give [NAME, ...]")
        return [str(word) for word in value]

    def switch(self, key: str, *, default: bool = False) -> bool:
        """Return a setting of this section as True or False; strings such as "yes" and "off" are
        accepted too.
        """
        value = self.get(key, default=default)
        if isinstance(value, str):
            value = _WORDS.get(value.lower(), value)
        if value is None:
            return default
        if not isinstance(value, bool):
            reject(f"{self.path(key)}: {shown(value)} is neither true nor false: give one of them")
        return value

    def text(self, key: str, default: str = "") -> str:
        """Return a setting of this section as a string, or a default if it is missing or null."""
        value = self.get(key)
        return default if value is None else str(value)

    def choice(self, key: str, known: Iterable[str], default: str) -> str:
        """Return a setting of this section in lower case, if it is one of the ``known`` values; a
        default if it is missing.
        """
        value = self.text(key, default)
        names = tuple(known)
        if value.lower() not in names:
            reject(f"{self.path(key)}: {value!r} is unknown{near_matches(value, names)}")
        return value.lower()

    def has(self, key: str) -> bool:
        """Whether the section has this setting, and its value is not null."""
        return self.get(key) is not None

    def take_all(self) -> None:
        """Mark all settings of the section as read, so that no remark names them."""
        for key in self.content:
            self._asked.setdefault(str(key), None)

    def unsaid(self, taken: Mapping[str, str]) -> None:
        """Add a remark for each setting that affects cost but that plans cannot express; ``taken``
        maps such settings to what the prediction assumes.
        """
        for key, instead in taken.items():
            value = self.get(key)
            off = (None, False, 0, "", "none", "None", "no", "false", "False")
            if not isinstance(value, list | dict) and value in off:
                continue
            prefix = "" if isinstance(value, list | dict) or value is True else f"{value}: "
            self.found.remark("ignored", self.path(key), f"{prefix}{instead}")

    def path(self, key: str) -> str:
        """The path of a setting in its file, for messages."""
        return f"{self.name}.{key}" if self.name else key

    def tell_of_rest(self, harmless: Iterable[str]) -> None:
        """Add remarks on settings of the section and its subsections that nothing read: one for all
        in ``harmless``, the others by name.
        """
        if calm := self.tell_of_strange(harmless):
            text = f"{listed(calm)}: no effect on a step's predicted time or memory"
            self.found.remark("noted", "settings", text)

    def tell_of_strange(self, harmless: Iterable[str]) -> list[str]:
        """Add remarks on settings that nothing read, without those in ``harmless``; returns the
        paths of these.
        """
        names = frozenset(harmless)
        left = list(self._left())
        calm = [section.path(key) for section, key in left if key in names]
        strange = {
            section.path(key): section._near(key) for section, key in left if key not in names
        }
        for path, near in [*strange.items()][:MOST_NAMED]:
            text = f"is not supported here{near}: the prediction leaves it out"
            self.found.remark("ignored", path, text)
        if more := [*strange][MOST_NAMED:]:
            names_of_more = " ".join(more[:MOST_LISTED]) + " ..." * (len(more) > MOST_LISTED)
            text = f"{len(more)} more settings are not supported here: {names_of_more}"
            self.found.remark("ignored", "settings", text)
        return calm

    def _near(self, key: str) -> str:
        """A question that suggests the setting that a key of this section is a misspelling of, or
        an empty text.
        """
        from difflib import get_close_matches  # noqa: PLC0415 (only for a strange key)

        others = self._asked.keys() - self.content.keys()
        near = get_close_matches(key, others, n=1, cutoff=_NEARLY_EQUAL)
        return f"{_MISSPELT} {near[0]}?)" if near else ""

    def _left(self) -> Iterator[tuple["Section", str]]:
        """Yield section and key of each setting that has a value but that nothing read."""
        for key, value in self.content.items():
            name = str(key)
            if name in self._asked:
                section = self._asked[name]
                if section is not None:
                    yield from section._left()
            elif value is not None:
                yield self, name


def listed(names: Sequence[str], between: str = " ") -> str:
    """Join names by a separator; of many names, only their number and the first few are shown.

    >>> listed(["lr", "seed"])
    'lr seed'
    """
    if len(names) <= MOST_LISTED:
        return between.join(names)
    return f"{len(names)} settings ({' '.join(names[:MOST_LISTED])} ...)"
