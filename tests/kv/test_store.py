"""Where the pages lie in memory."""

import ctypes
import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from radixrt.kv.store import KVLayout, KVStore

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address):
    """Give the kernel's flags of the mapping that holds an address."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            holds = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif holds and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(not (sys.platform == "linux" and THP.exists()), reason="no transparent huge pages here")
def test_pages_ask_for_huge_pages_before_they_are_written():
    layout = KVLayout(num_layers=4, num_kv_heads=3, head_dim=64, page_size=16, dtype=torch.bfloat16)
    store = KVStore(layout, num_pages=200, device=torch.device("cpu"))
    middle = store.data.data_ptr() + store.data.nbytes // 2
    assert "hg" in flags_at(middle)
    plain = mmap.mmap(-1, store.data.nbytes)  # what malloc gives may have been a store before
    assert "hg" not in flags_at(ctypes.addressof(ctypes.c_char.from_buffer(plain)) + len(plain) // 2)
