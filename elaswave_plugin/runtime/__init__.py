"""Effects: processes, sockets, memory; one job a file."""
