"""What `radixrt bench kernels` tells."""

import json
import shutil

import pytest
from radixrt_kernels.cpu.build import COMPILER
from typer.testing import CliRunner

from radixrt.bench import kernels
from radixrt.bench.kernels import Case, Shape, kernels_report
from radixrt.cli import app


def test_every_slot_that_is_read_lies_where_the_shape_says():
    case = Case(Shape(3, 1, 64, num_shared=32))
    table = case.page_table
    assert table.shape == (3, 4)
    assert (table[:, :2] == table[0, :2]).all()
    own = table[:, 2:].flatten().tolist()
    assert len({*own, *table[0, :2].tolist()}) == case.shape.num_pages == 8
    assert case.shape.num_read_bytes == (32 + 3 * 32) * 2 * 3 * 64 * 2


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
        assert row["ratio_to_torch"] == pytest.approx(row["torch_us"] / row["us"])
        assert row["fraction_of_read_bandwidth"] == pytest.approx(row["read_us"] / row["us"])
        assert row["max_error_against_float64"] < 0.02  # bfloat16 outputs of order 1
    machine = measured["machine"]
    assert "paged_decode_shared" in kernels_report(measured)
    assert f"variant {machine['variant']}," in kernels_report(measured)
    told = measured | {"machine": machine | {"refused_variants": ["fastest: the system does not let us"]}}
    assert "not used: fastest: the system does not let us\n" in kernels_report(told)
