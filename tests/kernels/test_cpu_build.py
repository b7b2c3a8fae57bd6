"""Compiling the C++ kernels: once, safely, and with a clear error where it cannot be done."""

import subprocess
import sys
import threading

import pytest
import torch
from radixrt_kernels.cpu import VARIANTS, BuildError, build, supported_variants

ALL_FLAGS = frozenset().union(*(variant.needs for variant in VARIANTS))
PLAIN = VARIANTS[-1]


def failing_compiler(folder):
    """Write a compiler that tells its version and then fails."""
    path = folder / "fails"
    path.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit 0\necho "error: no luck" >&2\nexit 3\n'
    )
    path.chmod(0o755)
    return str(path)


def stub_compiler(folder, text="compiled"):
    """Write a compiler that only writes a text to the file after -o."""
    path = folder / "stub"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo {text} && exit 0\n'
        f'while [ "$1" != -o ]; do shift; done\necho {text} > "$2"\necho run >> {folder}/runs\n'
    )
    path.chmod(0o755)
    return str(path)


def test_fastest_supported_variant_comes_first():
    assert [variant.name for variant in supported_variants(ALL_FLAGS)] == [
        "amx_bf16",
        "avx512_fp16",
        "avx512_bf16",
        "avx512",
        "avx2",
        "plain",
    ]
    assert [v.name for v in supported_variants(ALL_FLAGS - {"avx512_bf16"})] == ["avx512", "avx2", "plain"]
    assert supported_variants(ALL_FLAGS - {"amx_tile"})[0].name == "avx512_fp16"
    assert supported_variants(ALL_FLAGS - {"amx_tile", "avx512_fp16"})[0].name == "avx512_bf16"
    assert [v.name for v in supported_variants({"sse2"})] == ["plain"]


def test_unknown_variant_names_those_that_run_here():
    with pytest.raises(BuildError, match=r"variant must be one of .*plain on this CPU, got 'neon'"):
        build.choose_variants("neon")


def test_missing_compiler_is_told(tmp_path):
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: 'g\+\+-none' was not found"):
        build.build(tmp_path, PLAIN, compiler="g++-none")


def test_failing_compiler_is_told_and_leaves_nothing(tmp_path):
    folder = tmp_path / "build"
    with pytest.raises(BuildError, match=r"(?s)failed with status 3:\nerror: no luck"):
        build.build(folder, PLAIN, compiler=failing_compiler(tmp_path))
    assert list(folder.iterdir()) == []


def test_second_build_is_none(tmp_path):
    compiler = stub_compiler(tmp_path)
    first = build.build(tmp_path / "build", PLAIN, compiler=compiler)
    assert build.build(tmp_path / "build", PLAIN, compiler=compiler) == first
    assert (tmp_path / "runs").read_text() == "run\n"


def test_another_compiler_or_variant_builds_anew(tmp_path):
    one = build.build(tmp_path, PLAIN, compiler=stub_compiler(tmp_path, "one"))
    two = build.build(tmp_path, PLAIN, compiler=stub_compiler(tmp_path, "two"))
    three = build.build(tmp_path, VARIANTS[-2], compiler=stub_compiler(tmp_path, "two"))
    assert len({one, two, three}) == 3


def test_builds_at_the_same_time_give_one_whole_file(tmp_path):
    compiler = stub_compiler(tmp_path)
    paths = []
    threads = [
        threading.Thread(
            target=lambda: paths.append(build.build(tmp_path / "build", PLAIN, compiler=compiler))
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 6
    assert list((tmp_path / "build").iterdir()) == [paths[0]]


def test_broken_library_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "COMPILER", stub_compiler(tmp_path))
    path = build.build(tmp_path / "build", PLAIN, compiler=stub_compiler(tmp_path))
    assert path.read_text() == "compiled\n"
    with pytest.raises(BuildError, match="cannot be loaded"):
        build_library(path)


def build_library(path):
    from radixrt_kernels.cpu.library import Library

    return Library(path, "plain")


def test_unwritable_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot be written"):
        build.build(tmp_path / "file" / "build", PLAIN, compiler=stub_compiler(tmp_path))


def test_pack_refuses_odd_bfloat16_rows(native_library):
    with pytest.raises(ValueError, match="even number of inputs, got 3"):
        native_library.pack(torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(96, dtype=torch.int32))
    with pytest.raises(ValueError, match="target must have 96 words"):
        native_library.pack(torch.zeros(2, 3), torch.zeros(95, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(32, 16), (33, 18), (7, 40), (96, 2)])
def test_packed_panels_hold_the_weight(native_library, dtype, num_outputs, num_inputs):
    weight = torch.randn(num_outputs, num_inputs).to(dtype)
    packed = torch.empty(native_library.packed_words(weight, is_layer=False), dtype=torch.int32)
    native_library.pack(weight, packed, is_layer=False)
    elements = 4 // dtype.itemsize
    # [panel, step, output, element of the step]
    panels = packed.view(dtype).view(-1, num_inputs // elements, 32, elements)
    unpacked = panels.permute(0, 2, 1, 3).reshape(-1, num_inputs)
    assert torch.equal(unpacked[:num_outputs], weight)
    assert unpacked[num_outputs:].eq(0).all()


def test_import_needs_no_compiler():
    code = "import os; os.environ['PATH'] = ''; import radixrt_kernels.cpu"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False)
    assert done.returncode == 0
