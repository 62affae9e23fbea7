"""The reproduction of the paper, on top of the core (which never imports it).

In reading order:

- `published`: what the paper says; `assumptions`: what is chosen where it is silent;
- `digests`: the traces as counts per length; `builders`: the problems of its experiments;
- `methods`: what it compares, Algorithm 1 and its program for a general solver among them;
- `experiments`: the tables of the notebooks; `plots`: their figures; `claims`: the verdicts;
- `pages`: runs the notebooks, writes the README's numbers and the report;
- `project`, `results`: where things are kept.
"""
