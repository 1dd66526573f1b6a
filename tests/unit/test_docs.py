"""The pages: what is generated is current, links lead somewhere, every page is found from the README, and that is short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]


def _links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", page.read_text())


def test_generated_pages_are_current() -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_type_is_followed_by_a_sentence() -> None:
    """Not by a list's bullet in the middle of a line."""
    assert re.findall(r"^.*\S - `\w+`: .*$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE) == []


def test_links() -> None:
    broken = []
    for page in PAGES:
        for link in _links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if "://" in link:
                continue
            titles = (
                re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if target.suffix == ".md" and target.exists() else []
            )
            known = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            if not target.exists() or (anchor and anchor not in known):
                broken.append(f"{page.name}: {link}")
    assert broken == []


def test_every_page_is_found_from_the_readme() -> None:
    named = {Path(link.partition("#")[0]).name for link in _links(ROOT / "README.md")}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= named


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1300


def test_the_readme_has_the_example() -> None:
    """From the import of torch on, as it is run."""
    example = (ROOT / "examples" / "hello.py").read_text()
    shown = re.search(r"```python\nimport torch\n\nimport pplx_comm as pc\n\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None and shown[1] in example
