"""The page in a real browser: switching series, reading values, no requests, no overflow on a phone, both themes."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import browser as chromium
from made_runs import result, write_run
from qupel.report import charts, forms
from qupel.report.page import page
from qupel.report.runs import load_runs

pytestmark = pytest.mark.skipif(bool(chromium.missing()), reason=chromium.missing() or "there is a browser")
RIGHT, HOME = "\ue014", "\ue011"  # keys, in WebDriver's words
ODD = "<b>QuPeL</b> & more"
LABELS = (ODD, "Local", "FedAvg + tuning")


@pytest.fixture(scope="module")
def results():
    found = [result(label, seed) for label in LABELS for seed in (0, 1, 2)]
    for r in found:
        r["data_note"] = "JPEG copy of cifar10: re-encoded with loss, not the original pixels"
        for line in r["lines"]:
            line["diagnostics"] = {"G_x": 10.0 ** -line["round"], "kappa": 1.0 + line["round"]}
    return found


@pytest.fixture(scope="module")
def written(results, tmp_path_factory) -> Path:
    """A page with everything a page can have."""
    folder = tmp_path_factory.mktemp("page")
    runs = load_runs([write_run(folder / "run", results)])
    c = charts.compare(runs)
    (folder / "index.html").write_text(page(runs, c, charts.all_charts(c), forms.forms(runs), []))
    return folder / "index.html"


@pytest.fixture(scope="module")
def window() -> Iterator[chromium.Browser]:
    found = chromium.Browser()
    yield found
    found.close()


def lines(window) -> list[str]:
    """The series that are drawn over the epochs."""
    script = "return [...document.querySelectorAll('#accuracy path.line')].map(p => p.dataset.series)"
    return window.run(script)


def test_a_series_is_switched_off_and_on_in_all_figures(window, written):
    window.open(written)
    assert lines(window) == list(LABELS)
    dots = "return document.querySelectorAll('#clients circle').length"
    before = window.run(dots)
    window.click(".switches button[data-index='1']")
    assert lines(window) == [ODD, "Local", "FedAvg + tuning"][::2]
    assert window.run(dots) == before * 2 // 3
    pressed = "return [...document.querySelectorAll('.switches button')].map(b => b.getAttribute('aria-pressed'))"
    assert window.run(pressed) == ["true", "false", "true"]
    for k in (0, 2):
        window.click(f".switches button[data-index='{k}']")
    assert lines(window) == []  # nothing left to draw is no error
    for k in range(3):
        window.click(f".switches button[data-index='{k}']")
    assert lines(window) == list(LABELS)
    assert window.logs("browser") == []


def expected(results, label: str, at: int) -> str:
    return f"{np.mean([100 * r['lines'][at]['test'] for r in results if r['label'] == label]):.2f} %"


def test_hovering_a_point_tells_its_values(window, written, results):
    window.open(written)
    window.run("document.querySelector('#accuracy').scrollIntoView()")
    where = """
        const dots = document.querySelectorAll('#accuracy circle.dot');
        const r = dots[6].getBoundingClientRect();
        return [r.left + r.width / 2, r.top + r.height / 2]"""
    window.move(*window.run(where))  # the first series at its seventh evaluation
    told = window.run("return document.querySelector('#accuracy .tip').innerText")
    assert "epoch 14" in told
    for label in LABELS:
        assert label in told  # as text: markup in a label is no markup
        assert expected(results, label, 6) in told
    window.move(1, 1)
    assert window.run("return document.querySelector('#accuracy .tip').innerText") == ""


def test_hovering_a_client_tells_who_it_is(window, written, results):
    window.open(written)
    window.run("document.querySelector('#clients').scrollIntoView()")
    where = """
        const r = document.querySelector('#clients circle').getBoundingClientRect();
        return [r.left + 2.6, r.top + 2.6]"""
    window.move(*window.run(where))
    told = window.run("return document.querySelector('#clients .tip').innerText")
    words = told.replace("\n", " ")
    assert words.startswith(f"{ODD}, 2-bit client ")
    client, seed = (int(words.split(f"{name} ")[1].split()[0].strip(",")) for name in ("client", "seed"))
    (mine,) = (r for r in results if (r["label"], r["seed"]) == (ODD, seed))
    assert f"{100 * mine['lines'][-1]['clients']['test'][client]:.2f} %" in words


def test_values_are_told_to_the_keyboard(window, written, results):
    window.open(written)
    window.run("document.querySelector('#accuracy svg[tabindex]').focus()")
    window.press(HOME, RIGHT, RIGHT)
    told = window.run("return document.querySelector('#accuracy .tip').innerText")
    assert "epoch 6" in told
    assert expected(results, "Local", 2) in told


def test_every_figure_has_its_numbers_as_a_table(window, written, results):
    window.open(written)
    window.click("#accuracy summary")
    window.run("return new Promise(done => setTimeout(done, 50))")
    rows = window.run("return [...document.querySelectorAll('#accuracy details tr')].map(r => r.innerText)")
    assert len(rows) == 1 + 10
    assert expected(results, "Local", 9) in rows[-1]


def test_the_layer_is_chosen_and_the_end_is_zoomed(window, written):
    window.open(written)
    options = "return [...document.querySelectorAll('.choose select')].map(s => [...s.options].map(o => o.text))"
    assert window.run(options) == [list(LABELS), ["client 0, 2-bit", "client 1, 3-bit"], ["conv2.weight", "fc1.weight"]]
    paths = "return document.querySelectorAll('#weights path.line').length"
    assert window.run(paths) == 4  # centers
    change = """
        const s = document.querySelectorAll('.choose select')[1];
        s.value = s.options[1].value;
        s.dispatchEvent(new Event('change'))"""
    window.run(change)
    assert window.run(paths) == 8
    ticks = "return [...document.querySelectorAll('#accuracy svg text')].map(t => t.textContent)"
    before = window.run(ticks)
    window.click(".zoom")
    assert window.run(ticks) != before


def test_nothing_leaves_the_page(window, written):
    window.open(written)
    window.click("#accuracy summary")
    assert window.requests() == [written.resolve().as_uri()]
    assert window.run("return performance.getEntriesByType('resource').length") == 0
    assert window.logs("browser") == []


@pytest.mark.parametrize("width", [390, 1100])
def test_nothing_overflows(window, written, width):
    """Neither the page nor anything in it, but for what has a scroll box of its own."""
    window.open(written, width=width, height=844)
    window.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    window.run("return new Promise(done => setTimeout(done, 100))")
    assert window.run("return document.documentElement.scrollWidth") == width
    script = """
        return [...document.querySelectorAll('body *')].filter(e => {
            if (e.closest('.scroll, .switches, clipPath, script, style')) return false;
            const r = e.getBoundingClientRect();
            return r.width && (r.left < -0.5 || r.right > innerWidth + 0.5);
        }).map(e => e.tagName + ' ' + e.textContent.slice(0, 60))"""
    assert window.run(script) == []
    texts = """
        const clash = [];
        for (const svg of document.querySelectorAll('.chart svg')) {
            const written = [...svg.querySelectorAll('text')].filter(t => t.textContent);
            const boxes = written.map(t => [t, t.getBoundingClientRect()]);
            boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
                const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
                const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
                if (across > 2 && down > 4) clash.push(a.textContent + ' / ' + b.textContent);
            }));
        }
        return clash"""
    assert window.run(texts) == []


def test_light_and_dark(window, written):
    seen = {}
    for dark in (False, True):
        window.open(written, dark=dark)
        colors = window.run("""
            const style = (q, name) => getComputedStyle(document.querySelector(q))[name];
            return [style('body', 'backgroundColor'), style('body', 'color'), style('path.line', 'stroke')]""")
        pixels = np.asarray(Image.open(io.BytesIO(window.screenshot())).convert("L"), dtype=float)
        seen[dark] = (colors, np.median(pixels), np.ptp(pixels))
    (light, paper, spread), (dark, night, other) = seen[False], seen[True]
    assert all(a != b for a, b in zip(light, dark, strict=True))
    assert paper > 240
    assert night < 40
    assert min(spread, other) > 150  # something is written on it
