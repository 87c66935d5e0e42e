"""The demo: train on real text, kill a worker in a step, compare with the undisturbed run."""
