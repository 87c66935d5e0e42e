"""The only part that knows the training frameworks."""
