"""One self-contained HTML page about a comparison: no network, no script, all pictures inline."""

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from matplotlib.figure import Figure

from experiments.cli.rundir import command_line
from experiments.pages.drawing import save
from experiments.pages.tables import played_words
from experiments.prediction.breakdown_plot import bar
from experiments.tuning import search_plots
from experiments.tuning.search_words import HEAD, WORDS, by_time, cells_of
from mistlab.job.prediction import Breakdown, Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPlan:
    """The best plan: who found it, in words, why, where its time goes if the closed form predicts
    it, and an iteration of it as SVG."""

    row: Mapping[str, Any]
    prediction: Prediction
    plan: Sequence[str]
    why: Sequence[str]
    breakdown: Breakdown | None
    timeline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPage:
    """What the page tells; ``no_answer`` has the reasons where there is no plan."""

    title: str
    subtitle: str
    rows: Sequence[Mapping[str, Any]]
    answer: BestPlan | None
    no_answer: Sequence[str]
    limit_bytes: int
    outside_bytes: float
    config: Mapping[str, Any]

    def html(self) -> str:
        """The page."""
        template = Template(
            files("experiments.tuning").joinpath("page.html").read_text(encoding="utf-8")
        )
        return template.substitute(
            title=escape(self.title),
            subtitle=escape(self.subtitle),
            facts=_facts(self.answer) if self.answer else _paragraphs(self.no_answer),
            table=_table(self.rows),
            reasons=_paragraphs(
                [f"{r['searcher']}: {r['reason']}" for r in self.rows if r["reason"]]
            ),
            answer=self._answer(self.answer) if self.answer else "",
            searches=self._searches() if self.answer else "",
            command=escape(command_line(self.config)),
            config=escape(json.dumps(self.config, indent=2)),
        )

    def _answer(self, answer: BestPlan) -> str:
        bars = search_plots.memory(answer.prediction, self.outside_bytes, self.limit_bytes)
        parts = [
            "<h2>The best plan</h2>",
            _list(answer.plan),
            "<h2>Why this one</h2>",
            _list([*answer.why, *answer.prediction.notes]),
            *_time(answer.breakdown),
            "<h2>What fills its memory</h2>",
            _figure(bars, "A GPU of each stage at its fullest moment, by what it holds."),
            "<h2>One iteration of it</h2>",
            _caption(
                inline_svg(answer.timeline, "timeline"),
                "As the event simulator plays it: four streams a stage.",
                "long",
            ),
        ]
        return "\n".join(parts)

    def _searches(self) -> str:
        evaluations = search_plots.convergence(self.rows, over_seconds=False)
        seconds = search_plots.convergence(self.rows, over_seconds=True)
        parts = [
            "<h2>How the searches went</h2>",
            '<div class="pair">',
            _figure(evaluations, "Best plan so far against evaluations."),
            _figure(seconds, "Best plan so far against seconds of the search."),
            "</div>",
            _figure(
                search_plots.fronts(self.rows, self.limit_bytes),
                "Time against memory: the plans each searcher asked about that no other of its "
                "beats in both, its answer a star. Beyond the limit they do not fit.",
            ),
        ]
        return "\n".join(parts)


def _time(breakdown: Breakdown | None) -> list[str]:
    """The section about the GPUs' time, if there is one."""
    if breakdown is None:
        return []
    caption = "What a GPU does in an iteration; of communication, what no arithmetic hides."
    return ["<h2>Where the time goes</h2>", _figure(bar(breakdown), caption)]


def _facts(answer: BestPlan) -> str:
    row, prediction = answer.row, answer.prediction
    facts = {
        "found by": row["searcher"],
        "iteration, predicted": f"{row['predicted_s']:.3f} s",
        "bounds (90 %)": f"{row['predicted_s_low']:.2f} to {row['predicted_s_high']:.2f} s",
        "iteration, event simulator": played_words(row["simulated_s"]),
        "tokens a second": f"{prediction.tokens_per_s:,.0f}",
        "of the peak": f"{prediction.mfu:.1%}",
    }
    if row["speedup"] is not None:
        facts["over the Megatron grid"] = f"{row['speedup']:.2f}x"
    items = [f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items()]
    return f'<dl class="facts">{"".join(items)}</dl>'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [_line("th", HEAD, "")]
    for place, row in enumerate(by_time(rows)):
        is_best = place == 0 and row["predicted_s"] is not None
        lines.append(_line("td", cells_of(row), ' class="best"' if is_best else ""))
    return (
        f"<table>\n<thead>{lines[0]}</thead>\n<tbody>\n{chr(10).join(lines[1:])}\n</tbody></table>"
    )


def _line(tag: str, cells: Sequence[str], style: str) -> str:
    marks = ["" if place in WORDS else ' class="number"' for place in range(len(cells))]
    content = "".join(
        f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, cells, strict=True)
    )
    return f"<tr{style}>{content}</tr>"


def _paragraphs(lines: Sequence[str]) -> str:
    return "\n".join(f"<p>{escape(line)}</p>" for line in lines)


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _figure(figure: Figure, caption: str) -> str:
    text = svg_of(figure)
    prefix = re.sub(r"\W+", "-", caption.lower()).strip("-")
    return _caption(inline_svg(text, prefix), caption, "")


def _caption(svg: str, caption: str, kind: str) -> str:
    words = escape(caption)
    return (
        f'<figure class="{kind}"><figcaption>{words}</figcaption>'
        f'<div class="wide">{svg}</div></figure>'
    )


def svg_of(figure: Figure) -> str:
    """A picture as the text of an SVG file."""
    text = io.StringIO()
    save(figure, text)
    return text.getvalue()


def inline_svg(text: str, prefix: str) -> str:
    """An SVG file's text as an element of a page.

    Its ids get a prefix, because all pictures of a page share one name space. Black becomes the
    page's ink and white its paper, so a reader's dark mode holds for pictures too.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = text.replace("url(#", f"url(#{prefix}-")
    return text.replace("#000000", "var(--ink)").replace("#ffffff", "var(--paper)")
