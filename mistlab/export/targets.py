"""Lists all target frameworks by name; a new target is a module with its rules, and a name here."""

from mistlab.export.accelerate import ACCELERATE
from mistlab.export.deepspeed import DEEPSPEED
from mistlab.export.megatron.megatron_write import MEGATRON
from mistlab.export.target import Target
from mistlab.export.torchtitan_write import TORCHTITAN, TORCHTITAN_TOML

TARGETS: dict[str, Target] = {
    row.name: row for row in (MEGATRON, DEEPSPEED, TORCHTITAN, TORCHTITAN_TOML, ACCELERATE)
}


def target_for(engine: str) -> Target:
    """Return the target framework that an engine models, or Megatron-LM if the engine models
    none.
    """
    targets = (row for row in TARGETS.values() if engine in (row.engines[0], *row.own_engines))
    return next(targets, MEGATRON)
