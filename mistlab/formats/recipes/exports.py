"""Lists everything to which plans can be exported: frameworks, and recipes for fine-tuning."""

from collections.abc import Mapping

from mistlab.export.target import Target
from mistlab.export.targets import TARGETS
from mistlab.formats.recipes.bridge_exports import BRIDGE
from mistlab.formats.recipes.component_exports import AUTOMODEL, TORCHTUNE
from mistlab.formats.recipes.trainer_recipes import AXOLOTL, LLAMA_FACTORY, TRL

RECIPES: Mapping[str, Target] = {
    row.name: row for row in (AXOLOTL, LLAMA_FACTORY, TRL, TORCHTUNE, AUTOMODEL, BRIDGE)
}
EXPORTS: Mapping[str, Target] = {**TARGETS, **RECIPES}
