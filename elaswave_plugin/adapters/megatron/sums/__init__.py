"""The gradient sums of a step of Megatron-Core: added up, kept through a loss, reduced."""
