"""vLLM's own scheduler beside the simulation: a driver in virtual time, workloads, committed runs."""
