"""Lists everything to which plans can be exported: frameworks, and recipes for fine-tuning."""

from collections.abc import Mapping
from contextlib import suppress

from mistlab.core.values import InputError
from mistlab.export.nearest import nearest
from mistlab.export.target import Target
from mistlab.export.targets import TARGETS, target_for
from mistlab.formats.recipes.bridge_exports import BRIDGE
from mistlab.formats.recipes.component_exports import AUTOMODEL, TORCHTUNE
from mistlab.formats.recipes.trainer_recipes import AXOLOTL, LLAMA_FACTORY, TRL
from mistlab.job.job import Job

RECIPES: Mapping[str, Target] = {
    row.name: row for row in (AXOLOTL, LLAMA_FACTORY, TRL, TORCHTUNE, AUTOMODEL, BRIDGE)
}
EXPORTS: Mapping[str, Target] = {**TARGETS, **RECIPES}


def target_of(job: Job) -> Target:
    """The target to which a job is exported if none is named: the framework that its engine models
    or, if it trains adapters, the first recipe that can express its plan.
    """
    if job.workload.train == "all":
        return target_for(job.plan.engine)
    for recipe in RECIPES.values():
        with suppress(InputError):
            nearest(job, recipe)
            return recipe
    return AXOLOTL
