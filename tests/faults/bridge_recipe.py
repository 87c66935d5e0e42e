"""A recipe of Megatron-Bridge as its users launch it, of a model that a CPU trains.

Needs the package and what it imports; `tests/stand_ins` has Transformer Engine's layers.
"""

import argparse
import functools

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training import initialize, setup
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec


def config_of(args: argparse.Namespace) -> ConfigContainer:
    """The recipe."""
    return ConfigContainer(
        model=GPTModelProvider(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            seq_length=32,
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            sequence_parallel=args.tensor_model_parallel_size > 1,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=384,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            use_cpu_initialization=True,
        ),
        train=TrainingConfig(
            train_iters=args.train_iters,
            global_batch_size=args.global_batch_size,
            micro_batch_size=1,
            eval_interval=args.eval_interval or 1000,
            eval_iters=2,
        ),
        optimizer=OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-4, use_distributed_optimizer=True
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine",
            lr_warmup_iters=2,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
        ),
        ddp=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            average_in_collective=True,
            use_distributed_optimizer=True,
        ),
        dataset=MockGPTDatasetConfig(
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=32,
            num_dataset_builder_threads=1,
            dataloader_type="single",
            num_workers=0,
            persistent_workers=False,
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=383),
        checkpoint=CheckpointConfig(save=None, load=None),
        rng=RNGConfig(seed=1234),
        dist=DistributedInitConfig(
            distributed_backend="nccl" if torch.cuda.is_available() else "gloo"
        ),
    )


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--train-iters", type=int, default=6)
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--eval-interval", type=int, default=0)
    args = parser.parse_known_args()[0]
    if not torch.cuda.is_available():
        setup.initialize_megatron = functools.partial(
            initialize.initialize_megatron, allow_no_cuda=True
        )
        setup.set_jit_fusion_options = lambda *args: None
        torch.cuda.device_count = lambda: 1
        # The wheel has them compiled, and no sources of them.
        vars(initialize)["compile_helpers"] = lambda: None
    pretrain(config=config_of(args), forward_step_func=forward_step)


if __name__ == "__main__":
    main()
