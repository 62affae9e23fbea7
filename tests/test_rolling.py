"""Rolling policies against hand-worked steps, brute force, least squares, and what they must never see."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import expit, logit

from kvcache import LengthDistribution, ScaleShift, Wasserstein1, WassersteinInf
from kvcache.paper.digests import load_digests
from kvcache.paper.methods.forecasts import (
    Blend,
    Conformal,
    Exponential,
    First,
    Fractile,
    Latest,
    OnlineGradient,
    SameTime,
    best_between,
    compare,
    cost_over_hindsight,
    follow,
    interpolated,
    mixture_grid,
)
from kvcache.rolling import (
    AdaHedge,
    Aggregate,
    LogOdds,
    Past,
    Rolling,
    Rule,
    adaptive,
    calibrating_shift,
    log_odds,
)

UPPER = 12

RULES: dict[str, Rule] = {
    "static": Fractile(First(2)),
    "last": Fractile(Latest(1)),
    "day": Fractile(Latest(3)),
    "all": Fractile(Latest(99)),
    "exponential": Fractile(Exponential(2.0)),
    "blend": Fractile(Blend(Latest(1), SameTime(3), 0.6)),
    "W1": Fractile(Latest(3), Wasserstein1(0.15, relative=True)),
    "W-inf": Fractile(Latest(3), WassersteinInf(0.1, relative=True)),
    "scale": Fractile(Latest(3), ScaleShift(0.8, 1.25)),
    "gradient": OnlineGradient(),
    "conformal": Conformal(Latest(3), 0.1),
    "log odds": LogOdds(season=3),
    "aggregate": Aggregate((Fractile(Latest(1)), Fractile(Latest(99)), LogOdds())),
    "adaptive": adaptive(3),
}


def window(counts: list[int] | np.ndarray) -> LengthDistribution:
    return LengthDistribution.from_counts(np.arange(len(counts)), counts, len(counts) - 1)


counts = st.lists(st.integers(0, 50), min_size=UPPER + 1, max_size=UPPER + 1).filter(any)
streams = st.lists(counts.map(window), min_size=2, max_size=9)


def drifting(rng: np.random.Generator, windows: int, upper: int = 60) -> list[LengthDistribution]:
    """Geometric lengths whose mean walks, cut at the bound."""
    means = 10 * np.exp(np.cumsum(rng.normal(0, 0.25, windows)))
    return [
        LengthDistribution.from_samples(np.minimum(rng.geometric(1 / (1 + m), 400), upper), upper)
        for m in means
    ]


# ---- nothing is seen too early ----------------------------------------------------------------------


@dataclass(frozen=True)
class Diary(Rule):
    """Writes down what it is asked and told."""

    entries: list = field(default_factory=list)

    def start(self, c_p, c_w):
        rule = self

        class Learner:
            def reservation(self, past):
                rule.entries.append(("asked", len(past), past.requests.copy()))
                return 1.0

            def learn(self, past, window):
                rule.entries.append(("told", len(past), window.total))

        return Learner()


def test_a_window_is_drawn_only_after_every_reservation_for_it():
    diary = Diary()
    drawn = []

    def stream():
        for t in range(5):
            drawn.append(t)
            diary.entries.append(("drawn", t, None))
            yield window([1, t + 1, 2])

    follow(diary, stream(), ratios=(2.0, 10.0))
    assert drawn == [0, 1, 2, 3, 4]
    for t in range(1, 5):
        at = diary.entries.index(("drawn", t, None))
        asked = [e for e in diary.entries[:at] if e[0] == "asked" and e[1] == t]
        assert len(asked) == 2
        assert all(np.array_equal(e[2], [4 + s for s in range(t)]) for e in asked)
        assert not [e for e in diary.entries[:at] if e[0] == "told" and e[1] >= t]


@settings(max_examples=40)
@given(streams, streams, st.sampled_from(sorted(RULES)))
def test_what_comes_later_changes_no_earlier_reservation(head, tail, name):
    other = [window(np.roll(w.cdf(np.arange(UPPER + 1)), 3) * 10 + 1) for w in tail]
    one = follow(RULES[name], head + tail, ratios=(3.0,))
    two = follow(RULES[name], head + other, ratios=(3.0,))
    known = one["window"] <= len(head)
    assert np.array_equal(one["reservation"][known], two["reservation"][known])


@settings(max_examples=40)
@given(streams, st.sampled_from(sorted(RULES)))
def test_it_does_not_matter_when_a_pair_of_costs_is_first_asked_for(windows, name):
    early, late = Rolling(RULES[name]), Rolling(RULES[name])
    for w in windows:
        early.update(w)
        late.update(w)
        early.reservation(20.0, 2.0)
    assert late.reservation(20.0, 2.0) == early.reservation(20.0, 2.0)
    assert late.windows == len(windows)


@settings(max_examples=40)
@given(streams, st.sampled_from(sorted(RULES)), st.floats(0.2, 200))
def test_reservations_stay_within_the_support(windows, name, rho):
    run = follow(RULES[name], windows, ratios=(rho,))
    assert run["reservation"].between(0, UPPER).all()
    assert (run["cost"] >= run["hindsight"] - 1e-9).all()


# ---- memories ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "shares"),
    [
        (Latest(1), [0, 0, 0, 1]),
        (Latest(2), [0, 0, 0.75, 0.25]),
        (Latest(9), [0.1, 0.5, 0.3, 0.1]),
        (First(2), [1 / 6, 5 / 6, 0, 0]),
        (First(9), [0.1, 0.5, 0.3, 0.1]),
        (Exponential(1.0), [1 / 15, 2 / 15, 4 / 15, 8 / 15]),
        (SameTime(3), [0, 1, 0, 0]),
        (SameTime(4), [1, 0, 0, 0]),
        (SameTime(5), [0, 0, 0, 1]),
        (Blend(Latest(1), SameTime(4), 0.25), [0.75, 0, 0, 0.25]),
    ],
)
def test_shares_of_past_windows(memory, shares):
    assert memory.shares(np.array([10.0, 50.0, 30.0, 10.0])) == pytest.approx(shares, abs=1e-15)


@given(streams, st.floats(0.5, 100))
def test_pooled_windows_give_the_fractile_of_their_mixture(windows, rho):
    policy = Rolling(Fractile(Latest(2)))
    for w in windows:
        policy.update(w)
    pooled = LengthDistribution.mix(windows[-2:])
    assert policy.reservation(rho, 1.0) == pooled.quantile(rho / (1 + rho))


@given(streams, st.sampled_from(["W1", "W-inf", "scale"]))
def test_an_ambiguity_set_acts_on_the_forecast(windows, name):
    policy = Rolling(RULES[name])
    for w in windows:
        policy.update(w)
    pooled = LengthDistribution.mix(windows[-3:])
    assert policy.reservation(10.0, 1.0) == pytest.approx(
        RULES[name].ambiguity.reservation(pooled, 10.0, 1.0), rel=1e-9
    )


# ---- trackers, by hand ----------------------------------------------------------------------------


def test_gradient_steps_by_hand():
    # rho = 3: q* = 3/4. The first window's fractile is 8, so the scale is 8.
    first, short, long = window([0] * 8 + [4]), window([10] + [0] * 8), window([0] * 8 + [10])
    policy = Rolling(OnlineGradient())
    policy.update(first)
    assert policy.reservation(3.0, 1.0) == 8
    policy.update(short)  # all fit: gradient 1/4, squares 1/16, step 8
    assert policy.reservation(3.0, 1.0) == 0
    policy.update(long)  # none fits: gradient -3/4, squares 10/16, step -6 / sqrt(10/16) < 8
    assert policy.reservation(3.0, 1.0) == pytest.approx(6 / np.sqrt(10 / 16))


def test_conformal_levels_by_hand():
    flat = window([1] * 10)
    policy = Rolling(Conformal(Latest(1), 0.4))
    policy.update(flat)
    assert policy.reservation(1.0, 1.0) == 4  # level 0.5 of ten equal atoms
    policy.update(flat)  # F(4) = 0.5: no miss
    assert policy.reservation(1.0, 1.0) == 4
    policy.update(window([0] * 9 + [10]))  # F(4) = 0: the level rises by 0.2, but the last window is all 9
    assert policy.reservation(1.0, 1.0) == 9
    policy.update(flat)  # F(9) = 1: the level falls by 0.2
    assert policy.reservation(1.0, 1.0) == 4


@dataclass(frozen=True)
class Edge(Rule):
    """The same reservation always."""

    tokens: float

    def start(self, c_p, c_w):
        rule = self

        class Learner:
            def reservation(self, past):
                return rule.tokens

            def learn(self, past, window):
                pass

        return Learner()


# ---- AdaHedge -------------------------------------------------------------------------------------


def test_adahedge_by_hand():
    hedge = AdaHedge(2)
    assert hedge.weights() == pytest.approx([0.5, 0.5])
    hedge.learn([0.0, 1.0])  # infinite rate: mix loss 0, mean loss 1/2, so the gap is 1/2
    assert hedge.gap == pytest.approx(0.5)
    rate = np.log(2) / 0.5
    assert hedge.weights()[0] == pytest.approx(1 / (1 + np.exp(-rate)))
    hedge.learn([1.0, 0.0])
    mean = 1 / (1 + np.exp(-rate))
    mix = -np.log(mean * np.exp(-rate) + (1 - mean)) / rate
    assert hedge.gap == pytest.approx(0.5 + mean - mix)
    assert hedge.weights() == pytest.approx([0.5, 0.5])


sixteenths = st.integers(-80, 800).map(lambda n: n / 16)
losses = st.integers(2, 6).flatmap(
    lambda k: st.lists(st.lists(sixteenths, min_size=k, max_size=k), min_size=1, max_size=40)
)


@given(losses)
def test_adahedge_keeps_its_regret_bound(rounds):
    hedge, paid = AdaHedge(len(rounds[0])), 0.0
    for row in rounds:
        paid += float(hedge.weights() @ np.array(row))
        hedge.learn(row)
    table = np.array(rounds)
    spread = np.ptp(table, axis=1)
    log_k = np.log(table.shape[1])
    bound = np.sqrt(log_k * (spread**2).sum()) + (4 / 3 * log_k + 2) * spread.max()
    assert paid <= table.sum(0).min() + bound + 1e-6


@given(losses, st.sampled_from([2.0**-10, 2.0**20]))
def test_adahedge_knows_no_scale(rounds, scale):
    one, two = AdaHedge(len(rounds[0])), AdaHedge(len(rounds[0]))
    for row in rounds:
        one.learn(row)
        two.learn(scale * np.array(row))
    assert one.weights() == pytest.approx(two.weights(), abs=1e-6)


@settings(max_examples=40)
@given(streams, st.floats(0.5, 100))
def test_an_aggregate_stays_between_its_rules_and_near_the_best(windows, rho):
    rules = {name: RULES[name] for name in ("static", "last", "all", "gradient")}
    runs = compare({**rules, "mean": Aggregate(tuple(rules.values()))}, windows, ratios=(rho,))
    table = runs.pivot_table(index="window", columns="policy", values="reservation")
    experts = table[list(rules)]
    assert (table["mean"] >= experts.min(axis=1) - 1e-9).all()
    assert (table["mean"] <= experts.max(axis=1) + 1e-9).all()

    mean = runs[runs["policy"] == "mean"].set_index("window")
    paid = (mean["cost"] * mean["requests"]).sum()
    fits = np.array([windows[t].cdf(eta) for t, eta in mean["reservation"].items()])
    slope = np.abs(mean["requests"] * (1 + rho) * (fits - rho / (1 + rho)))
    spread, log_k = slope * np.ptp(experts.to_numpy(), axis=1), np.log(len(rules))
    bound = np.sqrt(log_k * (spread**2).sum()) + (4 / 3 * log_k + 2) * spread.max()
    shares = np.vstack([np.eye(len(rules)), np.random.default_rng(len(windows)).dirichlet([0.5] * 4, 20)])
    for share in shares:
        fixed = (experts * share).sum(axis=1)
        cost = sum(windows[t].total * windows[t].cost(eta, rho, 1.0) for t, eta in fixed.items())
        assert paid <= cost + bound + 1e-6


def test_adahedge_bears_a_choice_without_weight_that_then_loses_least():
    hedge = AdaHedge(2)
    hedge.learn([0.0, 1e-3])
    hedge.learn([0.0, 1e6])
    hedge.learn([1e6, 0.0])
    assert np.isfinite(hedge.gap)
    assert hedge.weights().sum() == pytest.approx(1.0)


def test_a_window_weighs_as_much_as_its_requests():
    """The loss of a rule is its reservation times the slope of what all requests of the window cost."""
    learner = Aggregate((Edge(0.0), Edge(11.0))).start(3.0, 1.0)
    past = Past(UPPER)
    past.append(window([1] * (UPPER + 1)))
    before = np.zeros(2)
    for count in (1, 1000):
        seen = window([count] * (UPPER + 1))
        advice, mean = learner.advice(past), learner.reservation(past)
        steps = [seen.total * seen.cost(mean + step, 3.0, 1.0) for step in (-1e-4, 1e-4)]
        learner.learn(past, seen)
        slope = (steps[1] - steps[0]) / 2e-4
        np.testing.assert_allclose(learner.hedge.losses - before, slope * advice, rtol=1e-6)
        before = learner.hedge.losses.copy()
        past.append(seen)


def test_the_default_policy_starts_from_a_slow_and_a_fast_return_to_the_mean():
    """Before anything is learned the experts go back 20 % and 80 % of the way."""
    past = Past(UPPER)
    for counts in ([30] + [1] * UPPER, [1] * UPPER + [30]):
        past.append(window(counts))
    learner = adaptive().start(3.0, 1.0)
    last, (to_the_mean, _) = adaptive().rules[0].regressors(past)
    at = int(np.argmax(np.abs(to_the_mean)))
    shares = [(expert.forecast(past) - last)[at] / to_the_mean[at] for expert in learner.experts]
    assert shares == pytest.approx([0.2, 0.2, 0.8, 0.8])


def test_a_mean_of_two_fixed_reservations_is_learned_where_either_alone_is_dear():
    flat = [window([1] * (UPPER + 1))] * 60
    rules = {"low": Edge(0.0), "high": Edge(12.0)}
    run = compare({**rules, "mean": Aggregate(tuple(rules.values()))}, flat, ratios=(1.0,))
    late = cost_over_hindsight(run[run["window"] > 30], by=["policy"])
    assert late["mean"] < 1.05 < 1.5 < late[["low", "high"]].min()


# ---- log odds --------------------------------------------------------------------------------------


def test_log_odds_count_half_a_request():
    assert log_odds(window([3, 0, 1])) == pytest.approx(np.log([3.5 / 1.5, 3.5 / 1.5, 4.5 / 0.5]))


@given(counts.map(window), st.floats(0.5, 100))
def test_one_window_is_forecast_to_come_again(only, rho):
    policy = Rolling(LogOdds())
    policy.update(only)
    q = rho / (1 + rho)
    smooth = (only.cdf(np.arange(UPPER + 1)) + 0.5 / only.total) / (1 + 1 / only.total)
    expected = np.flatnonzero(smooth >= q * (1 - 1e-9))
    assert policy.reservation(rho, 1.0) == (expected[0] if expected.size else UPPER)


def test_coefficients_are_the_weighted_ridge_estimate():
    windows = drifting(np.random.default_rng(5), 12)
    rule = LogOdds(ridge=2.0, season=3, forgetting=1.0, calm=np.inf)
    past, learner, target = Past(60), rule.start(9.0, 1.0), logit(0.9)
    rows, goals = [np.sqrt(2.0) * np.eye(3)], [np.sqrt(2.0) * np.array(rule.prior)]
    for t, w in enumerate(windows):
        if t:
            last, regressors = rule.regressors(past)
            z = np.maximum.accumulate(last + learner.coefficients() @ regressors)
            inside = np.flatnonzero((z >= target - 1.0) & (z < target + 1.0))
            stretch = z[inside + 1] - z[inside]
            root = np.sqrt(stretch / stretch.sum())
            rows.append(root[:, None] * regressors[:, inside].T)
            goals.append(root * (log_odds(w) - last)[inside])
        learner.learn(past, w)
        past.append(w)
        expected, *_ = np.linalg.lstsq(np.concatenate(rows), np.concatenate(goals), rcond=None)
        assert learner.coefficients() == pytest.approx(expected, abs=1e-8)


def test_regressors_by_hand():
    past = Past(2)
    seen = [window([a, b, 1]) for a, b in [(1, 2), (3, 1), (2, 2), (5, 1), (4, 4), (1, 1)]]
    rule = LogOdds(season=2, half_life=1.0, doubt=1.0)
    for w in seen[:1]:
        past.append(w)
    assert np.array_equal(rule.regressors(past)[1], np.zeros((3, 3)))  # nothing to compare one window with
    for w in seen[1:]:
        past.append(w)
    z = np.array([log_odds(w) for w in seen])
    last, rows = rule.regressors(past)
    assert last == pytest.approx(z[5])
    assert rows[0] == pytest.approx(0.5 ** np.arange(5, -1, -1) @ z / (2 - 0.5**5) - z[5])
    assert rows[1] == pytest.approx(z[5] - z[4])
    # Window 6 comes: windows 4 and 2 were at its time, and no window came before window 0.
    assert rows[2] == pytest.approx(((z[4] - z[3]) + (z[2] - z[1])) / 3)


def test_a_season_is_learned():
    short, long = window([50, 30, 10, 5, 5, 0, 0, 0]), window([0, 0, 5, 5, 10, 30, 30, 20])
    windows = [short, short, short, long] * 8
    run = compare(
        {"season": LogOdds(ridge=1.0, season=4), "none": LogOdds(ridge=1.0), "last": Fractile(Latest(1))},
        windows,
        (5.0,),
    )
    late = cost_over_hindsight(run[run["window"] > 20], by=["policy"])
    assert late["season"] < 1.3 < 1.8 < late["none"] < late["last"]


def test_the_recalibrated_level_fits_the_target_share_on_average():
    windows = drifting(np.random.default_rng(2), 20)
    rule, past = LogOdds(calm=4.0), Past(60)
    learner = rule.start(20.0, 1.0)
    for w in windows:
        learner.learn(past, w)
        past.append(w)
    errors, weights = np.array(learner.errors), np.array(learner.weights)
    weights = weights / weights.mean()
    level = learner.target + learner.shift()
    share = (4 * expit(level) + weights @ expit(level + errors)) / (4 + weights.sum())
    assert errors.size == 16
    assert abs(learner.shift()) > 1e-3
    assert share == pytest.approx(20 / 21, abs=1e-8)


@given(
    st.floats(-2, 6),
    st.lists(st.tuples(st.floats(-15, 15), st.floats(1, 1e6)), min_size=1, max_size=30),
    st.floats(0.1, 50),
)
def test_the_calibrating_shift_is_the_root_that_scipy_finds(target, seen, calm):
    errors, weights = (np.array(column) for column in zip(*seen, strict=True))
    scaled = weights / weights.mean()

    def surplus(a):
        fits = calm * expit(target + a) + scaled @ expit(target + a + errors)
        return fits / (calm + scaled.sum()) - expit(target)

    found = calibrating_shift(target, errors, weights, calm)
    expected = brentq(surplus, -max(errors.max(), 0) - 1e-9, -min(errors.min(), 0) + 1e-9, xtol=1e-12)
    assert found == pytest.approx(expected, abs=1e-6) or abs(surplus(found)) < 1e-13


def test_without_recalibration_there_is_no_shift():
    windows = drifting(np.random.default_rng(2), 6)
    learner, past = LogOdds(calm=np.inf).start(20.0, 1.0), Past(60)
    for w in windows:
        learner.learn(past, w)
        past.append(w)
    assert learner.shift() == 0


def test_one_odd_window_does_not_drag_the_log_odds_as_far_as_the_mixture():
    usual, odd = window([90, 9, 1] + [0] * 18), window([50, 9, 1] + [0] * 17 + [40])
    rules = {"log odds": LogOdds(prior=(0.8, 0.0, 0.0), calm=np.inf), "mixture": Fractile(Exponential(2.0))}
    run = compare(rules, [usual] * 12 + [odd, usual], ratios=(10.0,))
    after = run[run["window"] == 13].set_index("policy")["reservation"]
    assert after["log odds"] < 20 == after["mixture"]


# ---- accounting ----------------------------------------------------------------------------------


@given(streams, st.floats(0.2, 100))
def test_hindsight_is_the_least_cost_of_all_reservations(windows, rho):
    run = follow(Fractile(Latest(1)), windows, ratios=(rho,))
    for row in run.itertuples():
        lengths = np.arange(UPPER + 1)
        w = windows[row.window]
        p = np.zeros(UPPER + 1)
        p[w.tokens] = w.probabilities
        table = rho * np.maximum(lengths[None] - lengths[:, None], 0) + np.maximum(
            lengths[:, None] - lengths[None], 0
        )
        assert row.hindsight == pytest.approx((table @ p).min(), abs=1e-9)
        assert row.cost == pytest.approx(table[int(row.reservation)] @ p, abs=1e-9)
        assert row.requests == w.total


def test_cost_over_hindsight_weighs_windows_by_requests():
    runs = pd.DataFrame(
        {"policy": "a", "rho": 2.0, "requests": [1.0, 3.0], "cost": [10.0, 2.0], "hindsight": [5.0, 1.0]}
    )
    assert cost_over_hindsight(runs)["a", 2.0] == 2.0
    runs["cost"] = [5.0, 2.0]
    assert cost_over_hindsight(runs)["a", 2.0] == pytest.approx(11 / 8)


@settings(max_examples=40)
@given(streams, st.floats(0.5, 50))
def test_the_best_between_bounds_its_rules_and_any_mean_of_them(windows, rho):
    rules = {name: RULES[name] for name in ("last", "all", "gradient")}
    runs = compare({**rules, "mean": Aggregate(tuple(rules.values()))}, windows, ratios=(rho,))
    bound = best_between(runs[runs["policy"] != "mean"], windows)
    merged = runs.merge(bound, on=["window", "rho"], suffixes=("", "_bound"))
    assert (merged["cost_bound"] <= merged["cost"] + 1e-9).all()
    assert (merged["cost_bound"] >= merged["hindsight"] - 1e-9).all()


def test_an_interpolation_sees_the_window_before_and_after():
    windows = [window([9, 0, 0, 1]), window([5, 5, 0, 0]), window([1, 0, 0, 9])]
    run = interpolated(windows, ratios=(1.0, 3.0))
    assert run["window"].tolist() == [1, 1]  # the last window has no neighbour after it
    assert run["reservation"].tolist() == [0.0, 3.0]


# ---- errors ------------------------------------------------------------------------------------------


def test_errors_say_what_was_expected():
    policy = Rolling(Fractile(Latest(1)))
    with pytest.raises(ValueError, match="no window seen yet"):
        policy.reservation(1.0, 1.0)
    policy.update(window([1, 2]))
    with pytest.raises(ValueError, match="upper is 2; expected 1"):
        policy.update(window([1, 2, 3]))
    assert repr(policy) == "Rolling(Fractile, 1 windows seen)"
    with pytest.raises(ValueError, match="windows: empty"):
        follow(Fractile(Latest(1)), [])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Latest(0), "windows: 0"),
        (lambda: First(0), "windows: 0"),
        (lambda: SameTime(1.5), "season: 1.5"),
        (lambda: Exponential(0.0), "half_life: 0"),
        (lambda: Blend(Latest(1), Latest(2), 1.5), "share: 1.5"),
        (lambda: Aggregate(()), "rules: empty"),
        (lambda: LogOdds(season=0), "season: 0"),
        (lambda: LogOdds(ridge=0.0), "ridge: 0"),
        (lambda: LogOdds(forgetting=0.0), "forgetting: 0"),
        (lambda: LogOdds(half_life=-1.0), "half_life: -1"),
        (lambda: LogOdds(doubt=-1.0), "doubt: -1"),
        (lambda: OnlineGradient(0.0), "scale: 0"),
        (lambda: Conformal(Latest(1), -0.1), "step: -0.1"),
    ],
)
def test_parameters_are_checked(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# ---- real windows ------------------------------------------------------------------------------------


def test_on_a_real_trace_the_default_beats_static_and_rolling_fractiles_and_the_grid():
    windows = list(load_digests("servegen-m-small", "window").values())
    rules = {
        "static": Fractile(First(4)),
        "last": Fractile(Latest(1)),
        "day": Fractile(Latest(4)),
        "adaptive": adaptive(4),
    }
    runs = compare({**rules, **mixture_grid(4)}, windows, ratios=(20.0,))
    ratio = cost_over_hindsight(runs[runs["window"] >= 4], by=["policy"])
    assert ratio["adaptive"] == ratio.min()
    assert 1 < ratio["adaptive"] < 1.015
    assert ratio["static"] > 1.2
