"""Products on the matrix unit (AMX), on CPUs without one: in plain C++, and the real machine code trapped."""

import ctypes
import logging
import mmap
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from radixrt_kernels.cpu import BuildError, build, library, load_library, supported_variants
from radixrt_kernels.cpu.build import COMPILER, FLAGS, LINK_FLAGS, SOURCE_FOLDER

from radixrt.config import home_folder
from tests.support.logs import own_records
from tests.support.variants import CPU_FLAGS, EMULATED_TILES, TILE_FLAGS, VARIANT_NAMES, VARIANTS_BY_NAME

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no C++ compiler")

HERE = Path(__file__).parent
AMX, EMULATED_PLAIN, VECTORS, PLAIN = (
    VARIANTS_BY_NAME[name] for name in ("amx_bf16", "amx_emulated_plain", "avx512_bf16", "plain")
)
# What is used where the matrix unit cannot be.
NEXT = next(name for name in VARIANT_NAMES if name != AMX.name)
# With the real one where there is one.
TILED = (*supported_variants(CPU_FLAGS, [AMX]), *EMULATED_TILES)
POINTER, INT = ctypes.c_void_p, ctypes.c_int64

needs_vectors = pytest.mark.skipif(not VECTORS.needs <= CPU_FLAGS, reason="the CPU lacks AVX512-BF16")
needs_no_tiles = pytest.mark.skipif(TILE_FLAGS <= CPU_FLAGS, reason="this CPU has a matrix unit")


