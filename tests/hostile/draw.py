"""Draws hostile inputs: a kind, a command that reads it, and what is wrong with it, by a seed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

from tests.hostile import sources, values
from tests.hostile.case import ENDLESS, FOLDER, LOOP, Case, Content
from tests.hostile.changed_data import changed
from tests.hostile.commands import COMMANDS, PROBLEM, SMALL
from tests.hostile.draw_options import option_case

SMALL_TUNE = ("--space", "3d", "--budget-evaluations", "50", "--json", "--out", "tuned.yaml")
_SIZES = ("--gpus-per-node", "2", "--sequence-length", "512", "--global-batch", "8", "--json")


def cases(seed: int) -> Iterator[Case]:
    """Hostile inputs without end; every seventh round of kinds is of options of all commands in
    turn, so that none is left out."""
    random = Random(seed)
    turn = 0
    while True:
        for drawn in _KINDS:
            if drawn is option_case:
                for _ in range(6):
                    yield _with_files(option_case(random, COMMANDS[turn % len(COMMANDS)]))
                    turn += 1
            else:
                yield _with_files(drawn(random))


def _with_files(case: Case) -> Case:
    """The case with the files that honest arguments name, and what stands in a file's place."""
    return replace(case, files={**_honest_files(), **case.files})


@cache
def _honest_files() -> Mapping[str, Content]:
    return {
        "plan.yaml": sources.as_yaml(sources.plan()),
        "single.yaml": sources.as_yaml(sources.single_plan()),
        "model.yaml": sources.as_yaml(sources.model()),
        "sweep.yaml": sources.as_yaml(sources.sweep()),
        "script.sh": sources.script().encode(),
        "runs.csv": sources.table([sources.ROW]),
        "runs/plan.yaml": sources.as_yaml(sources.single_plan()),
        "folder.yaml": FOLDER,
        "folder": FOLDER,
        "loop.yaml": LOOP,
        "loop": LOOP,
        "endless.yaml": ENDLESS,
        "brackets.yaml": b"[" * 60_000,
        "binary": bytes(range(256)) * 4,
        "binary.json": bytes(range(256)) * 4,
        "file": b"text",
    }


def _hostile_file(
    random: Random, content: Any, write: Callable[[Any], bytes]
) -> tuple[str, str, bytes, Any]:
    """A file of plain data with wrong fields, or with wrong bytes; the data if it is of fields."""
    if random.random() < 0.7:
        about, whole = changed(random, content)
        return "fields", about, write(whole), whole
    about, text = values.of_bytes(random, write(content))
    return "bytes", about, text, None


_PLAN_READERS: Sequence[tuple[str, Sequence[str]]] = (
    *([("predict", ("plan.yaml", "--json"))] * 4),
    *([("predict", ("plan.yaml", "--json", "--simulator", "events"))] * 2),
    ("predict", ("plan.yaml", "--json", "--breakdown")),
    ("predict", ("plan.yaml", "--simulator", "events", "--timeline", "drawn")),
    ("predict", ("plan.yaml", "--simulator", "events", "--variability", "jitter=0.1,samples=3")),
    *([("analyse", ("plan.yaml", "--json"))] * 2),
    *(("export", ("plan.yaml", "--to", to)) for to in ("megatron", "deepspeed", "torchtitan")),
    ("export", ("plan.yaml", "--to", "accelerate", "--json")),
    ("will_it_fit", ("plan.yaml", "--json", "--out", "out")),
    ("estimate", ("--plan", "plan.yaml", "--json", "--out", "out")),
    ("tune", ("--from", "plan.yaml", "--budget-evaluations", "50", "--json", "--out", "t.yaml")),
)


