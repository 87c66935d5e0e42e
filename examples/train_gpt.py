"""Train a small GPT with Megatron-Core: an ordinary script, and ten lines marked [elastic]."""

import argparse
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from elaswave_plugin.adapters import megatron as elaswave  # [elastic] 1


@dataclass(frozen=True)
class ByteTokenizer:
    """One token a byte, and an end-of-document token."""

    vocab_size: int = 257
    eod: int = 256
    unique_identifiers: str = "bytes"


def parse_arguments() -> argparse.Namespace:
    """Arguments by the names that Megatron-LM gives them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-path", required=True, help="prefix of an indexed dataset")
    parser.add_argument("--data-cache-path", default=None)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, default=None)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--train-iters", type=int, default=20)
    parser.add_argument("--eval-interval", type=int, default=0)
    parser.add_argument("--eval-iters", type=int, default=2)
    parser.add_argument("--save", default=None, help="folder for checkpoints")
    parser.add_argument("--save-interval", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--min-lr", type=float, default=1e-4)
    parser.add_argument("--lr-warmup-iters", type=int, default=2)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--attention-dropout", type=float, default=0.1)
    parser.add_argument("--hidden-dropout", type=float, default=0.1)
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--recompute-granularity", choices=["full", "selective"], default=None)
    parser.add_argument("--recompute-modules", nargs="*", default=None, help="of selective")
    parser.add_argument("--disable-bias-linear", action="store_true")
    experts = parser.add_argument_group("mixture of experts")
    experts.add_argument("--num-experts", type=int, default=None)
    experts.add_argument("--moe-layer-freq", type=int, default=1, help="every how many layers")
    experts.add_argument("--moe-ffn-hidden-size", type=int, default=None)
    experts.add_argument("--moe-router-topk", type=int, default=2)
    experts.add_argument("--moe-router-load-balancing-type", default="aux_loss")
    experts.add_argument("--moe-router-score-function", default="softmax")
    experts.add_argument("--moe-router-enable-expert-bias", action="store_true")
    experts.add_argument("--moe-router-bias-update-rate", type=float, default=1e-3)
    experts.add_argument("--moe-aux-loss-coeff", type=float, default=0.0)
    experts.add_argument("--moe-z-loss-coeff", type=float, default=None)
    experts.add_argument("--moe-input-jitter-eps", type=float, default=None)
    experts.add_argument("--moe-expert-capacity-factor", type=float, default=None)
    experts.add_argument("--moe-pad-expert-input-to-capacity", action="store_true")
    experts.add_argument("--moe-token-dispatcher-type", default="alltoall")
    experts.add_argument("--moe-shared-expert-intermediate-size", type=int, default=None)
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--bf16", action="store_true")
    precision.add_argument("--fp16", action="store_true", help="with a loss scale that adapts")
    parser.add_argument("--initial-loss-scale", type=float, default=2.0**32)
    parser.add_argument("--loss-scale-window", type=float, default=1000)
    parser.add_argument("--hysteresis", type=int, default=2)
    parser.add_argument("--no-overlap-grad-reduce", action="store_true")
    parser.add_argument("--ddp-bucket-size", type=int, default=250_000)
    parser.add_argument("--log-losses", default=None, help="file for one loss a line (rank 0)")
    parser.add_argument("--seed", type=int, default=1234)
    elaswave.add_arguments(parser)  # [elastic] 2
    return parser.parse_args()


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    """The precision of the weights."""
    if args.fp16:
        return torch.float16
    return torch.bfloat16 if args.bf16 else torch.float32


def build_model(args: argparse.Namespace) -> list[DistributedDataParallel]:
    """This worker's chunks of a GPT of Megatron-Core's own parts, each under its DDP."""
    dtype = dtype_of(args)
    recompute = args.recompute_granularity
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
        sequence_parallel=args.sequence_parallel,
        # As Megatron-LM has it for interleaved stages.
        overlap_p2p_comm=bool(args.num_virtual_stages_per_pipeline_rank),
        batch_p2p_comm=not args.num_virtual_stages_per_pipeline_rank,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        calculate_per_token_loss=args.calculate_per_token_loss,
        recompute_granularity=recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
        recompute_modules=args.recompute_modules,
        add_bias_linear=not args.disable_bias_linear,
        **expert_settings(args),
        fp16=args.fp16,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=not args.no_overlap_grad_reduce,
        grad_reduce_in_fp32=True,
        bucket_size=args.ddp_bucket_size,
    )
    return [
        DistributedDataParallel(
            config, ddp_config, build_chunk(args, config, number), disable_bucketing=number > 0
        )
        for number in range(args.num_virtual_stages_per_pipeline_rank or 1)
    ]


def expert_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Those of a mixture of experts, all of them on every replica; none of a dense model."""
    if args.num_experts is None:
        return {}
    names = [name for name in vars(args) if name.startswith("moe_")]
    return {"num_moe_experts": args.num_experts, **{name: getattr(args, name) for name in names}}


def build_chunk(args: argparse.Namespace, config: TransformerConfig, number: int):
    """One model chunk: the layers of one virtual pipeline stage."""
    virtual = number if args.num_virtual_stages_per_pipeline_rank else None
    place = {"ignore_virtual": False, "vp_stage": virtual}
    if args.num_experts is None:
        layers = get_gpt_layer_local_spec()
    else:
        layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=virtual)
    chunk = GPTModel(
        config,
        layers,
        vocab_size=384,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
        vp_stage=virtual,
    ).cuda()
    return Float16Module(config, chunk) if args.fp16 or args.bf16 else chunk


