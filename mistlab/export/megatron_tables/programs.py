"""Programs of Megatron-LM and its relatives by name: which train a decoder, which do not."""

import re
from collections.abc import Mapping
from pathlib import PurePath

# Parts of a program's path, and why it is no pre-training of a decoder.
_OTHERS: Mapping[str, str] = {
    r"bert|biencoder|realm|\bict\b": "trains an encoder",
    r"\bt5\b|ul2": "trains an encoder beside a decoder",
    r"retro": "trains with retrieved text",
    r"vlm|llava|\bvl\b|\d+vl\b|vision|\bvit\b|clip|dino|multimodal|mimo|omni|videochat|internvl": (
        "trains an encoder of images beside a decoder"
    ),
    r"whisper|audio|speech|\btts\b": "trains on sound",
    r"diffusion|\bdit\b|sora|\bwan\b|opensora": "trains a model of images",
    r"\bdpo\b|\bppo\b|grpo|rlhf|\brl\b|reward|\borm\b|\bprm\b|simpo": "trains by preferences",
    r"distill|\bkd\b|teacher": "trains beside a teacher",
    r"generat|inference|\binfer\b|serve|server|deploy|quantiz|\bptq\b|prune": "trains nothing",
    r"\beval\w*|benchmark_tasks|tasks\b|mmlu|harness": "evaluates, and trains nothing",
    r"convert\w*|checkpoint|preprocess|merge|\butil": "prepares files, and trains nothing",
    r"classif": "trains a classifier",
}
_DECODERS = re.compile(
    r"gpt|llama|mamba|hybrid|mistral|mixtral|qwen|deepseek|bloom|falcon|baichuan|starcoder|galactica"
    r"|chatglm|glm|\byi\b|yuan|moonlight|gemma|phi|olmo|opt|internlm|nemotron|codellama|moe|\blm\b"
    r"|grok|granite|gpt2"
)
_PLAIN = frozenset(("finetune", "sft", "posttrain", "pretrain"))


def refusal_of(program: str) -> str | None:
    """Why a program is no pre-training of a decoder; None where it may be one."""
    for part in _parts_of(program):
        for pattern, reason in _OTHERS.items():
            if re.search(pattern, part):
                return reason
    return None


def is_decoder(program: str) -> bool:
    """Whether a program is known to train a decoder."""
    name = _parts_of(program)[0]
    return bool(_DECODERS.search(name)) or name in _PLAIN


def _parts_of(program: str) -> list[str]:
    """The words of the program's own name, and of the folder or package right above it."""
    path = PurePath(program)
    parts = [*path.parts[:-1], path.stem] if path.suffix == ".py" else program.split(".")
    return [re.sub(r"[_\-.]", " ", part.lower()) for part in reversed(parts[-2:])]
