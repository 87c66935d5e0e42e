"""The trainer's end of the control plane (standard library only)."""
