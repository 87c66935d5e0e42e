"""The loops: ours, the framework's, the user's."""
