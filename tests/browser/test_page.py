"""The page of a run in a browser: every cause is seen, it is live, and text stays text."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from elastic.dashboard.page.server import PageServer
from elastic.dashboard.restarts import restarts_of, totals
from elastic.storage.ledger import read_ledger
from elastic.storage.rank_logs import log_path
from tests.eventful_run import CAUSES, Story, eventful_run, long_run

NASTY = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'`${alert(3)}"


def open_run(page: Page, server: PageServer, name: str) -> None:
    page.goto(f"{server.url}runs/{name}")
    expect(page.locator("#link")).to_contain_text("live")
    expect(page.locator("#state .state")).to_be_visible()


def test_each_cause_is_seen_with_what_it_cost(
    tmp_path: Path, served: PageServer, page: Page
) -> None:
    now = eventful_run(tmp_path / "eventful")
    restarts = restarts_of(read_ledger(now.fs))
    open_run(page, served, "eventful")
    expect(page.locator("#state")).to_contain_text("FAILED")
    expect(page.locator("#state")).to_contain_text("rank 0 raised ValueError: bad sample 7")
    rows = page.locator("#restarts tbody tr")
    expect(rows).to_have_count(len(CAUSES))
    for row, one in zip(reversed(rows.all()), restarts, strict=True):
        cells = [cell.inner_text() for cell in row.locator("td").all()]
        assert cells[0] == str(one.number)
        assert cells[2].split()[-1] == CAUSES[one.number - 1] == one.causes[0]
        assert cells[4] == ("–" if one.lost_steps is None else str(one.lost_steps))
        assert one.reason in row.text_content()
    sums = totals(restarts)
    expect(page.locator("#restarts")).to_contain_text(f"{sums.lost_steps} steps done again")
    nodes = page.locator("#nodes")
    for mark in ("death", "node lost", "drain", "strike", "kept out", "error"):
        expect(nodes.locator(f".mark[aria-label^='{mark}']").first).to_be_visible()
    quarantined = page.locator("#saves tr", has_text="quarantined")
    expect(quarantined).to_contain_text("digest differs")
    expect(page.locator("#charts canvas")).to_have_count(3)
    expect(page.get_by_text("Ray dashboard of this run")).to_have_attribute(
        "href", "http://192.0.2.1:8265"
    )


def test_story_stacks_and_logs_are_one_click_away(
    tmp_path: Path, served: PageServer, page: Page
) -> None:
    eventful_run(tmp_path / "eventful")
    open_run(page, served, "eventful")
    dialog = page.locator("dialog")
    page.get_by_role("button", name="Story of restart 5").click()
    expect(dialog).to_contain_text("rank 1 holds up the others")
    page.keyboard.press("Escape")
    expect(dialog).not_to_be_visible()
    page.get_by_role("button", name="Stacks of restart 5").click()
    expect(dialog.locator("pre")).to_contain_text("train.py")
    dialog.get_by_role("button", name="rank 2").click()
    expect(dialog.locator("pre")).to_contain_text("line 2")
    dialog.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Logs of generation 5").click()
    expect(dialog.locator("pre")).to_contain_text("last words")


def training(tmp_path: Path, *, age_s: float) -> Story:
    """The run `run` of two workers, begun so long ago, at step 3."""
    now = Story(tmp_path / "run", "run", born_s=time.time() - age_s)
    now.begin(2)
    now.train(3, each_s=0.1)
    return now


def test_an_event_is_seen_within_a_second_and_nothing_is_loaded_anew(
    tmp_path: Path, served: PageServer, page: Page
) -> None:
    now = training(tmp_path, age_s=5)
    open_run(page, served, "run")
    page.evaluate("window.kept = true")
    reason = "rank 1 died: SIGKILL"
    now.tell("worker_died", world_rank=1, step=3, reason="SIGKILL")
    now.decide("worker_killed", 1, reason)
    expect(page.locator("#restarts tbody tr")).to_contain_text(reason, timeout=1000)
    expect(page.locator("#restarts tbody tr")).to_contain_text("no new step so far")
    assert page.evaluate("window.kept") is True
    now.ledger.close()


def test_snapshots_and_where_a_group_resumed_from_are_seen(
    tmp_path: Path, served: PageServer, page: Page
) -> None:
    now = training(tmp_path, age_s=60)
    snapshots = {"every": 2, "step": 2, "kept_s": now.time_s, "skipped": 4, "problem": ""}
    now.tell("progress", step=3, data={"state": "RUNNING", "snapshots": snapshots})
    now.decide("worker_killed", 1, "SIGKILL")
    now.go_on(1, 2, "SIGKILL", source="memory")
    open_run(page, served, "run")
    fact = page.locator("#state .fact", has_text="Snapshot")
    expect(fact).to_contain_text("step 2")
    expect(fact).to_contain_text("ago, 4 skipped")
    expect(page.locator("#restarts tbody tr")).to_contain_text("memory")
    now.ledger.close()


def test_what_a_run_recorded_stays_text(tmp_path: Path, served: PageServer, page: Page) -> None:
    """B92: run name, exception text, log line and node label with markup."""
    now = Story(tmp_path / "nasty", NASTY)
    now.begin(1)
    ranks = [{"world_rank": 0, "node_id": NASTY, "node_ip": NASTY}]
    now.tell("generation_started", generation=0, data={"world_size": 1, "ranks": ranks})
    now.fs.write_bytes(log_path(0, 0), NASTY.encode() + b"\n")
    raised = {"traceback": NASTY, "last_lines": [NASTY]}
    now.tell("rank_failed", world_rank=0, reason=NASTY, data=raised)
    now.decide("user_exception", 0, NASTY, then="fail")
    now.tell("run_failed", world_rank=0, reason=NASTY, data={"dashboard_url": "javascript:1"})
    now.ledger.close()
    open_run(page, served, "nasty")
    expect(page.locator("h1")).to_have_text(NASTY)
    for place in ("#state", "#restarts", "#nodes", "#events"):
        expect(page.locator(place)).to_contain_text(NASTY)
    page.get_by_role("button", name="Logs of generation 0").click()
    expect(page.locator("dialog pre")).to_contain_text(NASTY)
    assert page.locator("main img, main script, dialog img").count() == 0
    page.goto(served.url)
    expect(page.locator("main")).to_contain_text("FAILED")


def test_the_list_leads_to_each_run_by_keyboard(
    tmp_path: Path, served: PageServer, page: Page
) -> None:
    eventful_run(tmp_path / "eventful")
    (tmp_path / "broken" / "ledger").mkdir(parents=True)
    page.goto(served.url)
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page.locator("main")).to_contain_text("its run.json is missing")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    link = page.get_by_role("link", name="eventful")
    for _ in range(10):
        page.keyboard.press("Tab")
        if link.evaluate("one => one === document.activeElement"):
            break
    expect(link).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/runs/eventful$"))
    expect(page.locator("#state .state")).to_be_visible()


def test_all_that_can_be_pressed_is_reached_by_tab_and_keeps_focus(
    tmp_path: Path, served: PageServer, page: Page
) -> None:
    now = eventful_run(tmp_path / "eventful")
    open_run(page, served, "eventful")
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, a, [role=img]')].filter(one =>"
        " !(one.textContent.trim() || one.getAttribute('aria-label'))).length"
    )
    assert unnamed == 0
    story = page.get_by_role("button", name="Story of restart 6")
    story.focus()
    page.keyboard.press("Enter")
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(story).to_be_focused()
    assert now.fs is not None


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 420])
def test_it_reads_well_in_both_themes(
    tmp_path: Path, served: PageServer, page: Page, theme: str, width: int
) -> None:
    """Text stands out from what is behind it (4.5 to 1), and nothing hangs over the side."""
    eventful_run(tmp_path / "eventful")
    page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    page.set_viewport_size({"width": width, "height": 900})
    open_run(page, served, "eventful")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    faint = page.evaluate(_FAINT)
    assert faint == []


def test_a_long_run_opens_whole_and_stays_small(
    tmp_path: Path, served: PageServer, page: Page
) -> None:
    long_run(tmp_path / "long", num_events=20_000, num_generations=200)
    began_s = time.monotonic()
    open_run(page, served, "long")
    expect(page.locator("#charts canvas")).to_have_count(3)
    print(f"opened in {time.monotonic() - began_s:.2f} s")
    expect(page.locator("#restarts tbody tr")).to_have_count(20)
    page.get_by_role("button", name="Show all 199").click()
    expect(page.locator("#restarts tbody tr")).to_have_count(199)
    assert page.evaluate("document.querySelectorAll('*').length") < 12_000


_FAINT = """
() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const faint = new Set();
  for (const one of document.querySelectorAll("main *")) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !one.checkVisibility() || one.matches(".hidden, caption")) continue;
    const both = [light(parse(getComputedStyle(one).color)), light(behind(one))];
    const [a, b] = both.sort((x, y) => y - x);
    const what = `${one.tagName}.${one.className}: ${one.textContent.slice(0, 30)}`;
    if ((a + 0.05) / (b + 0.05) < 4.5) faint.add(what);
  }
  return [...faint];
}
"""
