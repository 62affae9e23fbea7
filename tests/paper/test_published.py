"""The paper as data."""

import pytest

from kvcache.paper.published import CLAIMS, claims_table, published


def test_there_are_22_claims_in_order():
    assert list(CLAIMS) == [f"C{i:02d}" for i in range(1, 23)]
    assert all(claim.where and claim.claim for claim in CLAIMS.values())
    assert claims_table().shape == (22, 3)


def test_published_gains_follow_from_published_costs():
    table = published("table_2")
    for row in table["rows"]:
        gains = [100 * (1 - row["DRO"] / row[name]) for name in ("P90", "P95")]
        # Printed gains are of the unrounded costs, in whole percent, low to high.
        assert sorted(gains) == pytest.approx(sorted(table["gain_pct"][str(row["rho"])]), abs=0.75)


def test_published_tables_have_the_rows_of_the_paper():
    assert [row["rho"] for row in published("table_2")["rows"]] == [2, 5, 10, 20, 50, 100]
    assert [row["size"] for row in published("table_3")["rows"]][-1] == "15x12x2000"
    assert {len(row["cost"]) for row in published("table_4")["rows"]} == {3}
    assert len(published("table_5")["rows"]) == 4
    assert published("setup")["radius_in_means"] == 0.15


def test_published_numbers_cannot_be_changed():
    published("setup")["c_p"] = 99
    assert published("setup")["c_p"] == 10
    with pytest.raises(KeyError, match=r"published part 'table_9'; known are \['table_2'"):
        published("table_9")