def compile_library(source, target, *flags):
    command = [
        COMPILER,
        *FLAGS,
        *flags,
        *LINK_FLAGS,
        f"-I{SOURCE_FOLDER}",
        str(HERE / source),
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return target


def load_products(path):
    found = ctypes.CDLL(str(path))
    found.multiply_rows.argtypes = (POINTER, INT, INT, POINTER, INT, INT, ctypes.c_int32, INT, POINTER)
    found.multiply_tiles.argtypes = (POINTER, POINTER, POINTER, POINTER)
    assert found.request_permission() == 0
    return found


@pytest.fixture(scope="module", params=TILED, ids=lambda variant: variant.name)
def products_path(request, tmp_path_factory):
    target = tmp_path_factory.mktemp("products") / f"{request.param.name}.so"
    return compile_library("amx_product.cpp", target, *request.param.flags)


@pytest.fixture
def products(products_path):
    return load_products(products_path)


def bfloat16(values):
    """Cut floats to their upper halves."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widened(halves):
    return (halves.astype(np.uint32) << 16).view(np.float32)


def documented(sums, left, right):
    """Give sums + left @ right as TDPBF16PS is described: even and odd elements apart, then together, then added.

    Args: sums: [M, N]. left: [M, K]. right: [N, K]; K even. Products of two bfloat16 are exact in float32.
    """
    parts = np.zeros((2, *sums.shape), np.float32)
    for k in range(left.shape[1]):
        parts[k % 2] += left[:, k, None] * right[None, :, k]
    return sums + (parts[0] + parts[1])


def expected_product(rows, weight):
    """Give rows @ weight.T as runs of 32 elements in order."""
    sums = np.zeros((len(rows), len(weight)), np.float32)
    for first in range(0, rows.shape[1], 32):
        sums = documented(sums, rows[:, first : first + 32], weight[:, first : first + 32])
    return sums


def panels_of(weight):
    """Give panels of 32 outputs, step by step (layout: src/tile.h)."""
    num_outputs, num_inputs = weight.shape
    words = weight.view(np.uint32).reshape(num_outputs // 32, 32, num_inputs // 2)
    return np.ascontiguousarray(words.transpose(0, 2, 1))


def case(num_rows, num_steps, *, num_outputs=64):
    generator = np.random.default_rng(num_rows * 1000 + num_steps)
    rows = bfloat16(generator.normal(size=(num_rows, 2 * num_steps)))
    return rows, bfloat16(generator.normal(size=(num_outputs, 2 * num_steps)))


def multiply(products, rows, weight, *, num_threads=1, num_rows=None, num_before=0):
    panels = panels_of(weight)
    num_rows, num_steps = len(rows) if num_rows is None else num_rows, rows.shape[1] // 2
    sums = np.zeros((num_rows, len(weight)), np.float32)
    products.multiply_rows(
        *(rows.ctypes.data, num_steps, num_rows, panels.ctypes.data),
        *(len(panels), num_steps, num_threads, num_before, sums.ctypes.data),
    )
    return sums


def same_bits(a, b):
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


ROW_COUNTS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 49, 100)
STEP_COUNTS = (1, 2, 15, 16, 17, 31, 32, 33, 50)


@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_a_product_has_the_documented_bits_whatever_the_number_of_rows(products, num_rows):
    for num_steps in STEP_COUNTS:
        rows, weight = case(num_rows, num_steps)
        assert same_bits(multiply(products, rows, weight), expected_product(widened(rows), widened(weight)))


def test_many_blocks_of_rows_and_threads_change_no_bit(products):
    rows, weight = case(500, 512, num_outputs=96)  # three blocks of inputs
    expected = expected_product(widened(rows), widened(weight))
    for num_threads in (1, 3):
        assert same_bits(multiply(products, rows, weight, num_threads=num_threads), expected)


@pytest.mark.parametrize(
    ("num_before", "num_rows"), [(20, 10), (10, 20), (20, 40), (5, 10), (40, 16), (16, 40), (0, 9)]
)
def test_a_product_after_another_finds_its_own_shapes(products, num_before, num_rows):
    rows, weight = case(40, 40)
    found = multiply(products, rows, weight, num_before=num_before, num_rows=num_rows)
    assert same_bits(found, expected_product(widened(rows), widened(weight))[:num_rows])


def test_no_rows_are_no_work(products):
    rows, weight = case(1, 16)
    assert multiply(products, rows[:0], weight).shape == (0, 64)


def before_a_wall(array):
    """Copy to where the next byte cannot be read; give the copy and what keeps it."""
    page = mmap.PAGESIZE
    num_pages = -(-array.nbytes // page)
    memory = mmap.mmap(-1, (num_pages + 1) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(POINTER(start + num_pages * page), ctypes.c_size_t(page), 0) == 0
    offset = num_pages * page - array.nbytes
    copy = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
    copy[:] = array
    return copy, memory


@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 33])
@pytest.mark.parametrize("num_steps", [3, 16, 30])
def test_nothing_past_the_rows_and_the_weight_is_read(products, num_rows, num_steps):
    rows, weight = case(num_rows, num_steps, num_outputs=32)
    expected = expected_product(widened(rows), widened(weight))
    walled_rows, _ = before_a_wall(rows)
    panels, _ = before_a_wall(panels_of(weight))
    sums = np.zeros((num_rows, 32), np.float32)
    products.multiply_rows(
        *(walled_rows.ctypes.data, num_steps, num_rows, panels.ctypes.data),
        *(1, num_steps, 1, 0, sums.ctypes.data),
    )
    assert same_bits(sums, expected)


def test_what_is_not_a_number_stays_in_its_row_and_output(products):
    rows, weight = case(20, 30)
    clean = multiply(products, rows, weight)
    rows[3, 59], weight[40, 7] = 0x7FC0, 0x7F80
    found = multiply(products, rows, weight)
    touched = np.zeros(found.shape, bool)
    touched[3], touched[:, 40] = True, True
    assert np.isnan(found[3]).all()
    assert not np.isfinite(found[:, 40]).any()
    assert same_bits(found[~touched], clean[~touched])


def tile_config(*shapes, palette=1, **bytes_at):
    """Give LDTILECFG's 64 bytes for tiles of (rows, bytes per row)."""
    config = bytearray(64)
    config[0] = palette
    for tile, (num_rows, num_bytes) in enumerate(shapes):
        config[16 + 2 * tile : 18 + 2 * tile] = num_bytes.to_bytes(2, "little")
        config[48 + tile] = num_rows
    for at, value in bytes_at.items():
        config[int(at[1:])] = value
    return bytes(config)


@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 16), (1, 16, 16), (5, 3, 7), (16, 1, 1)])
def test_a_tile_product_reads_and_writes_its_shape_only(products, m, n, k):
    generator = np.random.default_rng(m)
    left, right = (bfloat16(generator.normal(size=(16, 32))) for _ in range(2))
    sums = generator.normal(size=(16, 16)).astype(np.float32)
    expected = sums.copy()
    # right holds, row by row, a pair of each output
    pairs = right[:k, : 2 * n].reshape(k, n, 2).transpose(1, 0, 2).reshape(n, 2 * k)
    expected[:m, :n] = documented(sums[:m, :n], widened(left[:m, : 2 * k]), widened(pairs))
    config = tile_config((m, 4 * n), (m, 4 * k), (k, 4 * n))
    products.multiply_tiles(config, sums.ctypes.data, left.ctypes.data, right.ctypes.data)
    assert same_bits(sums, expected)


@pytest.mark.parametrize(
    ("x", "y", "before", "after"),
    [
        (2.0**-130, 2.0**20, 0.0, 0.0),  # a denormal factor
        (2.0**-70, 2.0**-60, 0.0, 0.0),  # a denormal product
        (2.0**-63, 2.0**-63, 2.0**-140, 2.0**-126),  # a denormal sum before
        (1.0, 2.0**-126, -1.5 * 2.0**-126, -0.0),  # a denormal sum after
        (1.0, 2.0**-125, -(2.0**-126), 2.0**-126),
    ],
)
def test_denormals_are_zero(products, x, y, before, after):
    left, right = np.zeros((16, 32), np.uint16), np.zeros((16, 32), np.uint16)
    left[0, 0], right[0, 0] = bfloat16([x])[0], bfloat16([y])[0]
    sums = np.full((16, 16), before, np.float32)
    config = tile_config((1, 4), (1, 64), (16, 4))
    products.multiply_tiles(config, sums.ctypes.data, left.ctypes.data, right.ctypes.data)
    assert same_bits(sums[0, :1], np.array([after], np.float32))


