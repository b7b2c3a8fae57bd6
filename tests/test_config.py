import pytest

from radixrt.config import EngineConfig, environment_help, home_folder, option_specs
from radixrt.errors import InvalidRequest


def load(options=(), environment=(), folder=None):
    return EngineConfig.load(dict(options), environment=dict(environment), folder=folder)


def test_nearest_source_wins(tmp_path):
    (tmp_path / "radixrt.toml").write_text("page_size = 2\nmax_running = 3\nmax_waiting = 5\n")
    config = load({"page_size": 8}, {"RADIXRT_PAGE_SIZE": "4", "RADIXRT_MAX_RUNNING": "7"}, tmp_path)
    assert (config.kv.page_size, config.sched.max_running, config.sched.max_waiting) == (8, 7, 5)


def test_every_option_has_description_and_valid_default():
    for spec in option_specs():
        assert spec.help
        if spec.default is not None:
            EngineConfig.from_options({spec.name: spec.default})
    assert len(list(environment_help())) == len(list(option_specs())) + 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"page_sise": 4}, 'Did you mean "page_size"'),
        ({"page_size": 0}, r"page_size must be in \[1, 1024\], got 0"),
        ({"page_size": "4"}, "page_size must be of type int"),
        ({"page_size": True}, "page_size must be of type int"),
        ({"prefix_cache": 1}, "prefix_cache must be of type bool"),
        ({"device": "gpu"}, "device must be one of auto, cpu, cuda"),
        ({"kernels": "nativ"}, 'kernels must be one of auto, torch, native.*"native"'),
        ({"policy": "cache-aware"}, 'Did you mean "cache_aware"'),
    ],
)
def test_bad_option_names_option_and_rule(options, text):
    with pytest.raises(InvalidRequest, match=text):
        EngineConfig.from_options(options)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RADIXRT_PAGE_SIZ": "4"}, "RADIXRT_PAGE_SIZE"),
        ({"RADIXRT_PAGE_SIZE": "four"}, "RADIXRT_PAGE_SIZE must be a whole number"),
        ({"RADIXRT_PREFIX_CACHE": "maybe"}, "true or false"),
        ({"RADIXRT_DEVICE": "tpu"}, "device must be one of"),
    ],
)
def test_bad_environment_is_told(environment, text, tmp_path):
    with pytest.raises(InvalidRequest, match=text):
        load((), environment, tmp_path)


@pytest.mark.parametrize("text", ["page_sise = 4", "page_size = ", 'page_size = "4"'])
def test_bad_file_is_told(text, tmp_path):
    (tmp_path / "radixrt.toml").write_text(text)
    with pytest.raises(InvalidRequest, match=r"page_size|radixrt\.toml"):
        load(folder=tmp_path)


def test_booleans_and_none_come_from_the_environment(tmp_path):
    config = load((), {"RADIXRT_PREFIX_CACHE": "false", "RADIXRT_THREADS": "2"}, tmp_path)
    assert (config.kv.prefix_cache, config.model.threads) == (False, 2)
    assert load({"threads": None}, (), tmp_path).model.threads is None


def test_home_folder_follows_the_environment(tmp_path):
    assert home_folder({"RADIXRT_HOME": str(tmp_path)}) == tmp_path
    assert home_folder({"XDG_CACHE_HOME": "/x"}).as_posix() == "/x/radixrt"
