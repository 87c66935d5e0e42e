"""Who is in the job: views, Paxos over nodes, leases, verdicts on hangs, joins (pure)."""