FULL = (16, 64)


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (tile_config(FULL, FULL, FULL, palette=2), "palette"),
        (tile_config(FULL, FULL, FULL, _1=1), "start_row"),
        (tile_config(FULL, FULL, FULL, _9=1), "reserved"),
        (tile_config(FULL, FULL, FULL, _33=1), "past the eighth"),
        (tile_config(FULL, FULL, FULL, _60=1), "past the eighth"),
        (tile_config((17, 64), FULL, FULL), "at most 16 rows of 64 bytes"),
        (tile_config(FULL, (16, 68), FULL), "at most 16 rows of 64 bytes"),
        (tile_config(FULL, FULL, (16, 0)), "both be 0 or neither"),
        (tile_config(FULL, FULL), "the tile has no shape"),
        (tile_config(FULL, FULL, (15, 64)), "left's words must be as many as right's rows"),
        (tile_config((15, 64), FULL, FULL), "sums and left must have as many rows"),
        (tile_config((16, 60), FULL, FULL), "sums and right must have rows of one size"),
        (tile_config((16, 62), FULL, (16, 62)), "whole 32-bit words"),
        (None, "tiles are not configured"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_manual_forbids_ends_the_program(products_path, config, rule):
    if "emulated" not in products_path.name:
        pytest.skip("a CPU says no more than that it stops")
    code = f"""
import ctypes
products, config, zeros = ctypes.CDLL({str(products_path)!r}), {config!r}, ctypes.create_string_buffer(1088)
if config:
    products.multiply_tiles(config, zeros, zeros, zeros)
else:
    products.multiply_without_configuration()
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -6
    assert rule in done.stderr


def run_trapped(trap, code, *arguments, **environment):
    """Run Python code where tile instructions are carried out in plain C++."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"LD_PRELOAD": str(trap), "PYTHONPATH": ":".join(sys.path)} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    target = tmp_path_factory.mktemp("trap") / "amx_trap.so"
    return compile_library("amx_trap.cpp", target, "-ftls-model=initial-exec")


@needs_vectors
@needs_no_tiles
def test_the_real_instructions_give_the_documented_bits(trap, tmp_path):
    path = compile_library("amx_product.cpp", tmp_path / "products.so", *AMX.flags)
    code = """
import ctypes, pathlib, sys
from tests.kernels.test_cpu_amx import *
products = load_products(sys.argv[1])
for num_rows in ROW_COUNTS:
    for num_steps in STEP_COUNTS:
        rows, weight = case(num_rows, num_steps)
        expected = expected_product(widened(rows), widened(weight))
        for num_threads in (1, 2):
            assert same_bits(multiply(products, rows, weight, num_threads=num_threads), expected)
print(ctypes.CDLL(None).trapped_instructions())
"""
    assert int(run_trapped(trap, code, path)) > 10_000


@pytest.fixture(scope="module")
def trapped_decoder(trap, tmp_path_factory):
    """Run the library itself, from its self-check on; give what it prints."""
    code = """
import ctypes, sys, torch
from pathlib import Path
from radixrt_kernels.cpu import build as cpu_build
from tests.model.test_native import Pages, build, prompt, run_steps
from tests.support.models import tiny_model
real = cpu_build.read_cpu_flags()
cpu_build.read_cpu_flags = lambda: real | {"amx_tile", "amx_bf16"}
folder = tiny_model("llama", Path(sys.argv[1]), hidden_size=60, intermediate_size=90, head_dim=16, vocab_size=331)
decoder = build(folder, dtype=torch.bfloat16, num_threads=3)
print(decoder.native.library.variant)
emulated = build(folder, dtype=torch.bfloat16, variant="amx_emulated", num_threads=3)
found, expected = (run_steps(each, page_size=4) for each in (decoder, emulated))
print(sum(torch.equal(found[name], expected[name]) for name in expected), "of", len(expected))
counts = ctypes.CDLL(None)
for num_tokens in (1, 5, 40):
    before = counts.loaded_configurations()
    Pages(decoder, page_size=4).step({"a": prompt(num_tokens)})
    print(counts.loaded_configurations() - before, counts.is_configured())
"""
    return run_trapped(trap, code, tmp_path_factory.mktemp("model")).splitlines()


@needs_vectors
@needs_no_tiles
def test_a_whole_step_on_the_real_instructions_equals_the_emulated_one(trapped_decoder):
    assert trapped_decoder[:2] == ["amx_bf16", "8 of 8"]


@needs_vectors
@needs_no_tiles
def test_a_step_configures_each_thread_once_and_leaves_its_tiles_off(trapped_decoder):
    assert trapped_decoder[2:] == ["3 0"] * 3


def tile_instructions(path):
    if shutil.which("objdump") is None:
        pytest.skip("objdump is missing: the machine code cannot be read")
    done = subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True)
    return set(re.findall(r"\b(?:tile\w+|ldtilecfg|sttilecfg|tdp\w+)\b", done.stdout))


