"""Lists the keys that recipes write and that a framework's classes have, with their types.

``python -m tests.mistlab.recipes.recipe_keys trl=CHECKOUT ...`` reads the classes of git checkouts
and of the installed transformers, and writes the list, ``recipe_keys.yaml``. A key that a recipe
writes and no class has is not in the list: the tests tell it.
"""

import argparse
import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from mistlab.core.files import format_yaml
from mistlab.formats.recipes.bridge_exports import DECIDED
from mistlab.formats.recipes.component_exports import BUILDERS
from mistlab.formats.recipes.exports import RECIPES
from tests.mistlab.recipes.drawn_recipes import drawn_recipes

LIST = Path(__file__).parent / "recipe_keys.yaml"
# So many drawn plans have every key that a framework's recipes may have; tests take as many.
PLANS, SEED = 60, 7
# Marks the modules of installed packages.
INSTALLED = "@"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a framework says which keys it has: its version's file and what to read there, and for
    each section of a recipe (the top has no name) the places of its classes and functions.

    A place is ``PATH NAME``, or ``@MODULE NAME`` of an installed package. Fields of a class and
    parameters of a function are keys; of a function whose name has a colon behind it, what it reads
    of the variable named there.
    """

    version: tuple[str, str]
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_SCHEMAS = "src/axolotl/utils/schemas"
_HPARAMS = "src/llamafactory/hparams"
_ARGUMENTS = "@transformers.training_args TrainingArguments"
_FSDP = f"{_ARGUMENTS}._process_fsdp_args:self.fsdp_config"
_LLAMA3 = "torchtune/models/llama3/_model_builders.py"
_COMPONENT = "torchtune/config/_instantiate.py _create_component"
_AUTOMODEL = "nemo_automodel"
_PARTS = f"{_AUTOMODEL}/components"
_TRAINS = f"{_AUTOMODEL}/recipes/llm/train_ft.py TrainFinetuneRecipeForNextTokenPrediction.setup"
_INSTANTIATED = f"{_PARTS}/config/loader.py ConfigNode.instantiate:self"
_BRIDGE = "src/megatron/bridge"
_REDUCES = "@megatron.core.distributed.distributed_data_parallel_config"
_ADAMW = "@torch.optim.adamw AdamW.__init__"
SOURCES: Mapping[str, Source] = {
    "axolotl": Source(
        version=("VERSION", r"([\d.]+\w*)"),
        places={
            "": (
                f"{_SCHEMAS}/config.py AxolotlInputConfig",
                f"{_SCHEMAS}/training.py HyperparametersConfig",
                f"{_SCHEMAS}/peft.py LoraConfig",
                f"{_SCHEMAS}/model.py ModelInputConfig",
                "src/axolotl/integrations/liger/args.py LigerArgs",
            ),
            "fsdp_config": (f"{_SCHEMAS}/fsdp.py FSDPConfig",),
        },
    ),
    "llama-factory": Source(
        version=("src/llamafactory/extras/env.py", r'VERSION = "(.*)"'),
        places={
            "": (
                f"{_HPARAMS}/model_args.py BaseModelArguments",
                f"{_HPARAMS}/model_args.py QuantizationArguments",
                f"{_HPARAMS}/data_args.py DataArguments",
                f"{_HPARAMS}/finetuning_args.py FinetuningArguments",
                f"{_HPARAMS}/finetuning_args.py LoraArguments",
                _ARGUMENTS,
            ),
            "fsdp_config": (_FSDP,),
        },
    ),
    "trl": Source(
        version=("VERSION", r"([\d.]+\w*)"),
        places={
            "": (
                "trl/trainer/sft_config.py SFTConfig",
                "trl/trainer/model_config.py ModelConfig",
                _ARGUMENTS,
            ),
            "fsdp_config": (_FSDP,),
        },
    ),
    "torchtune": Source(
        version=("version.txt", r"([\d.]+\w*)"),
        places={
            "": (
                "recipes/full_finetune_distributed.py FullFinetuneRecipeDistributed:cfg",
                "recipes/lora_finetune_distributed.py LoRAFinetuneRecipeDistributed:cfg",
            ),
            "model": (f"{_LLAMA3} lora_llama3_8b", _COMPONENT),
            "tokenizer": (f"{_LLAMA3} llama3_tokenizer", _COMPONENT),
            "dataset": ("torchtune/datasets/_alpaca.py alpaca_dataset",),
            "optimizer": (_COMPONENT, _ADAMW),
            "loss": (
                _COMPONENT,
                "torchtune/modules/loss/cross_entropy_loss.py LinearCrossEntropyLoss.__init__",
            ),
        },
    ),
    "megatron-bridge": Source(
        version=("src/megatron/bridge/package_info.py", r"(?:MAJOR|MINOR|PATCH) = (\d+)"),
        places={
            "": (f"{_BRIDGE}/training/config.py ConfigContainer",),
            "model": (
                f"{_BRIDGE}/models/gpt_provider.py GPTModelProvider",
                "@megatron.core.transformer.transformer_config TransformerConfig",
                "@megatron.core.model_parallel_config ModelParallelConfig",
            ),
            "train": (f"{_BRIDGE}/training/config.py ConfigContainer:self.train",),
            "ddp": (f"{_REDUCES} DistributedDataParallelConfig",),
            "optimizer": ("@megatron.core.optimizer.optimizer_config OptimizerConfig",),
            "dataset": (f"{_BRIDGE}/training/config.py GPTDatasetConfig",),
            "peft": (
                f"{_BRIDGE}/peft/lora.py LoRA",
                f"{_BRIDGE}/peft/module_matcher.py ModuleMatcher",
            ),
        },
    ),
    "automodel": Source(
        version=("nemo_automodel/package_info.py", r"(?:MAJOR|MINOR|PATCH) = (\d+)"),
        places={
            "": (
                f"{_AUTOMODEL}/recipes/_typed_config.py RecipeConfig:self._raw",
                f"{_TRAINS}:self.cfg",
                f"{_AUTOMODEL}/recipes/_dist_utils.py _distributed_cfg_to_dict:cfg",
                f"{_AUTOMODEL}/cli/app.py main:config",
            ),
            "step_scheduler": (f"{_PARTS}/training/step_scheduler.py StepScheduler.__init__",),
            "model": (
                f"{_AUTOMODEL}/_transformers/auto_model.py from_pretrained",
                _INSTANTIATED,
            ),
            "peft": (f"{_PARTS}/_peft/lora.py PeftConfig", _INSTANTIATED),
            "quantization": (f"{_PARTS}/quantization/qlora.py create_bnb_config:config",),
            "distributed": (
                f"{_PARTS}/distributed/config.py FSDP2Config",
                f"{_PARTS}/distributed/config.py DDPConfig",
                f"{_PARTS}/distributed/mesh.py ParallelismSizes",
                f"{_AUTOMODEL}/recipes/_dist_utils.py parse_distributed_section:cfg",
            ),
            "distributed.mp_policy": (
                "@torch.distributed.fsdp._fully_shard._fsdp_api MixedPrecisionPolicy",
                f"{_AUTOMODEL}/recipes/_dist_utils.py parse_distributed_section:mp_raw",
            ),
            "distributed.offload_policy": (
                f"{_AUTOMODEL}/recipes/_dist_utils.py parse_distributed_section:op_raw",
            ),
            "dataset": (f"{_PARTS}/datasets/llm/squad.py make_squad_dataset",),
            "optimizer": (_INSTANTIATED,),
            "loss_fn": (_INSTANTIATED,),
        },
    ),
}


@cache
def written_keys(name: str) -> Mapping[str, tuple[Any, ...]]:
    """Every key that a framework's recipes have over drawn plans, by its path, with its values."""
    found: dict[str, list[Any]] = {}
    target = RECIPES[name]
    for job in drawn_recipes(target, PLANS, SEED):
        for path, value in paths_of(yaml.safe_load(target.write(job))):
            if value not in found.setdefault(path, []):
                found[path].append(value)
    if name == "megatron-bridge":
        for section, names in DECIDED.items():
            for key in names:
                found.setdefault(f"{section}.{key}", [])
    return {path: tuple(values) for path, values in found.items()}


