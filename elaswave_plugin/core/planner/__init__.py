"""The work of each worker after a change of membership: dataflow, layers, widths and clocks."""
