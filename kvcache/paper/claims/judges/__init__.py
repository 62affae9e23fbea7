"""One function per claim, from result tables to a `kvcache.paper.claims.verdicts.Verdict`."""
