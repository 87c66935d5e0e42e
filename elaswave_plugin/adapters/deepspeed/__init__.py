"""DeepSpeed's engine in an elastic job; what a script uses is ``elaswave_plugin.deepspeed``."""
