"""Stands in for the linear layers and the attention of transformer_engine.pytorch.

As in versions up to 2.3, a forward pass keeps where the weight gradient is accumulated; and in the
backward pass of a first micro-batch it is not added there, but takes the place of what is there.
"""

from contextlib import nullcontext

import torch
from megatron.core.tensor_parallel import mappings


class _Product(torch.autograd.Function):
    """The product with a weight, whose gradient goes to ``main_grad`` where it is fused."""

    @staticmethod
    def forward(ctx, input, weight, fuses, is_first):
        ctx.save_for_backward(input, weight)
        ctx.main_grad = weight.main_grad if fuses and weight.requires_grad else None
        ctx.is_first = is_first
        return input.matmul(weight.t())

    @staticmethod
    def backward(ctx, gradient):
        input, weight = ctx.saved_tensors
        of_weight = gradient.flatten(0, -2).t().matmul(input.flatten(0, -2))
        if ctx.main_grad is not None:
            if ctx.is_first:
                ctx.main_grad.zero_()
            ctx.main_grad.add_(of_weight)
            weight.grad_added_to_main_grad = True
            of_weight = torch.zeros_like(weight)
        return gradient.matmul(weight), of_weight, None, None


class Linear(torch.nn.Module):
    """A linear layer of which each tensor-parallel rank has rows ("column") or columns ("row")."""

    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=torch.float32,
        parallel_mode=None,
        device="cpu",
        rng_tracker_name=None,
    ):
        super().__init__()
        assert parallel_mode in ("column", "row"), "no stand-in for that"
        column = parallel_mode == "column"
        self.in_features = in_features if column else in_features // tp_size
        self.out_features = out_features // tp_size if column else out_features
        self.parallel_mode = parallel_mode
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.tp_group, self.tp_size = tp_group, tp_size
        self.use_bias, self.return_bias = bias, return_bias
        how = {"dtype": params_dtype, "device": device}
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **how))
        init_method(self.weight)
        self._mark(self.weight, dim=0 if column else 1)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(self.out_features, **how))
            if column:
                self._mark(self.bias, dim=0)
            else:
                self.bias.sequence_parallel = sequence_parallel

    @staticmethod
    def _mark(param, *, dim):
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1

    def get_extra_state(self):
        """Of fp8, which is off: nothing, in a tensor."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        """Nothing."""

    def forward(self, input, is_first_microbatch=None):
        """The product, and the bias apart where that is asked for."""
        group = self.tp_group
        if self.parallel_mode == "column":
            if self.sequence_parallel:
                input = mappings.gather_from_sequence_parallel_region(input, group=group)
            else:
                input = mappings.copy_to_tensor_model_parallel_region(input, group=group)
        output = _Product.apply(
            input, self.weight, self.fuse_wgrad_accumulation, bool(is_first_microbatch)
        )
        if self.parallel_mode == "row":
            if self.sequence_parallel:
                output = mappings.reduce_scatter_to_sequence_parallel_region(output, group=group)
            else:
                output = mappings.reduce_from_tensor_model_parallel_region(output, group=group)
        if self.return_bias:
            return output, self.bias
        return output + self.bias if self.use_bias else output


class LayerNormLinear(Linear):
    """A norm in front of a linear layer, whose parameters are the layer's own."""

    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        *,
        normalization="LayerNorm",
        return_layernorm_output=False,
        zero_centered_gamma=False,
        sequence_parallel=False,
        **more,
    ):
        more.setdefault("init_method", lambda weight: None)
        super().__init__(in_features, out_features, sequence_parallel=sequence_parallel, **more)
        assert not return_layernorm_output and not zero_centered_gamma
        self.eps = eps
        like = {"dtype": self.weight.dtype, "device": self.weight.device}
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, **like))
        self.layer_norm_weight.sequence_parallel = sequence_parallel
        self.normalization = normalization
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, **like))
            self.layer_norm_bias.sequence_parallel = sequence_parallel

    def forward(self, input, is_first_microbatch=None):
        """The product with what the norm makes of the input."""
        shape, weight = (self.in_features,), self.layer_norm_weight
        if self.normalization == "RMSNorm":
            normal = torch.nn.functional.rms_norm(input, shape, weight, self.eps)
        else:
            bias = self.layer_norm_bias
            normal = torch.nn.functional.layer_norm(input, shape, weight, bias, self.eps)
        return super().forward(normal, is_first_microbatch)


class DotProductAttention(torch.nn.Module):
    """Causal attention over [sequence, batch, heads, channels]; the tracker draws its dropout."""

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        attn_mask_type="causal",
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        softmax_scale=None,
    ):
        super().__init__()
        assert num_gqa_groups in (None, num_attention_heads), "no stand-in for that"
        self.tp_group, self.tp_size = tp_group, tp_size
        self.attention_dropout = attention_dropout
        self.tracker = get_rng_state_tracker
        self.scale = softmax_scale

    def get_extra_state(self):
        """Of fp8, which is off: nothing, in a tensor."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        """Nothing."""

    def forward(self, query, key, value, attention_mask=None, attn_mask_type="causal"):
        """Mix the values; returns [sequence, batch, heads x channels]."""
        assert attn_mask_type == "causal"
        query, key, value = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        scale = self.scale or query.shape[-1] ** -0.5
        scores = scale * query.matmul(key.transpose(-1, -2))
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -1e9).softmax(-1)
        with self.tracker().fork() if self.tracker else nullcontext():
            shares = torch.nn.functional.dropout(shares, self.attention_dropout, self.training)
        mixed = shares.matmul(value).permute(2, 0, 1, 3)
        return mixed.reshape(*mixed.shape[:2], -1)
