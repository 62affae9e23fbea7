import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from kvcache import GPU, Model, ParallelConfig, ServingConfig
from kvcache.hardware import (
    CacheLayers,
    OperatingPoint,
    calibration,
    fitted_rates,
    kv_capacity,
    serving_config,
    serving_configs,
)

A100, H100 = GPU.preset("A100-80GB"), GPU.preset("H100-80GB")
MHA, LLAMA = Model.preset("70B-MHA"), Model.preset("Llama-3-70B")


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [("70B-MHA", 2_621_440), ("Llama-3-70B", 327_680), ("Llama-3-8B", 131_072)],
)
def test_kv_bytes_of_the_presets(model, bytes_per_token):
    assert Model.preset(model).kv_bytes_per_token == bytes_per_token


@pytest.mark.parametrize(
    ("model", "gpus", "overhead", "tokens"),
    # (0.9 x 80e9 n - weights - overhead n) / bytes per token, by hand
    [
        (MHA, 2, 0, 1525),
        (MHA, 4, 0, 56_457),
        (MHA, 8, 0, 166_320),
        (LLAMA, 2, 0, 8_827),
        (LLAMA, 4, 0, 448_280),
        (LLAMA, 8, 2e9, 1_278_358),
    ],
)
def test_kv_capacity(model, gpus, overhead, tokens):
    found = kv_capacity(A100, model, ParallelConfig(2, gpus // 2), overhead_bytes=overhead)
    assert int(found) == tokens


def test_key_value_heads_are_repeated_beyond_their_number():
    wide, split = (kv_capacity(A100, LLAMA, ParallelConfig(*p)) for p in ((16, 1), (8, 2)))
    assert split == pytest.approx(2 * wide)


def test_weights_that_do_not_fit_are_refused_with_the_arithmetic():
    with pytest.raises(ValueError, match=r"0\.9 x 1 x 80 GB = 72\.0 GB usable, less 140\.0 GB .* -68\.0 GB"):
        kv_capacity(A100, MHA, ParallelConfig(1))
    with pytest.raises(ValueError, match=r"2 x 2 GB of overhead leaves -1\.1 GB"):
        kv_capacity(A100, LLAMA, ParallelConfig(2), overhead_bytes=2e9)


def test_a_list_drops_what_does_not_fit_and_says_so():
    with pytest.warns(UserWarning, match="dropped TP1xPP1"):
        kept = serving_configs(A100, MHA, [ParallelConfig(1), ParallelConfig(4)])
    assert [k.name for k in kept] == ["TP4xPP1"]
    with pytest.raises(ValueError, match="no configuration fits: TP1xPP1"):
        serving_configs(A100, MHA, [ParallelConfig(1)])
    with pytest.raises(ValueError, match="the list is empty"):
        serving_configs(A100, MHA, [])


def test_an_unknown_option_is_an_error_even_in_a_list():
    with pytest.raises(TypeError, match="colour"):
        serving_configs(A100, MHA, [ParallelConfig(4)], colour="red")


def test_equation_1_by_hand():
    gpu = GPU("toy", memory_bytes=10e9, flops=1e12, bandwidth=1e9, all_reduce_s=1e-3)
    model = Model("toy", layers=3, heads=4, kv_heads=2, head_size=8, parameters=1e9)
    config = serving_config(gpu, model, ParallelConfig(tensor=2, pipeline=3))
    assert model.kv_bytes_per_token == 2 * 3 * 2 * 8 * 2
    assert config.gpus == 6
    assert config.kv_tokens == (0.9 * 60e9 - 2e9) / 192
    # p alpha L / C = 3 x 2e9 x 100 / 6e12, beta E[xi] / B = 2e9 x 10 / 2e9, N_L tau t_ar = 3 x 2 x 1e-3
    assert config.service_time(100, 10) == pytest.approx(0.1 + 10 + 0.006)
    alone = serving_config(gpu, model, ParallelConfig(1, 1))
    assert alone.overhead_s == 0


def test_measured_form_by_hand():
    point = OperatingPoint(batch=16, context=500, prefill_share=0.25)
    config = serving_config(A100, LLAMA, ParallelConfig(4, 2), service="measured", operating_point=point)
    fit = calibration()["gpus"]["A100-80GB"]["measured"]["4"]
    iteration = (
        fit["decode_t0_s"]
        + fit["decode_per_seq_s"] * 16 / 2
        + fit["decode_per_resident_kv_token_s"] * 8000 / 2
        + 1.5e-5
    )
    assert config.service_time(1000, 200) == pytest.approx(
        1000 * fit["prefill_s_per_token"] + 200 * iteration / 0.75
    )


def test_measured_batch_shrinks_where_memory_is_short():
    small = serving_config(A100, MHA, ParallelConfig(2), service="measured")
    fit = calibration()["gpus"]["A100-80GB"]["measured"]["2"]
    resident = small.kv_tokens
    assert resident < 32 * 1024
    iteration = (
        fit["decode_t0_s"]
        + fit["decode_per_seq_s"] * resident / 1024
        + 8 * fit["decode_per_resident_kv_token_s"] * resident  # 64 heads instead of 8
    )
    assert small.decode_s_per_token == pytest.approx(iteration / 0.8)


def test_measured_form_needs_a_measurement():
    for gpu, model, parallel in (
        (A100, Model.preset("Llama-3-8B"), ParallelConfig(1)),
        (A100, LLAMA, ParallelConfig(16)),
        (GPU("other", 80e9, 1e14, 1e12), LLAMA, ParallelConfig(4)),
    ):
        with pytest.raises(ValueError, match="measured service times exist"):
            serving_config(gpu, model, parallel, service="measured")
    with pytest.raises(ValueError, match="expected one of"):
        serving_config(A100, LLAMA, ParallelConfig(4), service="guess")


@pytest.mark.parametrize("name", ["A100-80GB", "H100-80GB"])
def test_fitted_rates_have_the_least_relative_squares(name):
    """Equation 1 has one constant for all TP degrees: too slow at TP 1, too fast at TP 8."""
    fit = calibration()
    work = 2 * fit["model"]["layer_parameters"]
    measured = fit["gpus"][name]["measured"]
    for found, field in zip(fitted_rates(name), ("prefill_s_per_token", "decode_mean_s"), strict=True):
        times = np.array([row[field] for row in measured.values()])
        tau = np.array([1, 2, 4, 8])

        def error(rate, times=times, tau=tau):
            return np.sum((work / (tau * rate) / times - 1) ** 2)

        best = minimize_scalar(error, bounds=(found / 3, found * 3), method="bounded", options={"xatol": 1})
        assert found == pytest.approx(best.x, rel=1e-6)
        relative = work / (tau * found) / times
        assert relative[0] > 1.05
        assert relative[3] < 0.8


def test_h100_is_faster():
    a, h = (serving_config(g, MHA, ParallelConfig(4)) for g in (A100, H100))
    assert a.kv_tokens == h.kv_tokens
    assert h.service_time(1000, 200) < a.service_time(1000, 200)


def test_calibration_carries_its_provenance():
    provenance = calibration()["provenance"]
    assert {"source", "address", "licence", "measured", "derived", "estimated", "how"} <= set(provenance)


def test_service_time_takes_arrays():
    config = ServingConfig("k", 2, 100.0, 0.5, 2.0, 1.0)
    np.testing.assert_allclose(config.service_time(np.array([0.0, 2.0]), np.array([1.0, 3.0])), [3.0, 8.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParallelConfig(0), "tensor is 0"),
        (lambda: ParallelConfig(2, 1.5), "pipeline is 1.5"),
        (lambda: GPU("g", 0, 1, 1), "memory_bytes is 0"),
        (lambda: GPU("g", 1, 1, 1, -1), "all_reduce_s is -1"),
        (lambda: GPU.preset("B200"), "presets are"),
        (lambda: Model("m", 1, 6, 4, 8, 1e9), "divisor of heads"),
        (lambda: Model("m", 1, 4, 4, 8, float("nan")), "parameters is nan"),
        (lambda: Model.preset("GPT-5"), "presets are"),
        (lambda: OperatingPoint(prefill_share=1.0), "prefill_share is 1.0"),
        (lambda: ServingConfig("k", 0, 1, 1, 1), "gpus is 0"),
        (lambda: ServingConfig("k", 1, float("inf"), 1, 1), "kv_tokens is inf"),
        (lambda: ServingConfig("k", 1, 1, -1, 1), "prefill_s_per_token is -1"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises((ValueError, KeyError), match=message):
        make()


def test_whole_numbers_are_whole_in_every_label():
    assert ParallelConfig(4.0).name == "TP4xPP1"
    assert ParallelConfig(8, 1, 8).name == "TP8xPP1xEP8"
    for bad in (0, 2.5, float("nan"), True):
        with pytest.raises(ValueError, match=r"tensor is .*whole number"):
            ParallelConfig(bad)
    with pytest.raises(ValueError, match="expert is 3; expected a divisor of tensor = 8"):
        ParallelConfig(8, 1, 3)


def test_a_split_that_engines_refuse_is_refused():
    odd = Model("28 heads", 28, 28, 4, 128, 7.62e9)
    with pytest.raises(ValueError, match="28 heads; expected a multiple of TP = 8"):
        serving_config(A100, odd, ParallelConfig(8))
    with pytest.raises(ValueError, match="6 key-value heads; expected a divisor or a multiple of TP = 4"):
        kv_capacity(A100, Model("m", 2, 12, 6, 8, 1e9), ParallelConfig(4))
    mixture = Model("mixture", 4, 8, 8, 8, 1e9, experts=6, experts_per_token=2)
    assert kv_capacity(A100, mixture, ParallelConfig(2, 1, 2)) > 0
    with pytest.raises(ValueError, match="6 experts; expected a multiple of EP = 4"):
        kv_capacity(A100, mixture, ParallelConfig(4, 1, 4))


@pytest.mark.parametrize("share", [90, 1.2, 0, -0.1, float("nan"), float("inf")])
def test_a_share_of_memory_is_within_0_and_1(share):
    with pytest.raises(ValueError, match=r"share within \(0, 1\]"):
        kv_capacity(A100, LLAMA, ParallelConfig(4), utilisation=share)


@pytest.mark.parametrize("overhead", [-5e9, float("nan"), float("inf")])
def test_overhead_takes_and_never_gives(overhead):
    with pytest.raises(ValueError, match=r"overhead_bytes is .*>= 0"):
        kv_capacity(A100, LLAMA, ParallelConfig(4), overhead_bytes=overhead)


def test_a_mixture_is_prefilled_with_the_weights_a_token_meets():
    mixture = Model("8x7B", 32, 32, 8, 128, 46.7e9, active_parameters=12.9e9)
    found = serving_config(A100, mixture, ParallelConfig(4))
    assert found.prefill_s_per_token == pytest.approx(2 * 12.9e9 / (4 * A100.flops))
    with pytest.raises(ValueError, match="active_parameters is 5e"):
        Model("m", 1, 1, 1, 1, 46.7e9, active_parameters=50e9)
    with pytest.raises(ValueError, match="experts_per_token is 9"):
        Model("m", 1, 1, 1, 1, 1e9, experts=8, experts_per_token=9)


def test_latent_attention_keeps_a_vector_on_every_rank():
    latent = Model("latent", 61, 128, 1, 128, 671e9, 1.0, cache=(CacheLayers(61, 1, 128, latent=576),))
    assert latent.kv_bytes_per_token == 61 * 576 * 2
    h200 = GPU("H200", memory_bytes=141e9, flops=1e15, bandwidth=4.8e12)
    # 8 ranks keep the same vector, so the group holds what one rank does
    assert kv_capacity(h200, latent, ParallelConfig(8)) == pytest.approx((0.9 * 141e9 - 671e9 / 8) / 70272)
    with pytest.raises(ValueError, match="heads is 8; expected 1 with a latent vector"):
        CacheLayers(61, 8, 128, latent=576)


def test_windows_and_states_make_a_token_cost_what_its_request_does():
    mixed = Model(
        "mixed",
        4,
        8,
        8,
        8,
        1e9,
        cache=(CacheLayers(1, 8, 8), CacheLayers(3, 8, 8, window=100)),
        state_bytes=1e6,
    )
    per_layer = 2 * 8 * 8 * 2
    assert mixed.request_bytes(50) == 4 * per_layer * 50 + 1e6
    assert mixed.request_bytes(1000) == per_layer * (1000 + 3 * 100) + 1e6
    long, short = (kv_capacity(A100, mixed, ParallelConfig(1), context=c) for c in (10_000, 100))
    assert long / short == pytest.approx(
        mixed.request_bytes(100) / 100 * 10_000 / mixed.request_bytes(10_000)
    )
