#!/bin/bash
# GPT-3 1.3B trained by Megatron-LM on one node of 2 L4: every block recomputed, optimizer state sharded.
GPUS=2

MODEL=(
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16
    --seq-length 2048 --max-position-embeddings 2048
    --vocab-size 50303 --make-vocab-size-divisible-by 128
    --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
)

torchrun --nproc_per_node $GPUS pretrain_gpt.py "${MODEL[@]}" \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 \
    --micro-batch-size 8 --global-batch-size 32 --fp16 --attention-backend flash \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --train-iters 20 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer
