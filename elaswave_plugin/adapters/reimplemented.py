"""The functions of frameworks that the adapters re-implement, with the digests of their sources.

The releases beside a digest have that source; all are accepted. Another digest is no error: it is
named when a job attaches (`upstream_sources.py`).

`python -m tests.tidy.upstream_digests FOLDER` prints the digests of other releases.
"""

# Used by each job of Megatron-Core.
MEGATRON = (
    (
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
        "megatron/state/buffers.py",
        (
            ("17995410a92e712c", "0.16.1"),
            ("dcea871a6692904f", "0.17.0"),
            ("22a4787f3782ed6c", "0.17.1"),
            ("db2a5703737a2536", "0.18.0 to 0.18.1"),
            ("e843858d749f7771", "0.19.0"),
        ),
    ),
    (
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__",
        "megatron/state/buffers.py",
        (
            ("b43153a2495ec8ad", "0.16.1"),
            ("2cfc42f2c548ab7a", "0.17.0"),
            ("2ddccd140a92c193", "0.17.1"),
            ("85c75e2fdddd9941", "0.18.0 to 0.18.1"),
            ("773d4991a4658179", "0.19.0"),
        ),
    ),
    (
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.__init__",
        "megatron/state/buffers.py",
        (
            ("b1e6e2054f36fb13", "0.16.1"),
            ("64db9c4008a33f0f", "0.17.0 to 0.17.1"),
            ("38d346db591b4fb9", "0.18.0 to 0.19.0"),
        ),
    ),
    (
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.reset",
        "megatron/state/buffers.py",
        (
            ("4d41afb082680898", "0.16.1 to 0.17.1"),
            ("455ce1667979602a", "0.18.0 to 0.19.0"),
        ),
    ),
    (
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
        "megatron/sums/reduction.py",
        (
            ("330c03a387abb5f5", "0.16.1"),
            ("fb0a490aedb23279", "0.17.0 to 0.17.1"),
            ("b55e2926923e704e", "0.18.0 to 0.18.1"),
            ("5549f17f9e11588e", "0.19.0"),
        ),
    ),
    (
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_grad_sync",
        "megatron/sums/reduction.py",
        (
            ("6c6d0fb0eeac43bd", "0.16.1"),
            ("dcf975a94476e83d", "0.17.0 to 0.17.1"),
            ("3d925b4abe868396", "0.18.0 to 0.19.0"),
        ),
    ),
    (
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
        ".sharded_param_state_fully_reshardable",
        "megatron/compat/own_ranges.py",
        (("b5c632a06569fa24", "0.16.1 to 0.19.0"),),
    ),
    (
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
        ".load_parameter_state_from_fully_reshardable",
        "megatron/compat/own_ranges.py",
        (("c5c03c9d92708e4f", "0.16.1 to 0.19.0"),),
    ),
    (
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.__init__",
        "megatron/state/optimizer_state.py",
        (
            ("ef60e65bbd91638e", "0.16.1 to 0.17.1"),
            ("68479917d70c6577", "0.18.0 to 0.18.1"),
            ("a1c35c28d24920cd", "0.19.0"),
        ),
    ),
    (
        "megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
        "grad_norm.py",
        (
            ("56d684bd24e3252c", "0.16.1"),
            ("a2a451348b869f85", "0.17.0 to 0.18.1"),
            ("f20bc9b9b3b9865a", "0.19.0"),
        ),
    ),
    (
        "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining",
        "megatron/step/executor.py",
        (
            ("95d291a5b20ac036", "0.16.1"),
            ("1a0512d80fbe15c2", "0.17.0 to 0.17.1"),
            ("661b0af91fcb88bd", "0.18.0 to 0.18.1"),
            ("1ababdb9590f4e7b", "0.19.0"),
        ),
    ),
)
# Used with tensor or pipeline parallelism.
MEGATRON_STAGES = (
    (
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
        "megatron/step/ragged_pipeline.py",
        (
            ("9538454f6ae25019", "0.16.1"),
            ("fd7db75dceea9e4e", "0.17.0 to 0.17.1"),
            ("c6a6d3681c90e60d", "0.18.0 to 0.18.1"),
            ("aaac4430f556476f", "0.19.0"),
        ),
    ),
    (
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
        "megatron/step/ragged_pipeline.py",
        (
            ("9b62952da3a6b7f2", "0.16.1"),
            ("c5eed35543c4d154", "0.17.0 to 0.17.1"),
            ("b43575212b82b264", "0.18.0 to 0.18.1"),
            ("86a475d63924130a", "0.19.0"),
        ),
    ),
    (
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        "megatron/step/ragged_pipeline.py",
        (
            ("5b9b5e43dfcd5731", "0.16.1 to 0.17.1"),
            ("d987e44d6f089cb8", "0.18.0 to 0.18.1"),
            ("d9e29710748475b7", "0.19.0"),
        ),
    ),
    (
        "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
        "megatron/sums/tied_embeddings.py",
        (("d243ed37968ce5f4", "0.16.1 to 0.19.0"),),
    ),
    (
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
        "megatron/step/weight_gradients.py",
        (
            ("63ddfb291adc56bf", "0.16.1 to 0.17.1"),
            ("b2b18a41ef92b5de", "0.18.0 to 0.18.1"),
            ("78763734f926f85b", "0.19.0"),
        ),
    ),
    (
        "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.__init__",
        "megatron/state/stage_parts.py",
        (
            ("a75665c14c56a6a1", "0.16.1 to 0.17.1"),
            ("a3c6bec20098a724", "0.18.0 to 0.18.1"),
            ("92a33252883d9b57", "0.19.0"),
        ),
    ),
    (
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        "megatron/state/stage_parts.py",
        (
            ("5290f7ae4f9c42fc", "0.16.1"),
            ("049db65ab33bb168", "0.17.0 to 0.17.1"),
            ("3c759e57eb1d744c", "0.18.0 to 0.18.1"),
            ("895d6c49e2a2479e", "0.19.0"),
        ),
    ),
    (
        "megatron.core.transformer.transformer_block:TransformerBlock._build_layers",
        "megatron/state/stage_layers.py",
        (
            ("d5f0ae66351f80d0", "0.16.1"),
            ("50a0e0a4a82f24d7", "0.17.0 to 0.18.1"),
            ("7578d2b64db07c75", "0.19.0"),
        ),
    ),
)
# Used where routers have biases.
MEGATRON_EXPERTS = (
    (
        "megatron.core.distributed.finalize_model_grads:_update_router_expert_bias",
        "megatron/state/expert_bias.py",
        (
            ("a59bbc0c05198b23", "0.16.1"),
            ("c21a666e2ce8c9a0", "0.17.0 to 0.17.1"),
            ("ecfa9272c8705df8", "0.18.0 to 0.18.1"),
            ("0cb586caded451a3", "0.19.0"),
        ),
    ),
)
# Used by scripts of Megatron-LM.
MEGATRON_LM = (
    (
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.get_parameter_state_dp_zero",
        "megatron_lm/legacy_optimizer.py",
        (
            ("7a7599cde0b38739", "0.16.1 to 0.18.1"),
            ("fd572d6556c10c67", "0.19.0"),
        ),
    ),
    (
        "megatron.core.optimizer.optimizer:FP32Optimizer.state_dict",
        "megatron_lm/legacy_optimizer.py",
        (("9179606981a02830", "0.16.1 to 0.19.0"),),
    ),
    (
        "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.state_dict",
        "megatron_lm/legacy_optimizer.py",
        (("15e451d3c7d0de2e", "0.16.1 to 0.19.0"),),
    ),
    (
        "megatron.core.optimizer.optimizer:FP32Optimizer.sharded_state_dict",
        "megatron_lm/plain_optimizer.py",
        (("3609742f80716fdf", "0.16.1 to 0.19.0"),),
    ),
    (
        "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.sharded_state_dict",
        "megatron_lm/plain_optimizer.py",
        (
            ("2bb4cdc219e0d1ce", "0.16.1 to 0.18.1"),
            ("c62f9f64eb08c138", "0.19.0"),
        ),
    ),
    (
        "megatron.core.transformer.moe.moe_utils:track_moe_metrics",
        "megatron_lm/router_losses.py",
        (
            ("d748804c763078e5", "0.16.1"),
            ("f9a48601e8c0897b", "0.17.0 to 0.17.1"),
            ("33c4c1f1a57b1d7a", "0.18.0 to 0.19.0"),
        ),
    ),
    (
        "megatron.training.utils:calc_params_l2_norm",
        "megatron_lm/params_norm.py",
        (("8fdb8021778a1bf8", "0.16.1 to 0.17.1"),),
    ),
    (
        "megatron.training.training:train_step",
        "megatron_lm/losses.py",
        (("c176bf7550ea2910", "0.16.1 to 0.17.1"),),
    ),
    (
        "megatron.training.training:evaluate",
        "megatron_lm/losses.py",
        (
            ("15311b18acae5502", "0.16.1"),
            ("3c22275dbe1de160", "0.17.0 to 0.17.1"),
        ),
    ),
    (
        "megatron.training.training:cyclic_iter",
        "megatron_lm/hooks.py",
        (("48b0b0da53df3870", "0.16.1 to 0.17.1"),),
    ),
    (
        "megatron.training.dist_signal_handler:get_device",
        "megatron_lm/hooks.py",
        (("e6b6f9d3f8d0643a", "0.16.1 to 0.17.1"),),
    ),
)
# Used by each engine of DeepSpeed.
DEEPSPEED = (
    (
        "deepspeed.runtime.engine:DeepSpeedEngine.__init__",
        "deepspeed/engine/framework.py",
        (("0f886adc91901a00", "0.19.8"),),
    ),
    (
        "deepspeed.runtime.engine:DeepSpeedEngine._configure_distributed_model",
        "deepspeed/engine/framework.py",
        (("cfe01944048faef0", "0.19.8"),),
    ),
    (
        "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint",
        "deepspeed/engine/checkpoint.py",
        (("1a72dda7e10c4196", "0.19.8"),),
    ),
    (
        "deepspeed.runtime.engine:DeepSpeedEngine.deepspeed_io",
        "deepspeed/engine/loader.py",
        (("cb1226f26b5f8cd3", "0.19.8"),),
    ),
    (
        "deepspeed.runtime.dataloader:DeepSpeedDataLoader.__init__",
        "deepspeed/engine/loader.py",
        (("c6ccf3c8d80e8cc6", "0.19.8"),),
    ),
)
# Used by 16-bit engines of stage 0.
ZERO_0 = (
    (
        "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer.__init__",
        "deepspeed/zero/zero0.py",
        (("47265cb5123281e8", "0.19.8"),),
    ),
)
# Used by engines of stages 1 and 2.
DEEPSPEED_EXACT = (
    (
        "deepspeed.runtime.engine:DeepSpeedEngine.allreduce_bucket",
        "deepspeed/zero/replica_sums.py",
        (("d9f3592291cd86a2", "0.19.8"),),
    ),
    (
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.average_tensor",
        "deepspeed/zero/replica_sums.py",
        (("fa76f4ed733602b6", "0.19.8"),),
    ),
)
ZERO_12 = (
    (
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.__init__",
        "deepspeed/zero/zero12.py",
        (("9d95e76f83e50a25", "0.19.8"),),
    ),
)
# Used by engines of stage 3.
ZERO_3 = (
    (
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.__init__",
        "deepspeed/zero/zero3.py",
        (("1464d34aec2bd46e", "0.19.8"),),
    ),
    (
        "deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param",
        "deepspeed/zero/zero3_partitions.py",
        (("76f1ea6191d12e61", "0.19.8"),),
    ),
    (
        "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload.__init__",
        "deepspeed/zero/zero3.py",
        (("e067ea55443e8547", "0.19.8"),),
    ),
    (
        "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload._register_deepspeed_module",
        "deepspeed/zero/zero3.py",
        (("afa5ca111398903e", "0.19.8"),),
    ),
)
# Used by engines of a `PipelineModule`.
PIPELINE = (
    (
        "deepspeed.runtime.pipe.topology:PipelineParallelGrid.__init__",
        "deepspeed/pipeline/grid.py",
        (("49cda320b4d0c519", "0.19.8"),),
    ),
    (
        "deepspeed.runtime.pipe.engine:PipelineEngine.train_batch",
        "deepspeed/pipeline/job.py",
        (("f5e170f0051baa7b", "0.19.8"),),
    ),
    (
        "deepspeed.runtime.engine:DeepSpeedEngine._take_model_step",
        "deepspeed/pipeline/job.py",
        (("950babfdad164ec7", "0.19.8"),),
    ),
)
# Used by loaders of HF Accelerate.
ACCELERATE = (
    (
        "accelerate.data_loader:BatchSamplerShard._iter_with_no_split",
        "deepspeed/accelerate/order.py",
        (("fd550aaee477a2fb", "1.15.0"),),
    ),
)
