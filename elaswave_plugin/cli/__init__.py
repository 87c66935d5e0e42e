"""The commands of `elaswave`."""
