"""The live page in a browser: a person types, clicks and reads; the router is real, its nodes say what a test tells."""

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from support.fake_node import DECODE, PREFILL, FakeNode, delta
from support.router_harness import Harness, running_router, wait_until
from support.tiny_tokenizers import byte_level, write_model_folder

from kvrelay.proto import inference_pb2, node_pb2
from kvrelay.router import live

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.async_api", reason="no playwright: the page goes untested")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path: the page goes untested"),
    pytest.mark.timeout(90),
]

PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}
ANSWER = "It is <b>blue</b>."
HANDOFF = inference_pb2.HandoffReport(kv_bytes=65536, kv_blocks=2, grant_ms=1, transfer_ms=40, transport="shm")


@contextlib.asynccontextmanager
async def opened(router: Harness, **options: Any) -> AsyncIterator[Any]:
    """The page, in a browser of its own; nothing may go wrong in its console meanwhile, and it asks no other host."""
    complaints, hosts = list[str](), set[str]()
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(**options)
        page.set_default_timeout(20_000)
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        await page.goto(router.http_url)
        yield page
        await browser.close()
    assert [said for said in complaints if "401" not in said] == []
    assert hosts == {router.http_url.split("/")[2]}


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_router(write_model_folder(tmp_path, max_model_len=1024)) as harness:
        yield harness


async def run(prefill: FakeNode, decode: FakeNode, text: str) -> None:
    """Both legs of the next request, with times that are known."""
    ids = [*byte_level().encode(text).ids, 0]  # what ends an answer is none of its text
    start = await prefill.next_start()
    took = node_pb2.LegReport(queue_ms=5, compute_ms=60)
    await asyncio.sleep(0.08)  # the segments have to fit into the time that passes
    await prefill.say(delta(start, ids[:1], report=took), delta(start, ended=True))
    start = await decode.next_start()
    await asyncio.sleep(0.04)
    took = node_pb2.LegReport(queue_ms=3, compute_ms=4, handoff=HANDOFF)
    await decode.say(delta(start, ids[:1], report=took))
    for i, token_id in enumerate(ids[1:-1], 1):
        await decode.say(delta(start, [token_id], first=i))
    await asyncio.sleep(0.02)
    await decode.say(delta(start, ids[-1:], first=len(ids) - 1, finish="stop"), delta(start, ended=True))


async def test_a_prompt_is_answered_and_its_bar_shows_every_segment(router: Harness) -> None:
    prefill, decode = await router.pair()
    await decode.say_load(num_free_blocks=decode.registered_with.num_blocks - 300, num_running=3)
    async with opened(router, viewport=DESK) as page:
        await page.get_by_text("3 running").wait_for()
        pool = page.get_by_role("img", name=re.compile("300 held"))
        assert await pool.locator(".held").evaluate("bar => bar.getBoundingClientRect().width") > 20

        serving = asyncio.create_task(run(prefill, decode, ANSWER))
        await page.get_by_label("Prompt").fill("Why <i>blue</i>?")
        await page.get_by_role("button", name="Send").click()
        await (
            page.get_by_role("status")
            .filter(has_text=re.compile(r"TTFT \d+ ms · \d+ tokens · [\d.]+ tokens/s"))
            .wait_for()
        )
        await serving
        assert await page.get_by_role("region", name="Answer").inner_text() == ANSWER

        bar = page.get_by_role("option", name=re.compile("^Request 1, finished, P → D, "))
        await bar.wait_for()
        kinds = await bar.locator("i").evaluate_all("parts => parts.map(part => part.className)")
        assert {"route", "queue", "prefill", "hidden-transfer", "exposed", "decode"} <= set(kinds)
        times = page.locator("#closeup-times")
        assert "prefill\n60 ms" in (await times.inner_text()).replace("\n\n", "\n")
        assert "2 blocks, 66 kB over shm" in await page.locator("#closeup-about").inner_text()
        assert await page.locator("#ttft").inner_text() not in ("", "\N{EN DASH}")


async def test_the_keyboard_alone_chooses_requests(router: Harness) -> None:
    prefill, decode = await router.pair()
    async with opened(router, viewport=DESK) as page:
        for text in ("One.", "Three words here."):
            serving = asyncio.create_task(run(prefill, decode, text))
            await router.generate(sampling={"max_tokens": 64})
            await serving
        await page.locator("#request-2:not(.running)").wait_for()
        await page.get_by_role("listbox").focus()
        await page.keyboard.press("Home")
        assert await page.locator("#closeup-about").inner_text() == await _about(page, 1)
        await page.keyboard.press("ArrowRight")
        assert await page.locator("#closeup-about").inner_text() == await _about(page, 2)
        assert await page.locator(".bar[aria-selected=true]").get_attribute("id") == "request-2"