def build_optimizer(args: argparse.Namespace, model: list[DistributedDataParallel]):
    """The distributed Adam and its learning-rate schedule."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            fp16=args.fp16,
            bf16=args.bf16,
            params_dtype=dtype_of(args),
            initial_loss_scale=args.initial_loss_scale,
            loss_scale_window=args.loss_scale_window,
            hysteresis=args.hysteresis,
            use_distributed_optimizer=True,
        ),
        model,
        use_gloo_process_groups=False,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        lr_decay_style="cosine",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    config = model[0].config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if model[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in model]
        config.no_sync_func = no_sync if len(model) > 1 else no_sync[0]
    return optimizer, scheduler


def build_datasets(args: argparse.Namespace):
    """Training and validation GPTDatasets over the indexed dataset."""
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([args.data_path], None),
        split="90,10,0",
        path_to_cache=args.data_cache_path,
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=True,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    sizes = [args.train_iters * args.global_batch_size, args.eval_iters * args.global_batch_size, 0]
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return train, valid


def state_to_save(model, optimizer, scheduler):
    """Build what a checkpoint holds, as Megatron-Core's sharded tensors."""
    names = [f"model{number}" for number in range(len(model))] if len(model) > 1 else ["model"]
    state = {
        name: chunk.module.sharded_state_dict() for name, chunk in zip(names, model, strict=True)
    }
    state["scheduler"] = scheduler.state_dict()
    state["optimizer"] = optimizer.sharded_state_dict(
        state,
        metadata={"distrib_optim_sharding_type": "fully_reshardable"},
    )
    return state


def save_checkpoint(job, folder, iteration, state):
    """Write DIR/iter_N in torch_dist format; the tracker file names it only when it is whole."""
    path = Path(folder) / f"iter_{iteration:07d}"
    if torch.distributed.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(path))
    torch.distributed.barrier()
    job.name_newest(Path(folder) / "latest_checkpointed_iteration.txt", iteration)


def forward_step(batches, model):
    """One micro-batch: the output and its loss function."""
    batch = {name: tensor.cuda() for name, tensor in next(batches).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"], model.config.calculate_per_token_loss)


def loss_func(mask, per_token, output):
    """Sum or mean over the tokens that count; reports (sum, tokens)."""
    total, tokens = (output.float() * mask).sum(), mask.sum()
    reported = (float(total), float(tokens))
    if per_token:
        return total, tokens.to(torch.int), reported
    return total / tokens, reported


def print_rank_0(text):
    """Print once for the job."""
    if torch.distributed.get_rank() == 0:
        print(text, flush=True)


def log_loss(path, loss):
    """Append a loss to a file, once for the job."""
    if path and torch.distributed.get_rank() == 0:
        with open(path, "a") as file:
            file.write(f"{loss!r}\n")


def main() -> None:
    """Train."""
    args = parse_arguments()
    job = elaswave.attach(args)  # [elastic] 3
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count()))
    torch.distributed.init_process_group(**job.process_group())  # [elastic] 4
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.num_virtual_stages_per_pipeline_rank,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    torch.manual_seed(args.seed)
    model = build_model(args)
    optimizer, scheduler = build_optimizer(args, model)
    train, valid = build_datasets(args)
    job.bind(model, optimizer, scheduler, train_iters=args.train_iters)  # [elastic] 5
    train_batches, valid_batches = job.batches(train), job.batches(valid)  # [elastic] 6
    interleaved = len(model) > 1
    forward_backward = job.forward_backward(get_forward_backward_func())  # [elastic] 7
    schedule = {
        "forward_step_func": forward_step,
        "model": model if interleaved else model[0],
        "seq_length": args.seq_length,
        "micro_batch_size": args.micro_batch_size,
    }

    def per_chunk(batches):
        return [batches] * len(model) if interleaved else batches

    def train_step():
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(data_iterator=per_chunk(train_batches), **schedule)
        _, grad_norm, _ = optimizer.step()
        scheduler.step(increment=args.global_batch_size)
        return losses, grad_norm

    @torch.no_grad()
    def evaluate():
        for chunk in model:
            chunk.eval()
        try:
            return [
                forward_backward(
                    data_iterator=per_chunk(valid_batches), forward_only=True, **schedule
                )
                for _ in range(args.eval_iters)
            ]
        finally:
            for chunk in model:
                chunk.train()

    def save():
        done = scheduler.num_steps // args.global_batch_size
        save_checkpoint(job, args.save, done, state_to_save(model, optimizer, scheduler))

    last = save if args.save else None
    for iteration, report in job.train(train_step, last_checkpoint=last):  # [elastic] 8
        print_rank_0(
            f"step {iteration:4d} | loss {report.loss:.6f} | grad norm {report.grad_norm:.4f} "
            f"| lr {report.lr:.2e}"
        )
        log_loss(args.log_losses, report.loss)
        if args.eval_interval and (iteration + 1) % args.eval_interval == 0:
            loss = job.evaluate(evaluate)  # [elastic] 9
            print_rank_0(f"step {iteration:4d} | validation loss {loss:.6f}")
        if args.save and args.save_interval and (iteration + 1) % args.save_interval == 0:
            job.run(save, phase="save")  # [elastic] 10


if __name__ == "__main__":
    main()
