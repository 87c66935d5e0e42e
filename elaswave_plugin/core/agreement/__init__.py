"""The membership of the job: views, Paxos over nodes, leases, verdicts on hangs, joins (pure)."""
