#!/bin/sh
# pretrain_gpt.py on the GPUs of one node, elastic: TP2 x PP2 x DP2 on 8 of them, NCCL.
#
#   MEGATRON_LM_PATH=path/to/Megatron-LM DATA=prefix VOCAB=file MERGES=file \
#       examples/pretrain_gpt_elastic_gpu.sh [MORE FLAGS]
#
# Not run by us: no machine with GPUs was at hand. The CPU variant beside it is tested.
# Elastic are the two lines marked so. The local layers need neither transformer-engine nor apex. After a
# loss the pipeline's messages go through host memory, collectives through NCCL as before.
set -eu
: "${MEGATRON_LM_PATH:?set it to a checkout of Megatron-LM, tag core_v0.16.1}"
: "${DATA:?set it to the prefix of an indexed dataset}"
export CUDA_DEVICE_MAX_CONNECTIONS=1

exec torchrun --standalone --nproc-per-node "${WORKERS:-8}" \
    -m elaswave_plugin.run `# [elastic]` \
    "$MEGATRON_LM_PATH/pretrain_gpt.py" \
    --elaswave `# [elastic]` \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 2 --global-batch-size 64 --train-iters 1000 --bf16 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 \
    --use-distributed-optimizer --overlap-grad-reduce \
    --data-path "$DATA" --vocab-file "${VOCAB:?}" --merge-file "${MERGES:?}" --split 98,1,1 \
    --eval-iters 10 --eval-interval 500 --log-interval 10 \
    --transformer-impl local --distributed-backend nccl \
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm \
    "$@"
