"""A script proves itself before it is trusted: run undisturbed and disturbed, and compared."""
