"""vLLM's own scheduler beside the simulation: a driver in virtual time, its workloads and its committed runs."""
