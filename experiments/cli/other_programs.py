"""What users of other training programs may type, with what they give here in its place: values of
options, names of options, and ways to train that are not modelled.
"""

import re
from collections.abc import Collection, Mapping

from mistlab.core.values import did_you_mean

# The values that fine-tuning programs use for an option, each with the options that mean the same
# here.
OWN_WORDS: Mapping[tuple[str, str], str] = {
    ("--train", "qlora"): "--train lora --base 4bit",
    ("--train", "dora"): "--train lora (without its norms of columns)",
    **{("--train", word): "--train all" for word in ("full", "fft", "sft")},
    **{("--base", word): "--base 4bit" for word in ("4", "nf4", "fp4", "int4", "bnb")},
    **{("--base", word): "--base 8bit" for word in ("8", "int8")},
    **{("--base", word): "--base 16bit" for word in ("16", "bf16", "fp16")},
    **{("--precision", word): "--precision bf16" for word in ("bfloat16", "bf")},
    **{("--precision", word): "--precision fp16" for word in ("float16", "half", "16")},
    **{("--precision", word): "--precision fp32" for word in ("float32", "float", "32")},
    **{("--precision", word): "--train lora --base 4bit" for word in ("4bit", "int4", "nf4")},
    **{("--precision", word): "--train lora --base 8bit" for word in ("8bit", "int8")},
    **{("--loss", word): "--loss chunked" for word in ("fused", "liger", "chunk", "cce")},
    **{
        ("--engine", word): "--engine trainer"
        for word in (
            *("trl", "axolotl", "llama-factory", "transformers", "huggingface", "hf", "peft"),
            *("ms-swift", "swift", "llamafactory", "accelerate"),
        )
    },
    **{
        ("--engine", word): "--engine fsdp"
        for word in ("torchtune", "automodel", "torchtitan", "pytorch", "torch", "fsdp2")
    },
    **{("--to", word): "--to trl" for word in ("unsloth", "hf", "huggingface", "transformers")},
    **{("--to", word): "--to megatron" for word in ("megatron-lm", "megatron-core")},
    ("--to", "nemo"): "--to megatron-bridge",
    ("--to", "llamafactory"): "--to llama-factory",
    **{("--to", word): "--to accelerate" for word in ("fsdp", "fsdp2", "pytorch")},
    ("--engine", "megatron-lm"): "--engine megatron-core",
    ("--engine", "nemo"): "--engine megatron-bridge",
    ("--engine", "unsloth"): "--engine trainer-fused",
    ("--engine", "litgpt"): "--engine trainer-loop",
    **{
        ("--attention", word): "--attention flash"
        for word in ("sdpa", "fa2", "fa3", "flash2", "flash_attention_2", "flash-attn")
    },
    ("--attention", "eager"): "--attention math",
    **{("--states", word): "--states 16bit" for word in ("16", "bf16", "fp16")},
    **dict.fromkeys(
        [("--optimizer", f"{word}_8bit") for word in ("adamw", "adamw_bnb", "paged_adamw")],
        "--optimizer adamw-8bit",
    ),
    **dict.fromkeys(
        [
            ("--optimizer", word)
            for word in (
                "adamw_torch",
                "adamw_torch_fused",
                "adamw_hf",
                "paged_adamw_32bit",
                "adam",
            )
        ],
        "--optimizer adamw",
    ),
}
# Options of other programs, each with the option here that has its meaning.
OWN_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("--batch-size", "--bs", "--batch", "--train-batch-size", "--global-batch-size"),
        "--global-batch",
    ),
    **dict.fromkeys(("--gpus", "--num-gpus", "--ngpus", "--n-gpus"), "--gpus-per-node"),
    **dict.fromkeys(
        (
            *("--seq-len", "--seq-length", "--seqlen", "--max-length", "--max-seq-length"),
            *("--context", "--context-length", "--cutoff-len", "--length", "--block-size"),
        ),
        "--sequence-length",
    ),
    **dict.fromkeys(("--gpu", "--device", "--gpu-type", "--card"), "--hardware"),
    **dict.fromkeys(("--dtype", "--torch-dtype", "--mixed-precision"), "--precision"),
    **dict.fromkeys(("--bf16", "--fp16"), "--precision"),
    **dict.fromkeys(("--quantization", "--quantize", "--bits"), "--base"),
    **dict.fromkeys(("--load-in-4bit", "--qlora", "--4bit"), "--train lora --base 4bit"),
    **dict.fromkeys(("--load-in-8bit", "--8bit"), "--train lora --base 8bit"),
    **dict.fromkeys(("--lora", "--peft", "--use-peft", "--adapters"), "--train lora"),
    **dict.fromkeys(("--lora-target", "--lora-target-modules"), "--adapter-targets"),
    **dict.fromkeys(("--optim", "--adam"), "--optimizer"),
    **dict.fromkeys(("--use-liger-kernel", "--liger", "--cut-cross-entropy"), "--loss chunked"),
    **dict.fromkeys(("--flash-attn", "--flash-attention"), "--attention flash"),
    **dict.fromkeys(("--lora-r", "--lora-rank", "--r", "--adapter-rank"), "--rank"),
    **dict.fromkeys(("--model-name", "--model-name-or-path", "--base-model"), "--model"),
    **dict.fromkeys(("--framework", "--system", "--backend"), "--engine"),
    **dict.fromkeys(("--num-epochs", "--num-train-epochs"), "--epochs"),
    **dict.fromkeys(("--num-samples", "--examples"), "--samples"),
    **dict.fromkeys(("--deadline", "--until"), "--by"),
    **dict.fromkeys(("--budget-usd", "--max-cost", "--max-price"), "--under"),
}
# What users may call a command, with the command line that is meant.
COMMANDS_HERE: Mapping[str, str] = {
    "explain": "predict PLAN.yaml --breakdown",
    "solve": "predict PLAN.yaml --solve",
    "simulate": "predict PLAN.yaml --simulator events",
    **dict.fromkeys(("memory", "vram", "fit", "fits"), "will_it_fit"),
    **dict.fromkeys(("cost", "price", "time"), "estimate"),
    **dict.fromkeys(("search", "plan", "optimize", "autotune"), "tune"),
    **dict.fromkeys(("train", "finetune", "sft", "run"), "run_plan PLAN.yaml"),
    **dict.fromkeys(("import", "convert"), "import_plan FILE"),
}
# What the option here takes in place of another program's, where its value is no longer the same.
_OTHERWISE = {
    "--global-batch": ", the sequences of a whole step",
}
# Options of other programs that set what a search chooses.
_CHOSEN = frozenset(
    (
        *("--micro-batch", "--micro-batch-size", "--per-device-train-batch-size", "--mbs"),
        *("--gradient-accumulation-steps", "--grad-accumulation", "--micro-batches"),
        *("--tensor-parallel", "--tensor-parallel-size", "--tensor-model-parallel-size", "--tp"),
        *("--pipeline-parallel", "--pipeline-model-parallel-size", "--pipeline", "--pp"),
        *("--data-parallel", "--dp", "--context-parallel", "--cp", "--expert-parallel", "--ep"),
        *("--zero", "--zero-stage", "--gradient-checkpointing", "--recompute", "--offload"),
    )
)
# Options of other programs that no command here needs, each with the reason.
_NEEDLESS = {
    **dict.fromkeys(
        ("--lora-alpha", "--alpha", "--learning-rate", "--lr", "--warmup-steps", "--weight-decay"),
        "it has no effect on a step's time and memory: leave it out",
    ),
    **dict.fromkeys(
        ("--lora-dropout", "--dropout"),
        "dropout of adapters is not modelled, that of a model is the model's: leave it out",
    ),
    **dict.fromkeys(
        ("--packing", "--sample-packing"), "all sequences are counted as full: leave it out"
    ),
    **dict.fromkeys(
        ("--epochs", "--num-epochs", "--num-train-epochs", "--samples", "--tokens"),
        "give it to estimate, with --plan",
    ),
}
# Options of the problem, which predict takes from the plan's file.
_OF_PLANS = frozenset(
    (
        *("--hardware", "--nodes", "--gpus-per-node", "--model", "--sequence-length", "--train"),
        *("--global-batch", "--precision", "--engine", "--base", "--rank", "--loss", "--optimizer"),
    )
)
# Options that some commands have, each with what others have in their place.
_ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "--engine": ("--space", "give --space, such as fsdp or trainer, which has its engine"),
}
# Options whose value is a way to train, in other programs.
_WAYS = frozenset(
    (
        *("--rl", "--stage", "--method", "--trainer", "--trainer-type", "--train-type"),
        *("--rlhf-type", "--rl-type", "--training-type", "--algorithm", "--algo", "--objective"),
        *("--task", "--task-type", "--loss-type"),
    )
)
# Ways to train by preferences or rewards, and programs' names for them.
_REINFORCED = re.compile(
    r"(dpo|grpo|ppo|kto|orpo|cpo|simpo|ipo|gkd|rloo|rlhf|rlvr|rl|reward|rm)(_?trainer)?", re.I
)


