"""The HTML of a trace, opened in a real browser."""

import shutil
from html.parser import HTMLParser

import pytest

from frontend_lang import assistant, gen, program, select, system, user
from tests.support.backends import ScriptedBackend

pytestmark = pytest.mark.timeout(120)
HOSTILE = (
    "</pre><script>window.hacked=1</script><img src=http://127.0.0.1:9/x onerror='hacked=1'>&amp;\ud83d\ude00"
)
HOSTILE = HOSTILE.encode("utf-16", "surrogatepass").decode("utf-16")


@program
def hostile(s, topic):
    s += system("Short.") + user(topic)
    branches = s.fork(2)
    branches += user("Tip") + assistant(gen("tip<b>"))
    s += assistant(gen("all"), " ", select("verdict", choices=["<i>good</i>", "bad"]))


@pytest.fixture(scope="module")
def trace():
    return hostile.with_options(backend=ScriptedBackend([HOSTILE])).run(HOSTILE).trace


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium is installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser, tmp_path, html, **options):
    """Open a page as a file; give it and the requests it tried to make."""
    (tmp_path / "trace.html").write_text(html, encoding="utf-8")
    page = browser.new_context(**options).new_page()
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "trace.html").as_uri())
    return page, requests


@pytest.mark.parametrize("has_scripts", [True, False])
def test_a_browser_shows_the_call_tree_and_its_counts(browser, tmp_path, trace, has_scripts):
    page, requests = opened(browser, tmp_path, trace.html(), java_script_enabled=has_scripts)
    assert page.locator(".num-calls").inner_text() == "4"
    assert page.locator("[data-branch]").evaluate_all("all => all.map(one => one.dataset.branch)") == [
        "root",
        "root/0",
        "root/1",
    ]
    for name, count in zip(
        ("prompt", "cached", "computed", "forced", "output"),
        (
            trace.usage.prompt_tokens,
            trace.usage.cached_tokens,
            trace.usage.computed_tokens,
            trace.usage.forced_tokens,
            trace.usage.output_tokens,
        ),
        strict=True,
    ):
        assert page.locator(f".totals [data-count={name}]").inner_text() == str(count)
    for call in trace.calls:
        shown = page.locator(f"[data-branch='{call.branch}'] > [data-call='{call.index}']")
        assert shown.count() == 1
        counts = shown.locator("summary .count[data-count]").all_inner_texts()
        assert counts[:2] == [f"prompt {call.prompt_tokens}", f"cached {call.cached_tokens}"]
        assert shown.locator("summary b").first.inner_text() == f"{call.kind} {call.name}"
    assert page.locator(".fork > summary").inner_text() == "fork(2)"
    assert len(requests) == 1
    page.context.close()


def test_hostile_text_is_shown_and_not_obeyed(browser, tmp_path, trace):
    page, requests = opened(browser, tmp_path, trace.html())
    assert page.locator(".written").first.inner_text() == HOSTILE
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert requests == [(tmp_path / "trace.html").as_uri()]
    page.context.close()


def test_prompts_open_one_by_one_and_all_at_once(browser, tmp_path, trace):
    page, _ = opened(browser, tmp_path, trace.html())
    prompts = page.locator("details.prompt pre")
    assert prompts.count() == 4
    assert not prompts.first.is_visible()
    page.locator("[data-call='0'] > summary").click()
    page.locator("[data-call='0'] details.prompt > summary").click()
    assert prompts.first.inner_text() == trace.prompt(0)
    page.get_by_text("open all").click()
    assert all(prompt.is_visible() for prompt in prompts.all())
    page.get_by_text("close all").click()
    assert not any(prompt.is_visible() for prompt in prompts.all())
    page.context.close()


class Outline(HTMLParser):
    """Collect tags and addresses; void elements have no end."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.tags = [], [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_names_no_address(trace):
    outline = Outline()
    outline.feed(trace.html())
    assert outline.open == []
    assert outline.addresses == []
    assert not outline.tags & {"link", "img", "iframe", "object"}


def test_a_notebook_gets_the_same_tree_without_a_page_around_it(trace):
    fragment = trace._repr_html_()
    assert fragment in trace.html()
    assert "<html" not in fragment


def test_a_failed_run_says_so_on_its_page():
    trace = hostile.with_options(backend=ScriptedBackend(["ok"], fail_at={0})).trace("x")
    assert trace.html().count('class="error"') >= 3
    assert "EngineStopped: the engine died" in trace.html()