async def _about(page: Any, number: int) -> str:
    text: str = await page.locator("#closeup-about").inner_text()
    assert text.startswith(f"Request {number}: ")
    return text


async def test_a_request_that_is_stopped_ends_and_so_does_its_bar(router: Harness) -> None:
    prefill, decode = await router.pair()
    async with opened(router, viewport=DESK) as page:
        await page.get_by_text("P", exact=True).wait_for()
        await page.get_by_role("button", name="Send").click()
        start = await prefill.next_start()
        await prefill.say(delta(start, byte_level().encode("I").ids), delta(start, ended=True))
        await page.get_by_role("region", name="Answer").filter(has_text="I").wait_for()
        await page.get_by_role("button", name="Stop").click()
        await page.get_by_role("option", name=re.compile("cancelled or out of time")).wait_for()
        assert (await decode.next_cancel()).request_id == start.request_id
        await page.get_by_text(re.compile("stopped$")).wait_for()
        await page.get_by_role("button", name="Send").wait_for()


async def test_a_node_that_dies_leaves_the_page_and_its_name_is_text(router: Harness) -> None:
    name = "<img src=x onerror=alert(1)>"
    node = await router.node(DECODE, name)
    async with opened(router, viewport=DESK) as page:
        await page.get_by_text(name).wait_for()
        assert await page.locator("#nodes img").count() == 0
        node.die()
        await page.get_by_text("No node is registered yet.").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_nothing_is_wider_than_a_phone(router: Harness, scheme: Any) -> None:
    prefill, decode = await router.pair()
    await router.node(DECODE, "decode-" + 30 * "long-")
    async with opened(router, viewport=PHONE, color_scheme=scheme) as page:
        serving = asyncio.create_task(run(prefill, decode, 25 * "wide"))
        await page.get_by_role("button", name="Send").click()
        await serving
        await page.get_by_role("option", name=re.compile("finished")).wait_for()
        widths = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1] == PHONE["width"]
        paper = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        is_dark = sum(map(int, re.findall(r"\d+", paper)[:3])) < 200
        assert is_dark == (scheme == "dark")


async def test_with_api_keys_the_page_asks_for_one_and_asks_again_for_a_wrong_one(tmp_path: Path) -> None:
    async with running_router(write_model_folder(tmp_path), api_key=("right",)) as router:
        await router.node(PREFILL, "P")
        async with opened(router, viewport=DESK) as page:
            await page.get_by_role("textbox", name="API key").fill("wrong")
            await page.get_by_role("button", name="Use this key").click()
            await page.get_by_text("The router does not know this key.").wait_for()
            assert await page.get_by_text("P", exact=True).count() == 0
            await page.get_by_role("textbox", name="API key").fill("right")
            await page.keyboard.press("Enter")
            await page.get_by_text("P", exact=True).wait_for()
            await page.get_by_role("status").filter(has_text="live").wait_for()
            assert "right" not in page.url


async def test_the_feed_tells_no_text_and_the_page_allows_no_script_but_its_own(router: Harness) -> None:
    prefill, decode = await router.pair()

    def read(path: str) -> tuple[dict[str, str], list[str]]:
        with urlopen(Request(router.http_url + path), timeout=10) as answer:
            lines = [answer.readline().decode() for _ in range(4)]
            return {name.lower(): value for name, value in answer.headers.items()}, lines

    serving = asyncio.create_task(run(prefill, decode, "secret answer"))
    await router.generate("secret prompt", request_id="secret-id", sampling={"max_tokens": 64})
    await serving
    headers, lines = await asyncio.to_thread(read, "/live")
    assert headers["content-type"].startswith("text/event-stream")
    assert lines[0] == "event: about\n"
    snapshot = json.loads(lines[3].removeprefix("data: "))
    assert snapshot["requests"]["1"]["handoff"]["report"]["kv_blocks"] == 2
    assert "secret" not in lines[3]
    headers, _ = await asyncio.to_thread(read, "/")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    await wait_until(lambda: not router.server.live.num_watchers)  # who left is forgotten


async def test_more_watchers_than_there_may_be_are_refused(router: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_WATCHERS", 0)

    def read() -> int:
        try:
            with urlopen(router.http_url + "/live", timeout=10) as answer:
                return int(answer.status)
        except HTTPError as error:
            with error:
                return error.code

    assert await asyncio.to_thread(read) == 429
