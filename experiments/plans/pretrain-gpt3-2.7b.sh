#!/bin/bash
# GPT-3 2.7B on one node of four L4, as a user of Megatron-LM might train it.

GPUS_PER_NODE=4
NNODES=1

DISTRIBUTED_ARGS=(
    --nnodes $NNODES
    --nproc-per-node $GPUS_PER_NODE
)

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 2560
    --num-attention-heads 32
    --seq-length 2048
    --max-position-embeddings 2048
    --position-embedding-type learned_absolute
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --attention-backend flash
    --vocab-size 50303
    --make-vocab-size-divisible-by 32
)

TRAINING_ARGS=(
    --tensor-model-parallel-size 4
    --micro-batch-size 1
    --global-batch-size 64
    --fp16
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --lr 1.5e-4
    --train-iters 500000
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    --data-path ${DATA_PATH:-data} \
    --tokenizer-type NullTokenizer
