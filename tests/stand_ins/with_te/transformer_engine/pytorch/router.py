"""Stands in for transformer_engine.pytorch.router, of MoE, which is refused."""

fused_compute_score_for_moe_aux_loss = None
fused_moe_aux_loss = None
fused_topk_with_score_function = None
