"""One function per claim, from result tables to a `kvcache.claims.verdicts.Verdict`."""
