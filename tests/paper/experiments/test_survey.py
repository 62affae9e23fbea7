"""Tables of the traces, recomputed by hand or from the digests' counts."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kvcache.paper.digests import digest_counts, list_digests, load_digest
from kvcache.paper.experiments import survey
from kvcache.paper.published import published


def test_sources_and_traces_have_a_row_per_digest():
    names = list_digests()["name"].tolist()
    sources = survey.sources_table()
    assert sources["trace"].tolist() == names
    assert sources["what"].str.len().min() > 10
    for field in ("output", "input"):
        assert survey.traces_table(field)["trace"].tolist() == names


def test_formats():
    table = survey.formats_table().set_index("format")
    assert table.loc["burstgpt", "class"] == "Model / Log Type"
    assert table.loc["mooncake", "prefix_blocks"] == "hash_ids"
    assert table.loc["openai", "output_tokens"].startswith("usage.completion_tokens or ")
    assert table.loc["sharegpt", "output_tokens"] == ""


def test_share_of_the_longest_tenth():
    table = survey.traces_table().set_index("trace")
    lengths = np.sort(np.repeat(*(digest_counts("azure-2023-code")[c] for c in ("tokens", "requests"))))
    cut = 0.9 * lengths.size
    first = int(np.ceil(cut))
    by_hand = lengths[first:].sum() + (first - cut) * lengths[first - 1]
    assert table.loc["azure-2023-code", "tail_share"] == pytest.approx(by_hand / lengths.sum())
    assert table.loc["azure-2023-code", "cv"] == pytest.approx(lengths.std() / lengths.mean())


def test_classes_add_up():
    table = survey.classes_table("burstgpt-week1")
    assert table["share"].sum() == pytest.approx(1)
    assert (table["share"] * table["mean"]).sum() == pytest.approx(load_digest("burstgpt-week1").mean)


def test_beside_the_paper():
    table = survey.beside_paper(published("traces")).set_index(["trace", "statistic"])
    assert set(survey.PAPER_TRACES) == set(published("traces")) - {"what"}
    p99 = table.loc[("burstgpt", "p99")]
    assert (p99["paper"], p99["ours"]) == (1586, 1505)
    assert p99["difference"] == pytest.approx(1505 / 1586 - 1)
    assert p99["paper_as_quantile"] == load_digest("burstgpt").cdf(1586)
    assert np.isnan(table.loc[("burstgpt", "mean"), "paper_as_quantile"])
    assert table.loc[("azure-2024-code", "mean"), "difference"] == pytest.approx(0, abs=1e-6)


def test_first_hours_are_those_of_sources():
    hours = survey.first_hours("azure-2024-code")
    assert hours.columns.tolist() == ["hour", "p50", "p90"]
    assert hours.iloc[0].tolist() == [0, 9, 49]
    with pytest.raises(ValueError, match="no hours were published"):
        survey.first_hours("sharegpt")


def test_survival_against_counts():
    table = survey.survival_table(["azure-2023-conv"], ["output"])
    lengths = np.repeat(*(digest_counts("azure-2023-conv")[c] for c in ("tokens", "requests")))
    for tokens, survival in table[["tokens", "survival"]].sample(20, random_state=1).values:
        assert survival == pytest.approx((lengths > tokens).mean(), rel=1e-12)
    assert table["survival"].min() > 0
    assert table["survival"].is_monotonic_decreasing
    assert table["tokens"].iloc[-1] == lengths.max() - 1


def test_drift_against_scipy():
    table = survey.drift_table("burstgpt-week1").set_index("day")
    counts = digest_counts("burstgpt-week1")
    days = [counts[counts["day"] == day] for day in (2, 3)]
    w1 = stats.wasserstein_distance(
        days[0]["tokens"], days[1]["tokens"], days[0]["requests"], days[1]["requests"]
    )
    assert table.loc[3, "w1"] == pytest.approx(w1)
    assert table.loc[3, "w1_over_mean"] == pytest.approx(w1 / table.loc[2, "mean"])
    assert table.loc[3, "p90_change"] == pytest.approx(table.loc[3, "p90"] / table.loc[2, "p90"] - 1)
    assert table.loc[0, ["w1", "w1_over_mean", "noise_over_mean", "p90_change"]].isna().all()
    lagged = survey.drift_table("burstgpt-week1", by="window", lag=4)
    assert lagged["w1"].isna().sum() == 4
    assert lagged["requests"].sum() == table["requests"].sum()


def test_sampling_noise_against_samples():
    d = load_digest("azure-2023-conv")
    rng = np.random.default_rng(5)
    n, m = 400, 900
    found = [stats.wasserstein_distance(d.sample(rng, n), d.sample(rng, m)) for _ in range(400)]
    assert survey.sampling_noise(d, n, m) == pytest.approx(np.mean(found), rel=0.05)
    step = survey.drift_table("burstgpt-week1").iloc[1]
    before, now = (load_digest("burstgpt-week1", day=day) for day in (0, 1))
    pooled = load_digest("burstgpt-week1", day=[0, 1])
    expected = survey.sampling_noise(pooled, before.total, now.total) / before.mean
    assert step["noise_over_mean"] == pytest.approx(expected)


def test_drift_summary():
    table = pd.DataFrame(
        {
            "trace": "x",
            "day": range(4),
            "w1_over_mean": [np.nan, 0.1, 0.2, 0.6],
            "noise_over_mean": [np.nan, 0.01, 0.02, 0.04],
            "p90_change": [np.nan, 1, -2, 0],
        }
    )
    row = survey.drift_summary([table], 0.15).iloc[0]
    assert row.tolist() == ["x", "days", 3, 0.2, 0.6, 0.02, pytest.approx(2 / 3), 2]


def test_prefixes():
    windows, caches = survey.prefix_tables("mooncake-conversation")
    assert windows["shared_share"].between(0, 1).all()
    assert (caches["trace"] == "mooncake-conversation").all()
