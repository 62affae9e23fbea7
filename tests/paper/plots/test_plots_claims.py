"""The figure of all verdicts."""

from __future__ import annotations

import pandas as pd
import pytest

from kvcache.paper.claims.verdicts import Outcome
from kvcache.paper.plots.claims import OUTCOMES, at_a_glance
from kvcache.paper.published import claims_table


@pytest.fixture
def claims() -> pd.DataFrame:
    table = claims_table()
    return table.assign(verdict=[str(list(Outcome)[n % 4]) for n in range(len(table))])


def test_one_mark_per_claim_in_the_column_of_its_verdict(claims):
    ax = at_a_glance(claims).axes[0]
    marks = {
        int(line.get_ydata()[0]): (int(line.get_xdata()[0]), line.get_color())
        for line in ax.lines
        if line.get_marker() not in ("None", None, "")
    }
    assert len(marks) == len(claims)
    for y, verdict in enumerate(claims["verdict"]):
        outcome = Outcome(verdict)
        assert marks[y] == (list(OUTCOMES).index(outcome), OUTCOMES[outcome][0])


def test_texts_fit_and_no_claim_is_cut(claims):
    figure = at_a_glance(claims)
    ax = figure.axes[0]
    renderer = figure.canvas.get_renderer()
    figure.draw_without_rendering()
    texts = {text.get_text().replace("\n", " "): text.get_window_extent(renderer) for text in ax.texts}
    bounds = figure.bbox
    for row in claims.itertuples():
        assert row.claim in texts, f"{row.id} is cut"
    marks = ax.transData.transform((-0.45, 0))[0]
    for text, box in texts.items():
        assert box.x0 >= bounds.x0
        assert box.x1 <= bounds.x1, text
        assert text not in set(claims["claim"]) or box.x1 < marks, text


def test_headings_count(claims):
    headings = [text.get_text() for text in at_a_glance(claims).axes[0].texts]
    assert "reproduced\n6" in headings
    assert "not\ntestable\n5" in headings
