"""A picture of a run's report, as a browser first shows it, for the README: results/report.png.

    python scripts/picture_report.py <run folder>

The script needs the extra ``browser`` and a Chromium: playwright's own, or that in FEDNAS_BROWSER.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parent / "results" / "report.png"
WIDTH, HEIGHT = 1280, 645


def main() -> None:
    """Take the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    report = parser.parse_args().run / "report.html"
    if not report.is_file():
        parser.error(f"{report} does not exist: name the folder of a run that has ended.")
    with sync_playwright() as playwright:
        path = os.environ.get("FEDNAS_BROWSER")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(report.resolve().as_uri())
        page.wait_for_function("document.querySelectorAll('.plot svg').length > 0")
        page.screenshot(path=PICTURE)
        browser.close()
    print(PICTURE)


if __name__ == "__main__":
    main()
