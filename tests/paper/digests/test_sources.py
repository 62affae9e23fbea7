"""data/sources.toml: complete, and strict about mistakes."""

import pytest

from kvcache.paper.digests.sources import load_sources


def test_everything_is_said_of_every_digest():
    sources = load_sources()
    for digest in sources.digests.values():
        for key in ("title", "origin", "licence", "citation", "how", "upper_note"):
            assert getattr(digest, key).strip(), f"{digest.name}: {key}"
        for name in digest.inputs:
            assert name == "quantiles" or sources.files[name].url or sources.files[name].how, name
    assert sources.files["BurstGPT_1.csv"].bytes == 52_283_111
    assert sources.digests["burstgpt"].quantiles["output"].points[0.99] == 1505


DIGEST = """
[digest.a]
title = "t"
origin = "o"
licence = "l"
citation = "c"
how = "h"
inputs = ["a.csv"]
upper_output = 1
upper_input = 1
upper_note = "n"
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[file."a.csv"]\nsha = "x"\n' + DIGEST, "file 'a.csv': .*'sha'"),
        ('[file."a.csv"]\nsha256 = "x"\n' + DIGEST, "file 'a.csv': sha256 is 'x'; expected 64 hexadecimal"),
        ('[file."a.csv"]\nurl = ["ftp://x"]\n' + DIGEST, "file 'a.csv': url"),
        ('[file."b.csv"]\n' + DIGEST, r"digest 'a': inputs \['a.csv'\] have no \[file\] table"),
        ('[file."a.csv"]\n' + DIGEST + "windows = 3\n", "digest 'a': .*'windows'"),
        ('[file."a.csv"]\n' + DIGEST.replace('["a.csv"]', "[]"), "digest 'a': no inputs"),
        (
            '[file."a.csv"]\n' + DIGEST.replace("upper_input = 1", "upper_input = 0"),
            "digest 'a': an upper bound",
        ),
        (
            '[file."a.csv"]\n' + DIGEST.replace('"a.csv"', '"quantiles"'),
            "digest 'a': inputs and .quantiles. disagree",
        ),
    ],
)
def test_mistakes_name_the_table(tmp_path, text, message):
    (tmp_path / "sources.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_sources(tmp_path / "sources.toml")


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="set KVCACHE_ROOT"):
        load_sources(tmp_path / "sources.toml")