def _grown(random: Random, whole: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A plan that is consistent, and far too large in one way."""
    workload, plan, cluster = (whole[name] for name in ("workload", "plan", "cluster"))
    factor = random.choice((3, 10, 1000, 10**5, 10**7, 6 * 10**7))
    way = random.choice(("micro_batches", "micro_batch", "ranks", "layers", "stages", "sizes"))
    if way == "micro_batches":
        plan["micro_batches"] *= factor
        plan["order"] = random.choice(("1f1b", "gpipe", "zb-h1", "interleaved-2", "zb-v"))
    for stage in plan["stages"]:
        if way in ("micro_batch", "layers"):
            stage[{"layers": "layers"}.get(way, way)] *= factor
        elif way == "ranks":
            stage["data_parallel"] *= factor
            cluster["nodes"] = factor
    if way in ("micro_batches", "micro_batch", "ranks"):
        workload["global_batch"] *= factor
    elif way == "layers":
        workload["model"]["layers"] *= factor
    elif way == "stages":
        number = random.choice((3, 50, 500))
        one = {**plan["stages"][0], "layers": 1, "checkpointed_layers": 0}
        plan["stages"] = [dict(one) for _ in range(number)]
        workload["model"]["layers"], cluster["nodes"] = number, number
    else:
        sizes = {"hidden": 2**20, "heads": 2**16, "kv_heads": 2**16, "head_dim": 16, "ffn": 2**24}
        workload["model"] |= {**sizes, "vocab": 2**27}
        workload["sequence_length"] = random.choice((10**6, 10**9))
    return f"{way} times {factor}", whole


def _plan(random: Random) -> Case:
    if random.random() < 0.25:
        about, whole = _grown(random, sources.plan())
        kind, text = "sizes", sources.as_yaml(whole)
    else:
        kind, about, text, whole = _hostile_file(random, sources.plan(), sources.as_yaml)
    command, arguments = random.choice(_PLAN_READERS)
    if kind == "sizes" and "micro_batches times 100000" in about:
        # That many are played in half a minute.
        arguments = [word for word in arguments if word not in ("--simulator", "events")]
    return Case(
        command=command,
        kind=f"plan file, {kind}",
        about=about,
        arguments=arguments,
        files={"plan.yaml": text},
        echo=_echo_of_plan(whole) if command == "predict" else {},
    )


def _echo_of_plan(whole: Any) -> Mapping[str, Any]:
    """What an answer must have read of a plan file, if it has an answer."""
    workload = whole.get("workload") if isinstance(whole, dict) else None
    if not isinstance(workload, dict):
        return {}
    names = ("sequence_length", "global_batch")
    sizes = {name: workload.get(name) for name in names}
    return sizes if all(type(size) is int for size in sizes.values()) else {}


def _run_plan(random: Random) -> Case:
    """A plan file that torch runs, or traces."""
    kind, about, text, _ = _hostile_file(random, sources.single_plan(), sources.as_yaml)
    command = random.choice(("run_plan", "sanitize", "run_plans"))
    name = "runs/plan.yaml" if command == "run_plans" else "single.yaml"
    return Case(
        command=command,
        kind=f"plan file, {kind}",
        about=about,
        arguments=SMALL[command],
        files={name: text},
    )


def _hardware(random: Random) -> Case:
    kind, about, text, _ = _hostile_file(random, sources.hardware(), sources.as_yaml)
    plan = sources.plan()
    plan["cluster"]["hardware"] = "hardware.yaml"
    command, arguments = random.choice(
        (
            *([("predict", SMALL["predict"])] * 4),
            ("tune", (*PROBLEM, "--hardware", "hardware.yaml", *SMALL_TUNE)),
            ("will_it_fit", (*SMALL["will_it_fit"], "--hardware", "hardware.yaml")),
            ("estimate", (*SMALL["estimate"], "--hardware", "hardware.yaml")),
            ("predict_runs", ("runs.csv", "--json", "--hardware", "hardware.yaml")),
            ("partitions", (*SMALL["partitions"], "--hardware", "hardware.yaml")),
        )
    )
    files = {"hardware.yaml": text, "plan.yaml": sources.as_yaml(plan)}
    kind = f"hardware file, {kind}"
    return Case(command=command, kind=kind, about=about, arguments=arguments, files=files)


def _model(random: Random) -> Case:
    """A model's YAML, a configuration in JSON, or a traced model."""
    name, content, write = random.choice(
        (
            ("model.yaml", sources.model(), sources.as_yaml),
            ("config.json", sources.config(), sources.as_json),
            ("traced.json", {"spec": sources.model(), "layers": []}, sources.as_json),
        )
    )
    kind, about, text, _ = _hostile_file(random, content, write)
    plan = sources.plan()
    plan["workload"]["model"] = name
    command, arguments = random.choice(
        (
            *([("predict", SMALL["predict"])] * 2),
            ("tune", ("--model", name, *_SIZES, *SMALL_TUNE)),
            ("will_it_fit", ("--model", f"./{name}", *_SIZES, "--out", "out")),
            ("estimate", ("--model", f"./{name}", *_SIZES, "--nodes", "1", "--out", "out")),
            ("partitions", ("--model", f"./{name}", *SMALL["partitions"])),
            ("space_size", ("--model", f"./{name}", *_SIZES, "--quick", "--out", "out")),
            ("ladder", ("--model", f"./{name}", *_SIZES, "--quick", "--out", "out")),
        )
    )
    files = {name: text, "plan.yaml": sources.as_yaml(plan)}
    kind = f"model, {kind}"
    return Case(command=command, kind=kind, about=about, arguments=arguments, files=files)


_CELLS = (
    *("", " ", "0", "-1", "1.5", "7", "61", "999999999", "1e9", "1e30", "inf", "nan", "1.5 s"),
    *("80 GB", "8x", "٣", "1_000", "é", "yes", "none", "None", "L40S", "H1000", "x" * 70_000),
    *("a\nb", 'a"b', "a,b", "\0", "ZB-V", "fsdp", "zero bubble schedule ZB-1p", "selective", "fp8"),
)


def _table(random: Random) -> Case:
    """A table of measured runs with wrong cells, or wrong bytes."""
    if random.random() < 0.75:
        rows, told = [dict(sources.ROW) for _ in range(2)], []
        for _ in range(random.choice((1, 1, 2, 3))):
            column = random.choice([*sources.ROW])
            rows[0][column] = random.choice(_CELLS)
            told.append(f"{column}: {rows[0][column][:40]!r}")
        kind, about, text = "cells", "; ".join(told), sources.table([*rows])
    else:
        kind = "bytes"
        about, text = values.of_bytes(random, sources.table([sources.ROW, sources.ROW]))
    commands = ("predict_runs", "predict_runs", "predict_runs", "report_runs", "calibrate_runs")
    command = random.choice(commands)
    return Case(
        command=command,
        kind=f"table of runs, {kind}",
        about=about,
        arguments=SMALL[command],
        files={"runs.csv": text},
    )


def _script(random: Random) -> Case:
    """A launch script with wrong numbers, options or bytes."""
    text = sources.script()
    if random.random() < 0.7:
        words = text.split(" ")
        at = random.choice([n for n, word in enumerate(words) if word.strip().strip("\n")])
        new = random.choice([*_CELLS, "$NONE", "$(date)", "${X:-}", "$((1/0))", "'", '"', "\\"])
        about = f"{words[at].strip()[:30]!r} is {new[:40]!r}"
        words[at] = new + ("\n" if "\n" in words[at] else "")
        kind, content = "words", " ".join(words).encode("utf-8", "surrogatepass")
    else:
        kind = "bytes"
        about, content = values.of_bytes(random, text.encode())
    return Case(
        command="import_plan",
        kind=f"launch script, {kind}",
        about=about,
        arguments=SMALL["import_plan"],
        files={"script.sh": content},
    )


def _search_file(random: Random) -> Case:
    """A space, or a sweep."""
    if random.random() < 0.6:
        kind, about, text, _ = _hostile_file(random, sources.space(), sources.as_yaml)
        arguments = (*PROBLEM, *SMALL_TUNE, "--space", "space.yaml")
        files: Mapping[str, Content] = {"space.yaml": text}
        return Case(
            command="tune", kind=f"space, {kind}", about=about, arguments=arguments, files=files
        )
    kind, about, text, _ = _hostile_file(random, sources.sweep(), sources.as_yaml)
    return Case(
        command="sweep",
        kind=f"sweep, {kind}",
        about=about,
        arguments=SMALL["sweep"],
        files={"sweep.yaml": text},
    )


ORDER = "0: F0 F1 F2 B0 B1 B2\n1: F0 B0 F1 B1 F2 B2\n"


def _kept(random: Random) -> Case:
    """Files that an earlier run left in the folder of results, or an order's file."""
    if random.random() < 0.4:
        plan = sources.plan()
        plan["plan"]["order"] = "./order.txt"
        about, text = values.of_bytes(random, ORDER.encode())
        return Case(
            command="predict",
            kind="order file, bytes",
            about=about,
            arguments=SMALL["predict"],
            files={"order.txt": text, "plan.yaml": sources.as_yaml(plan)},
        )
    about, config = values.of_bytes(random, b'{"command": "partitions", "options": {}}')
    _, rows = values.of_bytes(random, b'{"chain": "three products"}\n{"chain": 1}\n')
    command = random.choice(("partitions", "compare_searchers", "run_plans", "will_it_fit"))
    return Case(
        command=command,
        kind="earlier results, bytes",
        about=about,
        arguments=SMALL[command],
        files={"out/config.json": config, "out/rows.jsonl": rows, "runs/runs.jsonl": rows},
    )


_KINDS: Sequence[Callable[..., Case]] = (
    *(_plan, _hardware, _model, _table, _script, _search_file, _plan, _kept, option_case),
    *(_table, _plan, _model, option_case, _run_plan),
)
