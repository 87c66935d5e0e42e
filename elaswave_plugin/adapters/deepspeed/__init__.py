"""DeepSpeed's engine behind the runtime; what a script uses is ``elaswave_plugin.deepspeed``."""
