"""Digests: what is committed, how it is filtered, and how it is built."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import LengthDistribution, Wasserstein1
from kvcache.paper.digests import (
    digest_counts,
    digest_windows,
    digests_dir,
    list_digests,
    load_digest,
    load_digests,
    load_prefix_stats,
    read_facts,
)
from kvcache.paper.digests.__main__ import main
from kvcache.paper.digests.build import _quantile_counts, _whole_counts, build_digest
from kvcache.paper.digests.sources import PublishedQuantiles, load_sources

NAMES = [
    "burstgpt",
    "burstgpt-week1",
    "azure-2023-code",
    "azure-2023-conv",
    "azure-2024-code",
    "azure-2024-conv",
    "mooncake-conversation",
    "sharegpt",
    "servegen-m-small",
    "servegen-m-mid",
    "servegen-m-large",
    "servegen-deepseek-r1",
]


def same(a: LengthDistribution, b: LengthDistribution) -> bool:
    return np.array_equal(a.tokens, b.tokens) and np.array_equal(a.weights, b.weights) and a.upper == b.upper


# ---- what is committed ------------------------------------------------------------------------------


def test_every_trace_is_there_and_all_fit_in_8_megabytes():
    table = list_digests()
    assert table["name"].tolist() == NAMES == list(load_sources().digests)
    assert sum(path.stat().st_size for path in digests_dir().iterdir()) <= 8_000_000
    assert table.set_index("name").loc["servegen-m-large", ["windows", "window_s", "days"]].tolist() == [
        56,
        21_600,
        14,
    ]
    # make data replaces reconstructions by exact counts
    marked = set(table.loc[table["reconstructed"], "name"])
    assert marked <= {"burstgpt", "azure-2024-code", "azure-2024-conv"}


@pytest.mark.parametrize("name", NAMES)
def test_digests_agree_with_what_sources_say(name):
    facts, source = read_facts(digests_dir() / f"{name}.parquet"), load_sources().digests[name]
    replaced = len(source.inputs) > 1 and facts["made_from"].startswith(source.inputs[0])
    if not replaced:
        assert facts["upper"]["output"] == source.upper_output
        assert facts["upper"]["input"] == source.upper_input
    if not replaced and source.rows_read is not None:
        assert facts["rows_read"] == source.rows_read
        assert facts["rows_kept"] == source.rows_kept
    assert facts["rows_read"] == facts["rows_kept"] + sum(facts["dropped"].values())
    output, inputs = load_digest(name), load_digest(name, field="input")
    assert (output.upper, inputs.upper) == (facts["upper"]["output"], facts["upper"]["input"])
    assert output.tokens[0] >= 1
    assert output.total == facts["requests"]
    # ServeGen counts are rounded by window and field, and do not tell which inputs had no output.
    unanswered = facts["dropped"].get("0 output tokens", 0) if name.startswith("servegen") else 0
    assert abs(inputs.total - unanswered - output.total) <= facts["windows"]
    assert abs(output.total - facts["rows_kept"]) <= facts["windows"]
    assert output.reconstructed == inputs.reconstructed == facts["reconstructed"]


@pytest.mark.parametrize(
    ("name", "mean", "quantiles"),
    [
        # numpy.percentile(..., method="inverted_cdf") and numpy.mean of the traces' own rows
        ("azure-2023-code", 27.8825, {0.5: 13, 0.9: 55, 0.99: 252, 1.0: 1899}),
        ("azure-2023-conv", 211.1259, {0.5: 129, 0.9: 424, 0.99: 601, 1.0: 1000}),
        ("burstgpt-week1", 264.4197, {0.5: 236, 0.9: 536, 0.99: 934, 1.0: 2048}),
        ("mooncake-conversation", 342.6189, {0.5: 350, 0.9: 597, 0.99: 1120, 1.0: 2000}),
    ],
)
def test_moments_and_quantiles(name, mean, quantiles):
    output = load_digest(name)
    assert output.mean == pytest.approx(mean, abs=1e-4)
    assert {p: output.quantile(p) for p in quantiles} == quantiles


@pytest.mark.parametrize("name", ["burstgpt", "azure-2024-code", "azure-2024-conv"])
def test_reconstructions_have_the_published_numbers(name):
    for field, published in load_sources().digests[name].quantiles.items():
        found = load_digest(name, field=field)
        if not found.reconstructed:
            pytest.skip("built from the original")
        assert found.total == published.requests
        assert {p: found.quantile(p) for p in published.points} == dict(published.points)
        assert found.mean == pytest.approx(published.mean, rel=1e-4)
        assert (found.tokens[0], found.tokens[-1]) == (published.minimum, published.maximum)


def test_known_critical_radii_of_azure_2023_conversation():
    output = load_digest("azure-2023-conv")
    assert output.upper == 1000
    known = {2: 0.91, 5: 0.43, 10: 0.22, 20: 0.10, 50: 0.03, 100: 0.01}
    for rho, radius in known.items():
        assert round(Wasserstein1(0).critical_radius(output, rho, 1) / output.mean, 2) == radius


# ---- filters ------------------------------------------------------------------------------------------


def test_parts_add_up_to_the_whole():
    whole = load_digest("burstgpt-week1")
    for by in ("class", "model", "log", "window", "day"):
        parts = load_digests("burstgpt-week1", by)
        assert same(LengthDistribution.mix(list(parts.values())), whole), by
        assert all(part.upper == whole.upper for part in parts.values())
    assert list(load_digests("burstgpt-week1", "day")) == list(range(7))
    assert list(load_digests("burstgpt-week1", "model")) == ["ChatGPT", "GPT-4"]
    assert list(load_digests("servegen-m-small", "window")) == list(range(56))


def test_filters_against_the_table():
    table = digest_counts("burstgpt-week1", "input")
    wanted = table["class"].astype(str).str.startswith("GPT-4/") & table["day"].isin([1, 2])
    expected = LengthDistribution.from_counts(table["tokens"][wanted], table["requests"][wanted], 5087)
    assert same(load_digest("burstgpt-week1", field="input", model="GPT-4", day=[1, 2]), expected)
    assert same(load_digest("burstgpt-week1", field="input", model="GPT-4", window=range(4, 12)), expected)
    classes = ["GPT-4/API log", "GPT-4/Conversation log"]
    assert same(load_digest("burstgpt-week1", field="input", class_=classes, day=np.array([1, 2])), expected)
    one = load_digest("burstgpt-week1", field="input", model="GPT-4", log="API log", day=1)
    assert same(one, load_digest("burstgpt-week1", field="input", class_="GPT-4/API log", day=1))


def test_windows_table():
    table = digest_windows("azure-2023-conv")
    assert table["window"].tolist() == list(range(6))
    assert table["start_s"].tolist() == [0, 600, 1200, 1800, 2400, 3000]
    assert table["requests"].sum() == 19_366
    first = load_digest("azure-2023-conv", window=[0, 1, 2])
    assert first.total == table["requests"][:3].sum()
    days = digest_windows("servegen-m-large")["day"]
    assert days.tolist() == [day for day in range(14) for _ in range(4)]
    assert digest_windows("sharegpt")["window"].tolist() == [0]


def test_names_labels_and_marks():
    assert same(load_digest("Azure_2023_CONV"), load_digest("azure-2023-conv"))
    assert load_digest("servegen-m-mid", window=range(4, 8)).name == "servegen-m-mid, window 4-7"
    assert load_digest("burstgpt-week1", field="input", day=3).name == "burstgpt-week1, day 3, input"
    assert "reconstructed" in repr(load_digest("burstgpt"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: load_digest("gpt"),
            "digest 'gpt': no such digest; there are burstgpt, burstgpt-week1, azure",
        ),
        (lambda: load_digest("burstgpt-week1", model="gpt-4"), "model: 'gpt-4'; .* has 'ChatGPT', 'GPT-4'"),
        (lambda: load_digest("burstgpt-week1", class_="GPT-4"), "class_: 'GPT-4'; .* 'GPT-4/API log'"),
        (lambda: load_digest("burstgpt-week1", day=7), "day: 7; .* has 0, 1, 2, 3, 4, 5, 6"),
        (lambda: load_digest("servegen-m-mid", window=56), "window: 56; .* has 0 to 55"),
        (lambda: load_digest("servegen-m-mid", window=[]), "window: empty; .* has 0 to 55"),
        (
            lambda: load_digest("sharegpt", field="prefix"),
            "field: 'prefix'; digest 'sharegpt' has 'output', 'input'",
        ),
        (lambda: load_digest("burstgpt-week1", class_="GPT-4/API log", window=0), "no request is left"),
        (lambda: load_digests("sharegpt", "hour"), "by: 'hour'; expected one of 'class', 'model'"),
        (lambda: load_prefix_stats("sharegpt"), "no prefix blocks; mooncake-conversation has"),
    ],
)
def test_wrong_choices_list_the_right_ones(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_unknown_filters_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'windows'"):
        load_digest("burstgpt", windows=1)
    with pytest.raises(TypeError, match="unknown filter 'windows'; expected field, class_"):
        load_digests("burstgpt", "day", windows=1)


def test_no_project_around(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_ROOT", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="set KVCACHE_ROOT"):
        load_digest("burstgpt")


# ---- prefix sharing -----------------------------------------------------------------------------------


def test_prefix_statistics_agree_with_the_prefix_field():
    stats = load_prefix_stats("mooncake-conversation")
    prefix = load_digest("mooncake-conversation", field="prefix")
    inputs = load_digest("mooncake-conversation", field="input")
    assert stats.requests == prefix.total == inputs.total
    assert stats.mean_prefix_tokens == pytest.approx(prefix.mean)
    assert stats.mean_input_tokens == pytest.approx(inputs.mean)
    assert stats.shared_share == pytest.approx(prefix.mean / inputs.mean)
    assert stats.sharing_requests == prefix.total - prefix.weights[prefix.tokens == 0].sum()
    windows = stats.window_table()
    assert windows["shared_tokens"].sum() == stats.shared_tokens
    parts = load_digests("mooncake-conversation", "window", field="prefix")
    assert [p.mean * p.total for p in parts.values()] == pytest.approx(windows["shared_tokens"].tolist())
    caches = stats.cache_table()
    assert caches["shared_share"].is_monotonic_increasing
    assert caches["shared_tokens"].iloc[-1] == stats.shared_tokens


# ---- building -----------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=60))
def test_rounded_counts_keep_every_running_sum(weights):
    counts = _whole_counts(np.array(weights))
    assert (counts >= 0).all()
    assert np.abs(np.cumsum(counts) - np.cumsum(weights)).max() <= 0.5 + 1e-6


@given(
    st.lists(st.integers(2, 400), min_size=3, max_size=3, unique=True).map(sorted),
    st.floats(0.05, 0.95),
    st.integers(1_000, 10**7),
)
def test_rounded_reconstructions_keep_the_published_numbers(points, at, requests):
    quantiles = dict(zip((0.5, 0.9, 0.99), points, strict=True))
    low = LengthDistribution.from_quantiles
    limits = []
    for mean in (0.0, 1e9):
        with pytest.raises(ValueError, match="it lies in") as caught:
            low(quantiles, mean, minimum=1, maximum=500)
        limits = [float(x) for x in str(caught.value).partition("[")[2].rstrip("]").split(", ")]
    mean = limits[0] + at * (limits[1] - limits[0])
    exact = low(quantiles, mean, minimum=1, maximum=500, total=requests)
    published = PublishedQuantiles(1, 500, mean, quantiles, requests, "")
    counts = _quantile_counts(exact, published)
    assert (counts >= 0).all()
    found = LengthDistribution.from_counts(exact.tokens, counts)
    assert found.total == requests
    assert {p: found.quantile(p) for p in quantiles} == quantiles
    assert np.abs(np.cumsum(counts) - np.cumsum(exact.weights)).max() <= 2


SOURCES = """
[file."full.csv"]
[file."week.csv"]
also = ["first_week.csv"]
[file."chain.jsonl"]
[file."servegen_windows.parquet"]
[file."sharegpt_lengths.parquet"]
[file."share.json"]

