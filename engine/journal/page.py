"""A self-contained page of tables, charts and examples in the reports' dress: evaluations, studies, decontamination."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import jinja2
from markupsafe import Markup

from headrace.journal.panels import Chart
from headrace.journal.store import make_folder, write_text
from headrace.journal.tables import Sheet

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Tile:
    """A headline number."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Example:
    """Texts and pictures (data URIs) side by side, with labels."""

    title: str
    tags: Sequence[str] = ()
    texts: Sequence[tuple[str, str]] = ()
    pictures: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Section:
    title: str
    lead: str = ""
    verdicts: Sequence[str] = ()
    """What the section comes to, a sentence each."""
    charts: Sequence[Chart] = ()
    sheets: Sequence[Sheet] = ()
    examples: Sequence[Example] = ()


@dataclass(frozen=True)
class Page:
    title: str
    kind: str
    """What the page is: ``evaluation``, ``study``, …"""
    tiles: Sequence[Tile] = ()
    facts: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = ()
    warnings: Sequence[str] = field(default=())


def environment() -> jinja2.Environment:
    """Templates of this folder. Autoescape is on: responses are untrusted text. Charts are the only markup that is not escaped."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters["svg"] = Markup
    return templates


def stylesheet() -> Markup:
    return Markup((HERE / "report.css").read_text(encoding="utf-8"))


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def write(page: Page, out: Path) -> Path:
    """Write the page as one HTML file and return it.

    Raises:
        JournalError: the file cannot be written.
    """
    out = Path(out)
    make_folder(out.parent)
    write_text(out, environment().get_template("page.html").render(page=page, css=stylesheet(), written=now()))
    return out
