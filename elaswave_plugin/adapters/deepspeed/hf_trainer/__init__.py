"""transformers.Trainer on DeepSpeed."""
