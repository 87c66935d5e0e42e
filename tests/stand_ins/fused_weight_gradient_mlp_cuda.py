"""Stands in for Apex's kernels that add a weight gradient to where it is accumulated."""


def wgrad_gemm_accum_fp32(activations, gradient, main_grad):
    """Rounded before it is added, as with an accumulator in 32 bits."""
    main_grad.add_(gradient.t().matmul(activations))


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
