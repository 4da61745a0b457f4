"""Names of arguments of Hugging Face's Trainer and of what is built on it, as files give them.

They are those of transformers' ``TrainingArguments``, TRL's configurations, LLaMA-Factory and
axolotl (2026).
"""

from collections.abc import Mapping

from mistlab.core.values import word_set

# Arguments without effect on the cost of a step that a plan could tell.
HARMLESS = word_set(
    """
    output_dir overwrite_output_dir do_train do_eval do_predict learning_rate weight_decay
    adam_beta1 adam_beta2 adam_epsilon max_grad_norm num_train_epochs num_epochs max_steps seed
    data_seed report_to run_name tf32 remove_unused_columns label_names load_best_model_at_end
    metric_for_best_model greater_is_better resume_from_checkpoint auto_resume_from_checkpoints
    group_by_length length_column_name disable_tqdm prediction_loss_only full_determinism
    include_tokens_per_second include_num_input_tokens_seen neftune_noise_alpha torch_dtype dtype
    trust_remote_code use_fast_tokenizer tokenizer_name tokenizer_name_or_path model_revision
    config_name cache_dir token use_auth_token low_cpu_mem_usage preprocessing_num_workers
    preprocessing_only max_samples max_train_samples max_eval_samples streaming
    validation_split_percentage overwrite_cache keep_linebreaks template stage finetuning_type
    plot_loss val_size local_rank ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_backend ddp_broadcast_buffers gradient_checkpointing_kwargs optim_args optim_target_modules
    chat_template chat_template_path messages_key text_column text_column_name completion_only_loss
    assistant_only_loss packing_strategy padding_free pad_to_multiple_of eos_token pad_token
    special_tokens truncation_mode shuffle_dataset model_init_kwargs padding_side bf16_full_eval
    fp16_full_eval fp16_opt_level half_precision_backend jit_mode_eval use_cpu no_cuda
    ignore_data_skip past_index mp_parameters skip_memory_metrics use_mps_device train_on_inputs
    train_on_prompt mask_history group_by_modality_length lazy_preprocess data_path train_file
    validation_file train_data training_data test_data data_files data_name train_dataset
    image_folder version conversation_type base_run_name system_prompt early_stopping_patience
    strict xformers_attention s2_attention flash_attn_cross_entropy flash_attn_rms_norm debug
    is_llama_derived_model is_mistral_derived_model is_qwen_derived_model type_of_model model_type
    tokenizer_type tokenizer_use_fast tokenizer_config shuffle_merged_datasets datasets
    test_datasets pretraining_dataset lora_model_dir loraplus_lr_ratio peft_use_dora
    sample_packing_eff_est total_num_tokens local_files_only wandb lr_scheduler lr_scheduler_type
    warmup_steps warmup_ratio cosine_min_lr_ratio max_prompt_length mixtral_config callbacks
    benchmarks benchmark_cfg hub default_system tool_format enable_thinking rope_scaling
    upcast_layernorm upcast_lmhead_output split_batches average_tokens_across_devices
    use_legacy_prediction_loop parallelism config instruction_template response_template
    prompt_template_path data_dir suffix deepspeed_multinode_launcher config_file exp_name
    """
)
# Beginnings of the names of arguments without such an effect.
CALM = word_set(
    """
    save_ eval_ evals_ saves_ log_ logging_ hub_ push_to_ wandb_ dataset dataloader_ lr_
    warmup_ mlflow_ swanlab_ comet_ ddp_ torch_empty_cache include_
    gradient_accumulation_kwargs callback_ per_device_eval eval system_ tokenizer_
    preprocess trackio_ neftune val_ cosine_ relora_ lora_target lora_dropout lora_fan
    push_ image_ video_ report_ torchdynamo greater_ test_ validation_ resume_ early_
    special_ chat_ role_ stop_ bleu data_ batch_eval ray_ label_
    """
)
# Arguments that change cost in ways that plans cannot say, and what is taken instead.
UNSAID: Mapping[str, str] = {
    "use_liger_kernel": "kernels are taken as the model's own",
    "use_liger": "kernels are taken as the model's own",
    "enable_liger_kernel": "kernels are taken as the model's own",
    "use_unsloth": "kernels are taken as the model's own",
    "auto_find_batch_size": "the batch is taken as given",
    "activation_offloading": "activations are taken to stay on the GPU",
    "torch_compile_mode": "taken as compiled by default",
    "use_reentrant_gc": "",
    "tune_mm_mlp_adapter": "all weights are taken as trained",
    "freeze_trainable_layers": "all weights are taken as trained",
    "freeze_backbone": "all weights are taken as trained",
    "unfrozen_parameters": "all weights are taken as trained",
    "use_galore": "the optimizer is taken as AdamW",
    "use_apollo": "the optimizer is taken as AdamW",
    "use_badam": "the optimizer is taken as AdamW",
    "use_adam_mini": "the optimizer is taken as AdamW",
    "use_muon": "the optimizer is taken as AdamW",
    "neat_packing": "attention is taken over whole sequences",
    "shift_attn": "attention is taken over whole sequences",
    "train_from_scratch": "",
    "sliding_window": "attention is taken as the model's own",
    "moe_aux_loss_coef": "",
    "router_aux_loss_coef": "",
}
# Arguments of runs that train something else than all weights by the next token, and what it is.
OTHERS: Mapping[str, str] = {
    "use_peft": "adapters (PEFT) alone",
    "use_lora": "adapters (LoRA) alone",
    "lora_enable": "adapters (LoRA) alone",
    "lora_r": "adapters (LoRA) alone",
    "lora_rank": "adapters (LoRA) alone",
    "lora_alpha": "adapters (LoRA) alone",
    "rank": "adapters (a rank is given) alone",
    "adapter": "adapters alone",
    "qlora": "adapters (QLoRA) alone",
    "load_in_4bit": "adapters of a model in 4 bits",
    "load_in_8bit": "adapters of a model in 8 bits",
    "quantization_bit": "adapters of a quantized model",
    "vision_tower": "a vision-language model",
    "vision_tower_lr": "a vision-language model",
    "tune_vision_tower": "a vision-language model",
    "freeze_vision_tower": "a vision-language model",
    "freeze_vit": "a vision-language model",
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
    "mlm": "by masked tokens",
    "mlm_probability": "by masked tokens",
}
# Words of a training program's name, and what it trains.
PROGRAMS: Mapping[str, str] = {
    "lora": "adapters (LoRA) alone",
    "qlora": "adapters (QLoRA) alone",
    "peft": "adapters (PEFT) alone",
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
    "mlm": "by masked tokens",
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
    "distill": "by distillation from another model",
}
