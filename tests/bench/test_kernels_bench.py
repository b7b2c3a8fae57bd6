"""What `radixrt bench kernels` tells."""

import itertools
import json
import shutil
from functools import partial

import pytest
from radixrt_kernels.cpu.build import COMPILER
from typer.testing import CliRunner

from radixrt.bench import kernels
from radixrt.bench.kernels import Arm, Case, Shape, kernels_report
from radixrt.cli import app


def test_every_slot_that_is_read_lies_where_the_shape_says():
    case = Case(Shape(3, 1, 64, num_shared=32))
    table = case.page_table
    assert table.shape == (3, 4)
    assert (table[:, :2] == table[0, :2]).all()
    own = table[:, 2:].flatten().tolist()
    assert len({*own, *table[0, :2].tolist()}) == case.shape.num_pages == 8
    assert case.shape.num_read_bytes == (32 + 3 * 32) * 2 * 3 * 64 * 2


def test_arms_take_turns_and_the_order_turns_around():
    log = []
    arms = {name: Arm(partial(log.append, name), num_layers=10) for name in "abc"}
    ticks = itertools.count(step=20.0)
    seconds = kernels._in_turn(arms, num_rounds=2, clock=ticks.__next__)
    assert "".join(log[3:]) == "abccba"  # after a round that is not counted
    assert seconds == {name: [2.0, 2.0] for name in "abc"}  # of one layer each


def test_a_machine_that_slows_down_between_rounds_changes_no_ratio():
    shape = Shape(1, 1, 64)
    rounds = {"x": [1.0, 1.0, 10.0], "x read": [0.5, 0.5, 5.0], "x torch": [3.0, 3.0, 30.0]}
    row = kernels._row("x", shape, rounds, error=0.0)
    assert row["us"] == 1e6
    assert row["fraction_of_read_bandwidth"] == 0.5
    assert row["ratio_to_torch"] == 3.0
    rounds["x read"] = [0.5, 5.0, 5.0]  # two rounds of three
    assert kernels._row("x", shape, rounds, error=0.0)["fraction_of_read_bandwidth"] == 0.5


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")
def test_json_has_what_is_promised(monkeypatch):
    small = {
        "paged_decode": Shape(4, 1, 64),
        "paged_decode_shared": Shape(4, 1, 64, num_shared=48),
        "extend": Shape(1, 16, 64),
    }
    monkeypatch.setattr(kernels, "SHAPES", small)
    outcome = CliRunner().invoke(app, ["bench", "kernels", "--json"])
    assert outcome.exit_code == 0, outcome.output
    measured = json.loads(outcome.stdout)
    for row in measured["cpu"].values():
        assert min(row[key] for key in ("us", "torch_us", "read_us", "gflops_per_s")) > 0
        assert row["ratio_to_torch"] > 0
        assert row["fraction_of_read_bandwidth"] > 0
        assert row["max_error_against_float64"] < 0.02  # bfloat16 outputs of order 1
    machine = measured["machine"]
    assert "paged_decode_shared" in kernels_report(measured)
    assert f"variant {machine['variant']}," in kernels_report(measured)
    told = measured | {"machine": machine | {"refused_variants": ["fastest: the system does not let us"]}}
    assert "not used: fastest: the system does not let us\n" in kernels_report(told)