@needs_vectors
def test_the_variant_holds_the_tile_instructions_and_no_other_does():
    folder = home_folder() / "build"
    assert tile_instructions(build.build(folder, AMX)) == {
        *("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps")
    }
    assert tile_instructions(build.build(folder, VECTORS)) == set()


@needs_vectors
@needs_no_tiles
def test_where_the_system_refuses_tiles_the_next_variant_is_used_and_one_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr(build, "read_cpu_flags", lambda: CPU_FLAGS | TILE_FLAGS)
    with caplog.at_level(logging.WARNING):
        loaded = load_library(home_folder() / "build")
    assert loaded.variant == NEXT
    (refusal,) = loaded.refusals
    assert re.match("amx_bf16: the system does not let this process use the matrix unit: .", refusal)
    (record,) = own_records(caplog)
    assert record.getMessage() == f"CPU kernels {NEXT} are used, not {refusal}"
    with pytest.raises(BuildError, match="does not let this process use the matrix unit"):
        load_library(home_folder() / "build", variant="amx_bf16")


@needs_vectors
@needs_no_tiles
def test_a_cpu_that_only_says_that_it_has_tiles_is_found_out(trap):
    """As some virtual machines do; the first tile instruction would end the program."""
    code = """
from radixrt.config import home_folder
from radixrt_kernels.cpu import build, library
real = build.read_cpu_flags()
build.read_cpu_flags = lambda: real | {"amx_tile", "amx_bf16"}
loaded = library.load_library(home_folder() / "build")
print(loaded.variant, *loaded.refusals)
"""
    found = run_trapped(trap, code, TRAP_WITHOUT_TILES="1")
    assert found.startswith(f"{NEXT} amx_bf16: the CPU has no matrix unit with tiles of 16 rows")


@needs_vectors
def test_the_cpu_is_asked_for_the_shape_of_its_tiles():
    real = ctypes.CDLL(str(build.build(home_folder() / "build", AMX)))
    assert bool(real.rt_has_tiles()) == (TILE_FLAGS <= CPU_FLAGS)


def test_the_check_passes_what_is_right(products):
    assert products.check_passes()


@pytest.mark.parametrize("kind", [1, 2])
def test_the_check_finds_lost_elements_and_rows_that_mind_their_place(kind, tmp_path):
    flags = (*EMULATED_PLAIN.flags, f"-DRADIXRT_WRONG_AMX={kind}")
    path = compile_library("amx_product.cpp", tmp_path / "wrong.so", *flags)
    assert not load_products(path).check_passes()


def test_wrong_products_are_found_out_and_the_next_variant_is_used(monkeypatch, caplog):
    emulated = EMULATED_PLAIN
    wrong = replace(emulated, name="amx_wrong", flags=(*emulated.flags, "-O0", "-DRADIXRT_WRONG_AMX=1"))
    monkeypatch.setattr(library, "choose_variants", lambda name: (wrong, PLAIN))
    with caplog.at_level(logging.WARNING):
        loaded = load_library(home_folder() / "build")
    assert loaded.variant == "plain"
    assert loaded.refusals == ("amx_wrong: the matrix unit computes wrong products on this CPU",)
    (record,) = own_records(caplog)
    assert loaded.refusals[0] in record.getMessage()


def test_with_a_compiler_that_does_not_know_tiles_the_next_variant_is_used(monkeypatch, tmp_path):
    known = build.build(home_folder() / "build", PLAIN)
    script = tmp_path / "old"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 10 && exit 0\n'
        'case "$*" in *-mamx-tile*) echo "error: unrecognized option \'-mamx-tile\'" >&2; exit 1;; esac\n'
        f'while [ "$1" != -o ]; do shift; done\ncp {known} "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(build.build, "__kwdefaults__", {"compiler": str(script)})
    monkeypatch.setattr(library, "choose_variants", lambda name: (AMX, PLAIN))
    loaded = load_library(tmp_path / "build")
    assert loaded.variant == "plain"
    assert "unrecognized option" in loaded.refusals[0]


def test_if_no_variant_can_be_built_the_first_error_is_raised(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        load_library(tmp_path / "build")
    assert not own_records(caplog)
