"""Lists the arguments of Hugging Face's Trainer, and of tools built on it, by their effect on cost.

They are those of transformers' ``TrainingArguments``, TRL's configurations, LLaMA-Factory and
axolotl (2026).
"""

from collections.abc import Mapping

from mistlab.export.found import harmless_names

# Trainer arguments that do not affect the predicted cost of a step.
HARMLESS = harmless_names("hf_trainer")
# Prefixes of further Trainer arguments that do not affect the predicted cost of a step.
CALM = harmless_names("hf_trainer_beginnings")
# Trainer arguments that affect the cost of a step but that plans cannot express, each with what the
# prediction assumes instead.
UNSAID: Mapping[str, str] = {
    "use_liger_kernel": "the loss is predicted in chunks, all other kernels as the model's own",
    "use_liger": "the loss is predicted in chunks, all other kernels as the model's own",
    "enable_liger_kernel": "the loss is predicted in chunks, all other kernels as the model's own",
    "chunked_cross_entropy": "logits of all tokens are predicted at once: this loss widens them in "
    "chunks, but keeps all of them in 16 bits",
    "auto_find_batch_size": "the batch size is predicted as given",
    "activation_offloading": "activations are predicted to stay on the GPU",
    "torch_compile_mode": "predicted as torch.compile's default mode",
    "use_reentrant_gc": "",
    "use_dora": "adapters are predicted without DoRA's norms of whole weights",
    "peft_use_dora": "adapters are predicted without DoRA's norms of whole weights",
    "lora_use_dora": "adapters are predicted without DoRA's norms of whole weights",
    "lora_head": "the head is predicted without an adapter",
    "spectrum_config_path": "all weights are predicted as trained",
    "tune_mm_mlp_adapter": "all weights are predicted as trained",
    "freeze_trainable_layers": "all weights are predicted as trained",
    "freeze_backbone": "all weights are predicted as trained",
    "unfrozen_parameters": "all weights are predicted as trained",
    "use_lisa": "all weights are predicted as trained",
    "use_galore": "the optimizer is predicted as AdamW",
    "use_apollo": "the optimizer is predicted as AdamW",
    "use_badam": "the optimizer is predicted as AdamW",
    "use_adam_mini": "the optimizer is predicted as AdamW",
    "use_muon": "the optimizer is predicted as AdamW",
    "neat_packing": "attention is predicted over whole sequences",
    "shift_attn": "attention is predicted over whole sequences",
    "train_from_scratch": "",
    "sliding_window": "attention is predicted by the model's own window",
    "moe_aux_loss_coef": "",
    "router_aux_loss_coef": "",
}
# Arguments that tell that a run does not train a text decoder by next-token prediction, each with
# what it trains instead.
OTHERS: Mapping[str, str] = {
    "rank": "adapters only",
    "vision_tower": "a vision-language model",
    "vision_tower_lr": "a vision-language model",
    "tune_vision_tower": "a vision-language model",
    "freeze_vision_tower": "a vision-language model",
    "freeze_vit": "a vision-language model",
    "freeze_aligner": "a vision-language model",
    "vit_gradient_checkpointing": "a vision-language model",
    "mm_vision_tower": "a vision-language model",
    "mm_projector_type": "a vision-language model",
    "vision_model_name_or_path": "a vision-language model",
    "image_folder": "a vision-language model",
    "num_generations": "by reinforcement learning (GRPO), which generates text",
    "rloo_k": "by reinforcement learning (RLOO), which generates text",
    "reward_funcs": "by reinforcement learning, which generates text",
    "reward_model": "by reinforcement learning, which generates text",
    "reward_model_path": "by reinforcement learning, which generates text",
    "beta": "by preferences (DPO and its relatives), beside a reference model",
    "pref_beta": "by preferences (DPO and its relatives), beside a reference model",
    "desirable_weight": "by preferences (KTO), beside a reference model",
    "rl": "by preferences or reinforcement",
    "teacher_model_name_or_path": "by distillation from another model",
}
# Words in program names that tell that a run does not train by next-token prediction, each with
# what it trains instead.
PROGRAMS: Mapping[str, str] = {
    "qlora": "adapters on a quantised base, but no argument gives their rank or its bits",
    "dpo": OTHERS["beta"],
    "orpo": "by preferences (ORPO)",
    "simpo": "by preferences (SimPO)",
    "kto": OTHERS["desirable_weight"],
    "cpo": "by preferences (CPO)",
    "grpo": OTHERS["num_generations"],
    "ppo": "by reinforcement learning (PPO), which generates text",
    "rloo": OTHERS["rloo_k"],
    "reward": "a reward model",
    "rm": "a reward model",
    "glue": "a classifier",
    "ner": "a classifier",
    "qa": "a model that marks answers",
    "squad": "a model that marks answers",
    "summarization": "an encoder with a decoder",
    "translation": "an encoder with a decoder",
    "seq2seq": "an encoder with a decoder",
    "t5": "an encoder with a decoder",
    "swag": "a classifier",
    "classification": "a classifier",
    "whisper": "a model of speech",
    "wav2vec2": "a model of speech",
    "llava": "a vision-language model",
    "vlm": "a vision-language model",
    "vl": "a vision-language model",
    "image": "a model of images",
    "dreambooth": "a model of images",
    "controlnet": "a model of images",
    "distill": "by distillation from another model",
    "chatbot": "nothing: it answers",
}
