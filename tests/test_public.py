"""The public names are exactly the documented ones, and the torch-free rooms start without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

import radixrt
from radixrt import errors

ROOT = Path(__file__).parents[1]


def test_every_public_name_can_be_loaded():
    for name in radixrt.__all__:
        assert getattr(radixrt, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        radixrt.no_such_name


def test_every_public_name_is_documented():
    text = (ROOT / "radixrt" / "README.md").read_text()
    missing = [name for name in radixrt.__all__ if f"`{name}`" not in text and name != "__version__"]
    assert not missing


def test_every_error_is_drawn_in_the_tree():
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert len(classes) > 10
    for item in classes:
        assert item.__name__ in errors.__doc__


@pytest.mark.parametrize("module", ["kv.cache", "sched.scheduler", "config", "types", "cli"])
def test_rooms_of_plain_data_do_not_load_torch(module):
    code = f"import sys, radixrt.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
