"""HiGHS stays silent, and options that it does not know are refused."""

import subprocess
import sys

import pytest

from kvcache.solvers.highs import new_highs


def test_solving_prints_nothing():
    code = "from kvcache import solve\n"
    code += "from kvcache.paper import builders\nsolve(builders.scalability(2, 2, 20, 8, 0))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == run.stderr == ""


def test_an_unknown_option_is_refused():
    with pytest.raises(ValueError, match="HiGHS option presolv: 'off' is not accepted"):
        new_highs(presolv="off")
