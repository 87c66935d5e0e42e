#!/bin/sh
# Megatron-LM's own pretrain_gpt.py, elastic, on CPU: 8 workers as TP2 x PP2 x DP2, made-up data.
#
#   MEGATRON_LM_PATH=path/to/Megatron-LM examples/pretrain_gpt_elastic.sh [MORE FLAGS]
#
# Their index builder has to be built (pip install -e, or their own make), or megatron-core installed
# beside a checkout without megatron/core.
#
# Tag core_v0.16.1. Elastic are the two lines marked so; the rest is a launch script as it was.
# --elaswave-kill=5@10:backward as a further flag ends worker 5 in the backward pass of step 10.
set -eu
: "${MEGATRON_LM_PATH:?set it to a checkout of Megatron-LM, tag core_v0.16.1}"
export OMP_NUM_THREADS=1

exec torchrun --standalone --nproc-per-node "${WORKERS:-8}" \
    -m elaswave_plugin.run `# [elastic]` \
    "$MEGATRON_LM_PATH/pretrain_gpt.py" \
    --elaswave `# [elastic]` \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel \
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 \
    --seq-length 32 --max-position-embeddings 32 \
    --micro-batch-size 1 --global-batch-size 8 --train-iters 20 \
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0.01 --clip-grad 1.0 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 126 --split 90,5,5 \
    --eval-iters 2 --eval-interval 10 --log-interval 1 \
    --transformer-impl local --distributed-backend gloo --use-cpu-initialization \
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm \
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion \
    "$@"
