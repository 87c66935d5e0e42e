"""Pure decisions: facts in, decisions with printable reasons out; no torch, sockets or clock."""