def not_modelled(word: str) -> str:
    """Tell that a word names training by preferences or rewards, and what to give instead; an empty
    text for any other word.

    >>> not_modelled("GRPO").partition(":")[0]
    'GRPO trains by preferences or rewards, which is not modelled'
    """
    if _REINFORCED.fullmatch(word) is None:
        return ""
    return (
        f"{word} trains by preferences or rewards, which is not modelled: mistlab tune --train all "
        "or --train lora predicts training by next-token prediction, without the reference model, "
        "reward model and generated samples of such a run"
    )


def command_here(name: str) -> str:
    """Tell what to give in place of an unknown command; an empty text if that is unknown."""
    if ours := COMMANDS_HERE.get(name.lower()):
        return f"give {ours}"
    return not_modelled(name)


def value_here(option: str, value: str) -> str:
    """Tell what an option takes in place of a value of other programs; an empty text if that is
    unknown.
    """
    if ours := OWN_WORDS.get((option, value.lower())):
        return f"{value} is {ours} here"
    if option == "--adapter-targets" and "_proj" in value:
        ours = "all" if re.search(r"gate|up_|down", value) else "attention"
        return f"{value} is nearest to --adapter-targets {ours}: layers are not chosen one by one"
    return not_modelled(value)


def option_here(unknown: str, known: Collection[str]) -> str:
    """Tell which of a command's ``known`` options the user may mean by an unknown one; an empty
    text if none is like it. ``unknown`` is the option and what follows it.
    """
    name, *values = unknown.replace("=", " ").split(" ")
    name = name.replace("_", "-")
    if text := _instead_of(name, known):
        return text
    for word in (name.lstrip("-"), *(values if name in _WAYS else ())):
        if text := not_modelled(word):
            return text
    bare = {option.lstrip("-"): option for option in known if option != "--help"}
    meant = did_you_mean(name.lstrip("-"), bare) if name.startswith("--") else ""
    return re.sub("'([^']+)'", r"'--\1'", meant)


def _instead_of(name: str, known: Collection[str]) -> str:
    """Tell what a command with the ``known`` options takes in place of another program's option; an
    empty text if that is unknown.
    """
    ours = OWN_OPTIONS.get(name, "")
    needed, advice = _ELSEWHERE.get(name, ("", ""))
    texts = {
        f"give {ours}{_OTHERWISE.get(ours, '')}": ours.partition(" ")[0] in known,
        "the search chooses it: to limit what it may choose, give --space a YAML file "
        "(docs/reference/spaces.md)": name in _CHOSEN and "--space" in known,
        "the plan's file has it: give another file, or ask will_it_fit, which takes --hardware "
        "beside a plan": "--breakdown" in known and (ours or name).partition(" ")[0] in _OF_PLANS,
        _NEEDLESS.get(name, ""): name not in known,
        advice: needed in known,
    }
    return next((text for text, is_meant in texts.items() if text and is_meant), "")
