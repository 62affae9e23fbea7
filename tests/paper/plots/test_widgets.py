"""The panel, without a browser: its controls change what it draws, and it leaves a picture."""

import pytest

from kvcache import CVaR, LengthDistribution, ScaleShift, Wasserstein1
from kvcache.paper.plots.widgets import KNOBS, Panel

PNG = b"\x89PNG"


@pytest.fixture
def panel():
    traces = {
        "short": LengthDistribution.from_samples([1, 2, 3, 40], 100, name="short"),
        "long": LengthDistribution.from_samples([100, 900], 1000, name="long"),
    }
    return Panel(traces, trace="short", rho=10)


def test_controls_change_the_problem_and_the_picture(panel):
    seen = [bytes(panel._image.value)]
    for control, value in ((panel._trace, "long"), (panel._rho, 100), (panel._bound, 4096)):
        control.value = value
        seen.append(bytes(panel._image.value))
    panel._size.value = 1.0
    seen.append(bytes(panel._image.value))
    assert len(set(seen)) == len(seen)
    assert all(picture.startswith(PNG) for picture in seen)
    assert panel.distribution.name == "long"
    assert panel.distribution.upper == 4096
    assert panel.ambiguity == Wasserstein1(1.0, relative=True)
    panel._bound.value = 512
    assert panel.distribution.tokens.tolist() == [100, 512]


def test_each_set_brings_its_own_parameter(panel):
    for name, knob in KNOBS.items():
        panel._set.value = name
        assert (panel._size.min, panel._size.max, panel._size.value) == (knob.low, knob.high, knob.first)
        assert panel._size.description == knob.name
        assert panel.ambiguity == knob.make(knob.first)
    panel._set.value = "CVaR"
    panel._size.value = 0.9
    assert panel.ambiguity == CVaR(0.9)
    panel._set.value = "Scale shift"
    assert panel.ambiguity == ScaleShift(1.0, 1.5)


def test_a_reader_without_a_kernel_gets_the_picture(panel):
    data, _ = panel._repr_mimebundle_()
    assert data["image/png"].startswith(PNG)
    assert "application/vnd.jupyter.widget-view+json" in data
