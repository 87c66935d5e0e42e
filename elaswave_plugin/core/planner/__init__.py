"""Which work runs where after a change of membership: dataflow, layers, widths and clocks."""
