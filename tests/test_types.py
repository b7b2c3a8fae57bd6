"""Values that travel: the helpers that nothing else shows."""

from radixrt import GrammarSpec, Histogram


def test_payload_gives_back_what_was_put_in_order_kept():
    assert GrammarSpec.choice(["b", "a"]).payload() == ["b", "a"]
    assert list(GrammarSpec.json_schema({"z": 1, "a": 2}).payload()) == ["z", "a"]


def test_histogram_quantile_bounds_the_times_below_it():
    histogram = Histogram()
    for seconds in (0.001, 0.002, 0.003, 1.0):
        histogram = histogram.plus(seconds)
    assert 0.003 <= histogram.quantile_s(0.75) <= 0.0064
    assert histogram.quantile_s(1.0) >= 1.0
    assert Histogram().quantile_s(0.5) == 0.0
