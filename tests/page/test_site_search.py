"""The search of the documentation's site, read from files by a browser without a network."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mistlab.core.files import parse_yaml

ROOT = Path(__file__).parents[2]
SHIM = "javascripts/iframe-worker.js"


def test_words_are_found_without_a_server(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("material")
    docs = tmp_path / "docs"
    for name, text in (("index.md", "# Start\n\nHello."), ("deep/other.md", "# Bubbles\n\nZebra.")):
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(text, encoding="utf-8")
    (docs / SHIM).parent.mkdir()
    shutil.copy(ROOT / "docs" / SHIM, docs / SHIM)
    ours = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    kept = ("site_name", "use_directory_urls", "theme", "plugins", "extra")
    content = parse_yaml(ours, "mkdocs.yml")
    lines = [f"{key}: {json.dumps(content[key])}" for key in kept]
    (tmp_path / "mkdocs.yml").write_text("\n".join(lines), encoding="utf-8")
    line = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    subprocess.run(line, cwd=tmp_path, check=True, capture_output=True)
    context = browser.new_context(offline=True)
    for name in ("index.html", "deep/other.html"):
        page = context.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error, wrong=wrong: wrong.append(str(error)))
        page.goto((tmp_path / "site" / name).as_uri())
        page.click(".md-search__input")
        page.keyboard.type("zebra")
        page.wait_for_selector(".md-search-result__item a")
        found = page.locator(".md-search-result__item a").first.get_attribute("href")
        assert "deep/other.html" in found
        assert wrong == []
    context.close()
