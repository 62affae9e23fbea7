"""Panels to turn the knobs of a problem, an engine or a plan, which are also pictures where nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets

from kvcache.ambiguity import AmbiguitySet, Contamination, CVaR, ScaleShift, Wasserstein1, WassersteinInf
from kvcache.lengths import LengthDistribution
from kvcache.paper.digests.joint import JOINT
from kvcache.paper.experiments.engine import WORKLOADS, picture
from kvcache.paper.experiments.fractile import all_traces, with_bound
from kvcache.paper.plots import shown
from kvcache.paper.plots.engine import fig_picture
from kvcache.paper.plots.fractile import panel
from kvcache.paper.plots.planning import fig_plan, fig_refused
from kvcache.planner import Plan, PlanError

__all__ = ["EnginePanel", "Panel", "PlanPanel"]


@dataclass(frozen=True)
class _Knob:
    """The one parameter of a set: its name, range, first value, and the set it makes."""

    name: str
    low: float
    high: float
    first: float
    make: Callable[[float], AmbiguitySet]


KNOBS: Mapping[str, _Knob] = {
    "Wasserstein-1": _Knob("radius / mean", 0.0, 2.0, 0.15, lambda r: Wasserstein1(r, relative=True)),
    "Wasserstein-inf": _Knob("radius / mean", 0.0, 2.0, 0.15, lambda r: WassersteinInf(r, relative=True)),
    "CVaR": _Knob("level", 0.0, 0.95, 0.2, CVaR),
    "Contamination": _Knob("share", 0.0, 0.3, 0.02, Contamination),
    "Scale shift": _Knob("largest factor", 1.0, 3.0, 1.5, lambda s: ScaleShift(1.0, s)),
}
RATIOS = (1, 2, 5, 10, 20, 50, 100, 200)
OWN_BOUND = "the trace's own"
BOUNDS = (OWN_BOUND, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class _Picture(widgets.VBox):
    """Controls over an image, which stands for them where no kernel runs."""

    def __init__(self, controls: list[widgets.Widget], **options: Any) -> None:
        super().__init__([widgets.HBox(controls, layout={"flex_flow": "row wrap"}), self._image], **options)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(**options)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        name = type(self).__name__
        return {**data, "image/png": bytes(self._image.value), "text/plain": name}, metadata


class Panel(_Picture):
    """Trace, cost ratio, set, its size and L_max as controls over `kvcache.paper.plots.fractile.panel`.

    With a kernel it reacts; a reader without one (a repository's web page, a static report) gets the
    picture of the first setting in its place.

    Parameters
    ----------
    traces : distributions by name; all committed traces unless given.
    trace : which is shown first.
    rho : the first cost ratio, one of `RATIOS`.
    """

    def __init__(
        self,
        traces: Mapping[str, LengthDistribution] | None = None,
        trace: str = "azure-2023-conv",
        rho: float = 20,
        **options: Any,
    ) -> None:
        self._traces = dict(all_traces() if traces is None else traces)
        wide = {"description_width": "7em"}
        self._trace = widgets.Dropdown(
            options=list(self._traces), value=trace, description="trace", style=wide
        )
        self._rho = widgets.SelectionSlider(options=RATIOS, value=rho, description="ρ", style=wide)
        self._set = widgets.Dropdown(options=list(KNOBS), description="set", style=wide)
        self._size = widgets.FloatSlider(step=0.01, continuous_update=False, style=wide)
        self._bound = widgets.SelectionSlider(options=BOUNDS, description="L_max", style=wide)
        self._image = widgets.Image(format="png", width=800)
        self._turn()
        self._set.observe(lambda _: self._turn(), "value")
        for control in (self._trace, self._rho, self._bound):
            control.observe(lambda _: self._draw(), "value")
        controls = [self._trace, self._rho, self._set, self._size, self._bound]
        super().__init__(controls, **options)

    @property
    def distribution(self) -> LengthDistribution:
        """The trace under the chosen L_max."""
        dist = self._traces[self._trace.value]
        return dist if self._bound.value == OWN_BOUND else with_bound(dist, self._bound.value)

    @property
    def ambiguity(self) -> AmbiguitySet:
        """The chosen set at its chosen size."""
        return KNOBS[self._set.value].make(self._size.value)

    def _turn(self) -> None:
        """Give the size the range and the first value of the chosen set."""
        knob = KNOBS[self._set.value]
        self._size.unobserve_all("value")
        self._size.min, self._size.max = min(knob.low, self._size.min), max(knob.high, self._size.max)
        self._size.value = knob.first
        self._size.min, self._size.max = knob.low, knob.high
        self._size.description = knob.name
        self._size.observe(lambda _: self._draw(), "value")
        self._draw()

    def _draw(self) -> None:
        self._image.value = shown(panel(self.distribution, self.ambiguity, self._rho.value)).data


class PlanPanel(_Picture):
    """GPUs, deadlines, load and output lengths as sliders over what the plan becomes.

    Parameters
    ----------
    made : the plan that the sliders start from.
    """

    def __init__(self, made: Plan, **options: Any) -> None:
        o = made.options
        self._made = made
        wide = {"style": {"description_width": "7em"}, "continuous_update": False}
        ratio = {
            "value": 0.0,
            "min": -2.0,
            "max": 2.0,
            "base": 2.0,
            "step": 0.25,
            "readout_format": ".2f",
            **wide,
        }
        self._gpus = widgets.IntSlider(o.gpus, 1, max(64, 2 * o.gpus), description="GPUs", **wide)
        self._tpot = widgets.FloatSlider(1e3 * o.tpot, min=5, max=300, step=5, description="TPOT, ms", **wide)
        self._ttft = widgets.FloatSlider(o.ttft, min=0.1, max=20, step=0.1, description="TTFT, s", **wide)
        self._load = widgets.FloatLogSlider(**{**ratio, "value": 1.0}, description="load x")
        self._drift = widgets.FloatLogSlider(**{**ratio, "value": 1.0}, description="outputs x")
        self._image = widgets.Image(format="png", width=800)
        controls = [self._gpus, self._tpot, self._ttft, self._load, self._drift]
        for control in controls:
            control.observe(lambda _: self._draw(), "value")
        self._draw()
        super().__init__(controls, **options)

    def plan(self) -> Plan:
        """The plan at the sliders' values; raises `PlanError` where there is none."""
        return self._made.what_if(
            gpus=self._gpus.value,
            tpot=self._tpot.value / 1e3,
            ttft=self._ttft.value,
            load=self._load.value,
            drift=self._drift.value,
        )

    def _draw(self) -> None:
        try:
            figure = fig_plan(self.plan())
        except PlanError as error:
            figure = fig_refused(str(error))
        self._image.value = shown(figure).data


class EnginePanel(_Picture):
    """Trace, pool, load and watermark as controls over one simulated group; without a kernel, a picture.

    Parameters
    ----------
    requests : of each run.
    """

    def __init__(self, requests: int = 200, **options: Any) -> None:
        wide = {"description_width": "6em"}
        self._requests = requests
        self._trace = widgets.Dropdown(
            options=[*WORKLOADS, *JOINT], value="W1", description="trace", style=wide
        )
        self._pool = widgets.SelectionSlider(
            options=(16_000, 24_000, 56_000, 200_000), value=24_000, description="pool", style=wide
        )
        self._load = widgets.FloatSlider(
            0.95, min=0.3, max=1.5, step=0.05, description="load", continuous_update=False, style=wide
        )
        self._watermark = widgets.FloatSlider(
            0.02, min=0, max=0.2, step=0.005, description="watermark", readout_format=".3f",
            continuous_update=False, style=wide,
        )  # fmt: skip
        self._image = widgets.Image(format="png", width=800)
        controls = [self._trace, self._pool, self._load, self._watermark]
        for control in controls:
            control.observe(lambda _: self._draw(), "value")
        self._draw()
        super().__init__(controls, **options)

    def _draw(self) -> None:
        line, _ = picture(
            self._trace.value, self._pool.value, self._load.value, 0, self._requests, self._watermark.value
        )
        self._image.value = shown(fig_picture(line)).data
