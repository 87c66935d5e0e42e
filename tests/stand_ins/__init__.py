"""Stand-ins for packages that need a GPU: their names and state, computed with torch on a CPU.

A job gets one by its folder in front of the module path. It shows that our code finds and carries
the state where the real package keeps it; it says nothing of the real package's arithmetic.
"""