def paths_of(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a recipe by their paths, with their values; sections count as keys too."""
    for key, value in content.items():
        path = f"{above}.{key}".lstrip(".")
        yield path, value
        if isinstance(value, Mapping):
            yield from paths_of(value, path)


def keys_of(name: str, checkout: str) -> dict[str, str]:
    """The written keys that the framework of a checkout has, each with its type as declared."""
    source = SOURCES[name]
    known: dict[str, str] = {}
    for section, places in source.places.items():
        for place in places:
            for key, kind in _declared(place, checkout):
                where = f"{section}.{key}".lstrip(".")
                known[where] = known.get(where) or kind
    return {path: known[path] for path in sorted(written_keys(name)) if path in known}


def _declared(place: str, checkout: str) -> Iterator[tuple[str, str]]:
    """The keys that a class or function declares, or that a function reads of a variable."""
    path, name = place.split()
    name, _, variable = name.partition(":")
    if path.startswith(INSTALLED):
        text = inspect.getsource(import_module(path.removeprefix(INSTALLED)))
    else:
        text = _shown(checkout, path)
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        node = next(one for one in ast.walk(node) if getattr(one, "name", None) == part)
    if variable:
        start = re.escape(variable)
        reads = rf'{start}(?:\.get\(|\.pop\(|\[)\s*"([\w.]+)"|\b{start}\.(\w+)\b'
        for quoted, plain in re.findall(reads, ast.unparse(node).replace("'", '"')):
            yield quoted or plain, ""
    elif isinstance(node, ast.ClassDef):
        for entry in node.body:
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                yield entry.target.id, ast.unparse(entry.annotation)
    else:
        assert isinstance(node, ast.FunctionDef)
        for argument in (*node.args.args, *node.args.kwonlyargs):
            kind = argument.annotation
            yield argument.arg, "" if kind is None else ast.unparse(kind)


def _shown(checkout: str, path: str) -> str:
    return _git(checkout, "show", f"HEAD:{path}")


def _git(checkout: str, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", checkout, *words], check=True, capture_output=True, text=True
    ).stdout


def components_of(name: str) -> set[str]:
    """The framework's own classes and functions that its recipes name, by their paths."""
    values = {str(value) for values in written_keys(name).values() for value in values}
    package = {"torchtune": "torchtune.", "automodel": "nemo_automodel."}.get(name, "?")
    named = {value for value in values if value.startswith(package)}
    if name == "megatron-bridge":
        named = set(map(str, filter(None, written_keys(name)["mixed_precision"])))
    if name == "torchtune":
        for place in BUILDERS.values():
            module, _, builder = place.partition(".")
            named |= {f"torchtune.models.{module}.{start}{builder}" for start in ("", "lora_")}
    return named


def _known_components(name: str, checkout: str) -> list[str]:
    """Those of the recipes' components that a checkout defines."""
    return [path for path in sorted(components_of(name)) if _is_defined(path, checkout)]


def _is_defined(path: str, checkout: str) -> bool:
    words = path.split(".")
    # A class's method is looked for as the class; a model's module is a folder.
    name = words[-2] if words[-1] == "from_pretrained" else words[-1]
    folder = "/".join(words[:3]) if words[1:2] == ["models"] else words[0]
    folder = _BRIDGE if len(words) == 1 else folder
    command = ["git", "-C", checkout, "grep", "-qE", rf"^(def|class) {name}\b", "HEAD"]
    command += ["--", folder]
    return subprocess.run(command, check=False).returncode == 0


def entry_of(name: str, checkout: str) -> dict[str, Any]:
    """The list's entry of a framework: version, commit and its date, and the keys by type."""
    path, pattern = SOURCES[name].version
    version = ".".join(re.findall(pattern, _shown(checkout, path)))
    commit, date = _git(checkout, "log", "-1", "--format=%h %cs").split()
    return {
        "version": version,
        "commit": commit,
        "date": date,
        "keys": keys_of(name, checkout),
        "components": _known_components(name, checkout),
    }


def main() -> int:
    """Write the list again, with new entries for the frameworks whose checkouts are given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="+", metavar="NAME=CHECKOUT")
    options = parser.parse_args()
    entries = yaml.safe_load(LIST.read_text(encoding="utf-8")) or {}
    for word in options.checkouts:
        name, _, checkout = word.partition("=")
        entries[name] = entry_of(name, checkout)
    transformers = import_module("transformers").__version__
    head = (
        "# Written by python -m tests.mistlab.recipes.recipe_keys: names and types of settings in\n"
        f"# the frameworks' classes and in transformers {transformers}.\n"
    )
    LIST.write_text(head + format_yaml(dict(sorted(entries.items()))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