[digest.log]
inputs = ["full.csv", "week.csv", "quantiles"]
window_s = 43_200
align_s = 86_400
until_s = 172_800
{common}
[digest.log.quantiles]
source = "somewhere"
requests = 1000
[digest.log.quantiles.output]
minimum = 1
maximum = 90
mean = 21.0
points = {{ "0.5" = 10, "0.9" = 50 }}
[digest.log.quantiles.input]
minimum = 1
maximum = 90
mean = 21.0
points = {{ "0.5" = 10, "0.9" = 50 }}

[digest.chain]
inputs = ["chain.jsonl"]
window_s = 60
prefix_block_tokens = 10
{common}

[digest.cloud]
inputs = ["servegen_windows.parquet"]
model = "m-x"
window_s = 21_600
{common}

[digest.share]
inputs = ["share.json", "sharegpt_lengths.parquet"]
{common}
"""
COMMON = """title = "t"
origin = "o"
licence = "l"
citation = "c"
how = "h"
upper_output = 100
upper_input = 200
upper_note = "n"
"""
HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
WEEK = HEADER + "10,A,5,6,11,x\n50000,B,7,8,15,x\n90000,A,5,6,11,y\n90001,A,5,0,5,y\n"
FULL = WEEK + "172799,A,1,2,3,x\n172800,A,1,3,4,x\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "raw").mkdir()
    (tmp_path / "data" / "sources.toml").write_text(SOURCES.format(common=COMMON))
    monkeypatch.setenv("KVCACHE_ROOT", str(tmp_path))
    return tmp_path


def build(project: Path, name: str) -> Path | None:
    return build_digest(load_sources().digests[name], project / "raw")


def test_counts_of_a_trace(project):
    (project / "raw" / "first_week.csv").write_text(WEEK)
    build(project, "log")
    table = digest_counts("log").astype({"class": str})
    assert table.values.tolist() == [["A/x", 0, 0, 6, 1], ["A/y", 2, 1, 6, 1], ["B/x", 1, 0, 8, 1]]
    assert digest_counts("log", "input")["tokens"].tolist() == [5, 5, 7]
    facts = read_facts(digests_dir() / "log.parquet")
    assert facts["dropped"] == {"0 output tokens": 1}
    assert facts["made_from"] == "first_week.csv"
    assert (facts["windows"], facts["days"], facts["upper"]) == (3, 2, {"output": 100, "input": 200})


def test_the_first_input_at_hand_is_taken_and_cut_to_the_period(project):
    (project / "raw" / "week.csv").write_text(WEEK)
    (project / "raw" / "full.csv").write_text(FULL)
    build(project, "log")
    assert read_facts(digests_dir() / "log.parquet")["made_from"] == "full.csv"
    assert load_digest("log").total == 4
    assert list(load_digests("log", "window")) == [0, 1, 2, 3]
    assert read_facts(digests_dir() / "log.parquet")["dropped"] == {
        "0 output tokens": 1,
        "after the period": 1,
    }


def test_an_exact_digest_is_not_replaced_by_a_reconstruction(project):
    assert build(project, "log") is not None
    assert load_digest("log").reconstructed
    assert load_digest("log").total == 1000
    (project / "raw" / "week.csv").write_text(WEEK)
    build(project, "log")
    assert not load_digest("log").reconstructed
    (project / "raw" / "week.csv").unlink()
    assert build(project, "log") is None
    assert load_digest("log").total == 3


def test_prefixes_of_a_trace(project):
    lines = [(0, 25, [1, 2, 3]), (61_000, 25, [1, 2, 4]), (62_000, 5, [1])]
    text = "".join(
        json.dumps({"timestamp": t, "input_length": n, "output_length": 1, "hash_ids": ids}) + "\n"
        for t, n, ids in lines
    )
    (project / "raw" / "chain.jsonl").write_text(text)
    build(project, "chain")
    assert digest_counts("chain", "prefix")[["window", "tokens", "requests"]].values.tolist() == [
        [0, 0, 1],
        [1, 5, 1],
        [1, 20, 1],
    ]
    stats = load_prefix_stats("chain")
    assert (stats.shared_tokens, stats.input_tokens, stats.sharing_requests) == (25, 55, 2)
    assert list_digests()["prefixes"].tolist() == [True]


def test_servegen_windows(project):
    frame = pd.DataFrame(
        [
            ("m-x", "output_tokens", 0, 0, 0.6),
            ("m-x", "output_tokens", 0, 5, 0.4),
            ("m-x", "output_tokens", 0, 6, 0.4),
            ("m-x", "output_tokens", 0, 7, 10.3),
            ("m-x", "output_tokens", 21_600, 7, 3.0),
            ("m-x", "input_tokens", 0, 9, 11.7),
            ("m-y", "output_tokens", 0, 1, 99.0),
        ],
        columns=["model", "field", "window_start_s", "tokens", "requests"],
    )
    frame.to_parquet(project / "raw" / "servegen_windows.parquet")
    build(project, "cloud")
    # running sums .4, .8, 11.1 round to 0, 1, 11
    assert digest_counts("cloud").drop(columns="class").values.tolist() == [
        [0, 0, 6, 1],
        [0, 0, 7, 10],
        [1, 0, 7, 3],
    ]
    assert load_digest("cloud", field="input").weights.tolist() == [12]


def test_sharegpt_lengths(project):
    table = pa.table({"context_tokens": [1, 2, 3], "response_tokens": [5, 0, 500]})
    pq.write_table(table, project / "raw" / "sharegpt_lengths.parquet")
    build(project, "share")
    assert load_digest("share").tokens.tolist() == [5, 500]
    assert load_digest("share").upper == 500  # a length beyond the stated bound raises it
    assert read_facts(digests_dir() / "share.parquet")["dropped"] == {"0 output tokens": 1}
    assert digest_windows("share")["start_s"].isna().all()


def test_builds_are_the_same_bytes(project):
    (project / "raw" / "full.csv").write_text(FULL)
    path = build(project, "log")
    first, built = path.read_bytes(), path.stat().st_mtime_ns
    path.unlink()
    assert build(project, "log").read_bytes() == first
    assert [path.name for path in digests_dir().iterdir()] == ["log.parquet"]
    os.utime(path, ns=(built, built))
    build(project, "log")
    assert path.stat().st_mtime_ns == built  # an equal file is not touched
    (project / "raw" / "full.csv").write_text(WEEK)
    assert build(project, "log").read_bytes() != first


def test_command(project, capsys, monkeypatch):
    (project / "raw" / "full.csv").write_text(FULL)
    (project / "raw" / "chain.jsonl").write_text("{\n")
    (project / "raw" / "share.json").write_text('[{"conversations": []}]')
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    assert main(["build", "--raw", str(project / "raw")]) == 1
    out, err = capsys.readouterr()
    assert "4 requests from full.csv" in out
    assert "cloud" in out
    assert "has none of its inputs" in out
    assert "chain.jsonl row 1: no JSON" in err
    assert "left as it is: counting tokens needs the extra" in out
    assert main(["build", "--raw", str(project / "raw"), "log"]) == 0
    assert main(["list"]) == 0
    assert "log" in capsys.readouterr().out
    assert main(["build", "--raw", str(project / "nowhere")]) == 2
    assert main(["build", "--raw", str(project / "raw"), "lag"]) == 2
    assert "'lag' is no digest; there are log, chain, cloud, share" in capsys.readouterr().err


RAW = os.environ.get("KVCACHE_RAW")


@pytest.mark.skipif(RAW is None, reason="KVCACHE_RAW names no folder of raw traces")
@pytest.mark.parametrize("name", NAMES)
def test_the_committed_bytes_come_from_the_raw_traces(name, tmp_path, monkeypatch):
    committed, sources = (digests_dir() / f"{name}.parquet").read_bytes(), load_sources()
    monkeypatch.setenv("KVCACHE_ROOT", str(tmp_path))
    assert build_digest(sources.digests[name], RAW, sources).read_bytes() == committed


@pytest.mark.skipif(RAW is None, reason="KVCACHE_RAW names no folder of raw traces")
@pytest.mark.parametrize("model", ["m-small", "m-mid", "m-large", "deepseek-r1"])
def test_servegen_quantiles_are_those_of_the_reduced_file(model):
    raw = pd.read_parquet(Path(RAW) / "servegen_windows.parquet")
    p = np.array([0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99])
    for field in ("output", "input"):
        part = raw[(raw["model"] == model) & (raw["field"] == f"{field}_tokens") & (raw["tokens"] > 0)]
        for window in (None, 0, 2):
            chosen = part if window is None else part[part["window_start_s"] == window * 21_600]
            counts = chosen.astype({"requests": float}).groupby("tokens")["requests"].sum()
            sums = np.cumsum(counts.to_numpy())
            exact = counts.index.to_numpy()[np.searchsorted(sums, p * sums[-1])]
            found = load_digest(f"servegen-{model}", field=field, window=window)
            assert np.abs(found.quantile(p) / exact - 1).max() < 0.001
            windows = part["window_start_s"].nunique() if window is None else 1
            up_to = found.cdf(counts.index.to_numpy()) * found.total
            assert np.abs(up_to - sums).max() <= 0.501 * windows
