"""The parts that both ends of the control plane share (standard library only)."""
