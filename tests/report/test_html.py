"""The page: valid, self-contained, escaped, and readable in a real browser, light and dark."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import html5lib
import pytest

from autofit.plan import Plan
from autofit.report.html import html_report
from tests.report.plans import NAMES, load, seen

NASTY = '<script>alert("x")</script> & \'"]]>\x1b[1m\x00'
XLINK = "{http://www.w3.org/1999/xhtml}"


def parsed(plan: Plan) -> Any:
    """The page's document; raises where it is not valid HTML."""
    return html5lib.HTMLParser(strict=True).parse(html_report(plan))


def nasty() -> Plan:
    """A plan whose every text tries to be markup."""
    plan = seen()
    assert plan.insight
    blocks = tuple(block.model_copy(update={"name": NASTY}) for block in plan.insight.blocks)
    trials = tuple(trial.model_copy(update={"message": NASTY}) for trial in plan.trials)
    names = {"model": NASTY, "device_name": NASTY, "optimizer": NASTY, "platform": NASTY, "memory_source": NASTY}
    return plan.model_copy(
        update={
            "insight": plan.insight.model_copy(update={"blocks": blocks}),
            "trials": trials,
            "notes": (NASTY,),
            "environment": plan.environment.model_copy(update=names),
        }
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_plan_makes_a_valid_page(name: str) -> None:
    """Whatever the plan lacks."""
    assert parsed(load(name)) is not None


def test_the_page_needs_nothing_else() -> None:
    """No script, no address but the names of namespaces, and a policy that forbids loading anything."""
    page = html_report(seen())
    assert "<script" not in page
    assert not re.findall(r"(?:src|href)=\"(?!#|data:,)", page)
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_text_of_the_plan_is_never_markup() -> None:
    """Names, notes and messages come out as they are, without what no page may contain."""
    page = html_report(nasty())
    document = html5lib.HTMLParser(strict=True).parse(page)
    assert document.findall(f".//{XLINK}script") == []
    assert "\x1b" not in page
    assert "\x00" not in page
    heading = document.find(f".//{XLINK}h1")
    assert heading.text.startswith('<script>alert("x")</script> & \'"]]>')


def test_pictures_have_words() -> None:
    """Each has a title, a description, and a table or the figures in its caption; ids are there once."""
    document = parsed(seen())
    ids = [element.get("id") for element in document.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    pictures = [element for element in document.iter() if element.get("role") == "img" and element.get("viewBox")]
    assert len(pictures) == 5
    for picture in pictures:
        assert all(name in ids for name in picture.get("aria-labelledby").split())
    tables = document.findall(f".//{XLINK}table")
    assert len(tables) == 4
    assert all(table.find(f"{XLINK}caption") is not None for table in tables)


def test_the_recipe_and_the_environment_are_there() -> None:
    """Code to copy, and where it was measured."""
    text = "".join(parsed(seen()).itertext())
    assert "def train_step" in text
    assert seen().environment.device_name in text
    assert "What each technique would save and cost here" in text


def test_a_plan_without_a_best_trial_has_a_page() -> None:
    """No recipe, but trials and reasons."""
    text = "".join(parsed(load("nothing_fits")).itertext())
    assert "Why there is no plan" in text
    assert "The recipe as code" not in text


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium: the system's, or playwright's own."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with api.sync_playwright() as playwright:
        try:
            running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no browser to start: {str(error).splitlines()[0]}")
        yield running
        running.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 1100])
def test_a_browser_shows_it(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    """No request but the page, no complaint, no sideways scrolling, text that stands out, pictures in colour."""
    path = tmp_path / "report.html"
    path.write_text(html_report(nasty()), encoding="utf-8")
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    assert (said, asked) == ([], [path.as_uri()])
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page_colour, ink = (
        page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color")
    )
    assert _contrast(_rgb(page_colour), _rgb(ink)) >= 7
    colours = page.evaluate("[...document.querySelectorAll('.fill')].map(e => getComputedStyle(e).fill)")
    assert len(set(colours)) >= 6
    assert "rgb(0, 0, 0)" not in colours  # black is what an unknown role would be painted in
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read(browser: Any, tmp_path: Path, scheme: str) -> None:
    """Every text stands out from the page at least as the accessibility guidelines ask (4.5 : 1)."""
    path = tmp_path / "report.html"
    path.write_text(html_report(seen()), encoding="utf-8")
    page = browser.new_page(color_scheme=scheme)
    page.goto(path.as_uri())
    background = _rgb(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    texts = page.evaluate(
        "[...document.querySelectorAll('p,li,dt,dd,th,td,h1,h2,h3,a,summary,caption,figcaption,svg.figure text')]"
        ".map(e => getComputedStyle(e)[e.namespaceURI.endsWith('svg') ? 'fill' : 'color'])"
    )
    assert len(texts) > 100
    assert min(_contrast(background, _rgb(text)) for text in set(texts)) >= 4.5
    page.close()


def test_the_keyboard_reaches_everything(browser: Any, tmp_path: Path) -> None:
    """Tab goes through links, pictures and tables; Enter opens a table that is folded away."""
    path = tmp_path / "report.html"
    path.write_text(html_report(seen()), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    folded = page.locator("details:not([open])")
    before = folded.count()
    assert before > 0
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.tagName"))
        if page.evaluate("document.activeElement.matches('details:not([open]) > summary')"):
            page.keyboard.press("Enter")
    assert {"A", "DIV", "SUMMARY", "PRE"} <= reached
    assert folded.count() == 0
    page.close()


def _rgb(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in re.findall(r"[\d.]+", text)[:3])


def _contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The contrast ratio of the Web Content Accessibility Guidelines."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: tuple[float, ...]) -> float:
    shares = [part / 255 for part in colour]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
