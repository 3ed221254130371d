"""A picture of the live page as it stands, while something else loads the router.

    .venv/bin/python bench/page_picture.py --url http://127.0.0.1:8000 --to docs/page.png [--after 20] [--dark]

Needs Chromium on the path. Prints when the browser first painted, in milliseconds since it asked for the page.
"""

import argparse
import shutil

from playwright.sync_api import sync_playwright

PAINTS = "performance.getEntriesByType('paint').map(paint => [paint.name, Math.round(paint.startTime)])"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--to", default="docs/page.png")
    parser.add_argument("--after", type=float, default=20, help="seconds of load to look at first")
    parser.add_argument("--dark", action="store_true")
    asked = parser.parse_args()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 660}, color_scheme="dark" if asked.dark else "light")
        page.goto(asked.url)
        page.wait_for_timeout(1e3 * asked.after)
        print(page.evaluate(PAINTS))
        page.screenshot(path=asked.to)
        browser.close()


if __name__ == "__main__":
    main()
