"""The ledger: every claim of the paper, judged from the result tables.

`verdicts` is the vocabulary, `judges` hold one function per claim, `checks` finds contradictions inside the
paper itself, and `ledger` puts it all together.
"""
