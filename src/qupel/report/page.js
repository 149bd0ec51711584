"use strict";
// Draws the charts of the page from the numbers in #data (report/charts.py). No library, no request.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const off = { family: new Set(), variant: new Set() };
  const shown = (k) => !off.family.has(page.series[k].family) && !off.variant.has(page.series[k].variant);
  const label = (k) => page.series[k].label;

  // --- numbers ---

  const percent = (v) => v.toFixed(2) + " %";
  const plain = (v) => (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e5) ? v.toExponential(2).replace(/\.?0+e/, "e") : String(+v.toPrecision(4)));
  const valueOf = (spec) => (spec.unit === "%" ? percent : plain);
  const spread = (spec, v) => (spec.unit === "%" ? v.toFixed(2) : plain(v));
  const bytes = (v) => {
    for (const unit of ["B", "kB", "MB"]) {
      if (v < 999.5) return +v.toPrecision(3) + " " + unit;
      v /= 1000;
    }
    return +v.toPrecision(3) + " GB";
  };
  const isNumber = (v) => v !== null && v !== undefined;
  const extent = (values) => {
    let [low, high] = [Infinity, -Infinity];
    for (const v of values) if (isNumber(v)) [low, high] = [Math.min(low, v), Math.max(high, v)];
    return low <= high ? [low, high] : [1, 10]; // nothing to show
  };

  // About `count` round numbers from low to high; on a log axis 1, 2, 5 times powers of ten, or the powers alone.
  function ticks(low, high, count, log) {
    const found = [];
    if (log) {
      const digits = Math.log10(high / low) > count / 2 ? [1] : [1, 2, 5];
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
        for (const d of digits) if (d * 10 ** e >= low * 0.999 && d * 10 ** e <= high * 1.001) found.push(d * 10 ** e);
      return found.length > 1 ? found : ticks(low, high, count);
    }
    const raw = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((d) => d * power).find((s) => s >= raw * 0.999);
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(+(k * step).toPrecision(12));
    return found;
  }

  function scale(low, high, from, to, log) {
    const f = log ? Math.log : (v) => v;
    const span = f(high) - f(low) || 1;
    return (v) => from + ((f(v) - f(low)) / span) * (to - from);
  }

  const padded = ([low, high], share, log) => {
    if (log) return [low / (high / low) ** share / 1.15, high * (high / low) ** share * 1.15];
    const room = (high - low) * share || Math.abs(high) * 0.05 || 1;
    return [low - room, high + room];
  };

  // --- elements ---

  function add(parent, name, attributes = {}, text) {
    const svg = name === "svg" || parent instanceof SVGElement;
    const e = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
    if (text !== undefined) e.textContent = text;
    parent.append(e);
    return e;
  }
  const color = (k) => `--c: var(--s${page.series[k].color})`;
  const dash = (k) => page.dashes[page.series[k].dash];

  function canvas(host, height, about) {
    host.replaceChildren();
    const width = host.clientWidth;
    const svg = add(host, "svg", {
      width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "application",
      "aria-roledescription": "chart", "aria-label": about + ". Arrow keys go through the values.",
    });
    return { svg, width };
  }

  // Grid, tick labels and titles of both axes; `y` may be left out.
  function axes(svg, box, x, y) {
    for (const v of x.ticks) {
      add(svg, "line", { class: "grid", x1: x.at(v), x2: x.at(v), y1: box.top, y2: box.bottom });
      add(svg, "text", { x: x.at(v), y: box.bottom + 16, "text-anchor": "middle" }, x.format(v));
    }
    for (const v of y ? y.ticks : []) {
      add(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: y.at(v), y2: y.at(v) });
      add(svg, "text", { x: box.left - 6, y: y.at(v) + 4, "text-anchor": "end" }, y.format(v));
    }
    add(svg, "line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
    add(svg, "text", { x: (box.left + box.right) / 2, y: box.bottom + 33, "text-anchor": "middle" }, x.title);
    if (y) add(svg, "text", { x: 0, y: 12 }, y.title);
  }

  // --- values on hover, touch and arrow keys ---

  // stops: {x, y, title, rows: [[series or null, name, value]]}; `far(stop, px, py)` says how far a pointer is from one.
  function values(host, svg, box, stops, far, cross) {
    const tip = add(host, "div", { class: "tip", role: "status" });
    const mark = add(svg, "g");
    let at = -1;
    function show(k) {
      at = k;
      mark.replaceChildren();
      tip.replaceChildren();
      if (k < 0) return;
      const stop = stops[k];
      if (cross) add(mark, "line", { class: "cross", x1: stop.x, x2: stop.x, y1: box.top, y2: box.bottom });
      else add(mark, "circle", { class: "ring", cx: stop.x, cy: stop.y, r: 6 });
      add(tip, "b", {}, stop.title);
      for (const [series, name, value] of stop.rows) {
        const row = add(tip, "span");
        add(row, "i", series === null ? {} : { style: color(series) }, name);
        add(row, "span", {}, value);
      }
      const left = stop.x + 14 + tip.offsetWidth > host.clientWidth ? stop.x - 14 - tip.offsetWidth : stop.x + 14;
      tip.style.left = Math.max(0, Math.min(left, host.clientWidth - tip.offsetWidth)) + "px";
      const away = stop.y < (box.top + box.bottom) / 2 ? box.bottom - tip.offsetHeight - 8 : box.top; // off the lines
      tip.style.top = host.offsetTop + Math.max(0, cross ? away : stop.y - tip.offsetHeight / 2) + "px";
    }
    const nearest = (e) => {
      const r = svg.getBoundingClientRect();
      const [px, py] = [e.clientX - r.left, e.clientY - r.top];
      const distances = stops.map((s) => far(s, px, py));
      const best = distances.indexOf(Math.min(...distances));
      show(best >= 0 && distances[best] < 40 ? best : -1);
    };
    svg.addEventListener("pointermove", nearest);
    svg.addEventListener("pointerdown", nearest);
    svg.addEventListener("pointerleave", () => show(-1));
    svg.addEventListener("blur", () => show(-1));
    svg.addEventListener("keydown", (e) => {
      const last = stops.length - 1;
      const next = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last, Escape: -1 }[e.key];
      if (next === undefined) return;
      e.preventDefault();
      show(e.key === "Escape" ? -1 : Math.max(0, Math.min(last, next)));
    });
  }

  // --- lines ---

  function drawLines(host, spec, small) {
    const lines = spec.lines.filter((l) => shown(l.series));
    const { svg, width } = canvas(host, small ? 190 : 380, spec.y + " by " + spec.x);
    const longest = Math.max(0, ...lines.map((l) => label(l.series).length));
    const named = !small && width >= 640 && lines.length <= 12;
    const box = { left: 46, right: width - (named ? Math.min(20 + longest * 6.6, width * 0.36) : 8), top: 24, bottom: (small ? 190 : 380) - 40 };
    const [x0, x1] = extent(lines.flatMap((l) => l.x));
    const late = (l) => (_, k) => !host.zoomed || l.x[k] >= (x0 + x1) / 2; // zoomed: the later half says how high and low
    const [y0, y1] = padded(extent(lines.flatMap((l) => [l.y, l.low || [], l.high || []].flatMap((v) => v.filter(late(l))))), 0.04, spec.log);
    const x = scale(x0, x1, box.left + 4, box.right - 4);
    const y = scale(y0, y1, box.bottom, box.top, spec.log);
    axes(svg, box,
      { at: x, ticks: ticks(x0, x1, Math.max(2, (box.right - box.left) / 65)), format: plain, title: spec.x },
      { at: y, ticks: ticks(y0, y1, small ? 3 : 6, spec.log), format: plain, title: spec.y });
    const clip = add(add(svg, "clipPath", { id: `clip-${host.dataset.chart}` }), "rect", { x: 0, y: box.top - 4, width, height: box.bottom - box.top + 4 });
    const inside = add(svg, "g", { "clip-path": `url(#${clip.parentNode.id})` });
    for (const l of lines) {
      if (l.low) {
        const there = l.x.map((_, k) => k).filter((k) => isNumber(l.low[k]) && isNumber(l.high[k]));
        const up = there.map((k) => `${x(l.x[k])},${y(l.high[k])}`);
        const down = there.map((k) => `${x(l.x[k])},${y(l.low[k])}`).reverse();
        add(inside, "polygon", { class: "band", style: color(l.series), points: [...up, ...down].join(" ") });
      }
    }
    for (const l of lines) {
      let path = "", pen = "M";
      l.y.forEach((v, k) => {
        if (!isNumber(v)) return void (pen = "M");
        path += `${pen}${x(l.x[k]).toFixed(1)} ${y(v).toFixed(1)}`;
        pen = "L";
      });
      add(inside, "path", { class: "line", style: color(l.series), d: path || "M0 0", "stroke-dasharray": dash(l.series), "data-series": label(l.series) });
      if (l.x.length <= 40)
        l.y.forEach((v, k) => isNumber(v) && add(inside, "circle", { class: "dot", style: color(l.series), cx: x(l.x[k]), cy: y(v), r: small ? 2 : 3 }));
    }
    if (named) nameEnds(svg, box, lines, x, y);
    const stops = [...new Set(lines.flatMap((l) => l.x))].sort((a, b) => a - b).map((v) => {
      const found = lines.map((l) => [l, l.x.indexOf(v)]).filter(([l, k]) => k >= 0 && isNumber(l.y[k]));
      found.sort(([a, i], [b, j]) => b.y[j] - a.y[i]);
      const f = valueOf(spec);
      return {
        x: x(v), y: found.length ? Math.min(box.bottom, y(found[0][0].y[found[0][1]])) : box.top, title: `${spec.x} ${plain(v)}`,
        rows: found.map(([l, k]) => [l.series, label(l.series), f(l.y[k])]),
      };
    });
    values(host, svg, box, stops, (s, px) => Math.abs(s.x - px), true);
  }

  // Names at the right ends of lines, pushed apart where they would overlap.
  function nameEnds(svg, box, lines, x, y) {
    const ends = lines.map((l) => {
      const k = l.y.findLastIndex(isNumber);
      return k < 0 ? null : { series: l.series, x: x(l.x[k]), at: y(l.y[k]), y: y(l.y[k]) };
    }).filter(Boolean).sort((a, b) => a.y - b.y);
    ends.forEach((e, k) => k && (e.y = Math.max(e.y, ends[k - 1].y + 14)));
    const over = ends.length ? Math.max(0, ends[ends.length - 1].y - box.bottom) : 0;
    for (let k = ends.length - 1, limit = Infinity; over && k >= 0; k--) {
      ends[k].y = Math.min(ends[k].y, k === ends.length - 1 ? box.bottom : limit - 14);
      limit = ends[k].y;
    }
    for (const e of ends) {
      add(svg, "line", { class: "leader", x1: e.x + 5, y1: e.at, x2: box.right + 8, y2: e.y });
      add(svg, "text", { class: "own", x: box.right + 12, y: e.y + 4 }, label(e.series));
    }
  }

  // --- every client: a row for each method and bit width ---

  function drawDots(host, spec) {
    const rows = spec.rows.filter((r) => shown(r.series));
    const wide = host.clientWidth >= 640;
    const each = wide ? 38 : 56;
    const { svg, width } = canvas(host, 30 + each * rows.length + 40, "each client's " + spec.x);
    const longest = Math.max(0, ...rows.map((r) => r.name.length));
    const box = { left: wide ? Math.min(12 + longest * 6.8, width * 0.42) : 10, right: width - 46, top: 10, bottom: 10 + each * rows.length };
    const [x0, x1] = padded(extent(rows.flatMap((r) => r.values)), 0.03);
    const x = scale(x0, x1, box.left, box.right);
    axes(svg, box, { at: x, ticks: ticks(x0, x1, (box.right - box.left) / 70), format: plain, title: spec.x });
    const stops = [];
    rows.forEach((r, k) => {
      const middle = box.top + each * k + (wide ? each / 2 : each - 18);
      add(svg, "text", { class: "own halo", x: wide ? box.left - 12 : box.left, y: wide ? middle + 4 : middle - 18, "text-anchor": wide ? "end" : "start" }, r.name);
      const piles = new Map(); // dots that would cover one another stand above each other
      r.values.forEach((v, i) => {
        const key = Math.round(x(v) / 6);
        piles.set(key, [...(piles.get(key) || []), i]);
      });
      for (const pile of piles.values())
        pile.forEach((i, j) => {
          const step = Math.min(6, 28 / pile.length);
          const at = { x: x(r.values[i]), y: middle + (j - (pile.length - 1) / 2) * step };
          add(svg, "circle", { class: "dot faint", style: color(r.series), cx: at.x, cy: at.y, r: 2.6 });
          stops.push({ ...at, title: r.name, rows: [[r.series, `client ${r.clients[i]}, seed ${r.seeds[i]}`, valueOf(spec)(r.values[i])]] });
        });
      add(svg, "line", { class: "mean", x1: x(r.mean), x2: x(r.mean), y1: middle - 15, y2: middle + 15 });
      add(svg, "text", { class: "own", x: box.right + 8, y: middle + 4 }, r.shown);
    });
    values(host, svg, box, stops, (s, px, py) => Math.hypot(s.x - px, s.y - py), false);
  }

  // --- accuracy against bytes ---

  function drawScatter(host, spec) {
    const points = spec.points.filter((p) => shown(p.series) && isNumber(p.x) && isNumber(p.y));
    const { svg, width } = canvas(host, 360, spec.y + " by " + spec.x);
    const box = { left: 46, right: width - 12, top: 24, bottom: 320 };
    const [x0, x1] = padded(extent(points.map((p) => p.x)), 0.06, true);
    const [y0, y1] = padded(extent(points.flatMap((p) => [p.y - (p.std || 0), p.y + (p.std || 0)])), 0.08);
    const x = scale(x0, x1, box.left, box.right, true);
    const y = scale(y0, y1, box.bottom, box.top);
    axes(svg, box,
      { at: x, ticks: ticks(x0, x1, width / 90, true), format: bytes, title: spec.x + " (log)" },
      { at: y, ticks: ticks(y0, y1, 6), format: plain, title: spec.y });
    const taken = [];
    const groups = [...new Set(points.map((p) => p.group))];
    for (const g of groups) {
      const mine = points.filter((p) => p.group === g).sort((a, b) => a.x - b.x);
      for (const p of mine) p.px = x(p.x) + (groups.indexOf(g) - (groups.length - 1) / 2) * 3; // bars side by side
      const d = mine.map((p, k) => `${k ? "L" : "M"}${p.px} ${y(p.y)}`).join("");
      add(svg, "path", { class: "join", style: color(mine[0].series), d });
    }
    for (const p of points) {
      if (p.std) add(svg, "line", { class: "stroke", style: color(p.series), x1: p.px, x2: p.px, y1: y(p.y - p.std), y2: y(p.y + p.std) });
      add(svg, "circle", { class: "dot", style: color(p.series), cx: p.px, cy: y(p.y), r: 5 });
      taken.push([p.px - 6, y(p.y) - 6, p.px + 6, y(p.y) + 6]);
    }
    for (const p of points) { // a name beside its point where there is room; the rest tell theirs on hover
      const w = p.name.length * 6.4;
      const spots = [[9, 4], [-9 - w, 4], [-w / 2, -12], [-w / 2, 20], [9, -9], [9, 17], [-9 - w, -9], [-9 - w, 17]];
      for (const [dx, dy] of spots) {
        const b = [p.px + dx, y(p.y) + dy - 11, p.px + dx + w, y(p.y) + dy + 3];
        const free = taken.every((t) => b[2] < t[0] || b[0] > t[2] || b[3] < t[1] || b[1] > t[3]);
        if (!free || b[0] < box.left || b[2] > width || b[1] < 14 || b[3] > box.bottom) continue;
        taken.push(b);
        add(svg, "text", { class: "own halo", x: b[0], y: b[3] - 3 }, p.name);
        break;
      }
    }
    const stops = points.map((p) => ({
      x: p.px, y: y(p.y), title: p.name,
      rows: [[p.series, spec.name, valueOf(spec)(p.y) + (p.std ? ` ± ${spread(spec, p.std)}` : "")], [null, "model", bytes(p.x)]],
    })).sort((a, b) => a.x - b.x);
    values(host, svg, box, stops, (s, px, py) => Math.hypot(s.x - px, s.y - py), false);
  }

  // --- weights and centers: above, the centers' way over the epochs; below, the weights around them ---

  function drawWeights(host, spec) {
    const choose = host.previousElementSibling;
    const picked = [...choose.querySelectorAll("select")].map((s) => s.value);
    const panel = spec.panels.find((p) => pickers.every((f, k) => f(p) === picked[k]));
    if (!panel) return;
    const h = panel.histogram;
    const { svg, width } = canvas(host, h ? 400 : 230, "centers of " + panel.layer);
    const box = { left: 46, right: width - 12, top: 24, bottom: 190 };
    const low = { ...box, top: 225, bottom: 360 };
    const [x0, x1] = padded(extent([...panel.centers.flat(), ...(h ? [h.low, h.high] : [])]), 0.02);
    const x = scale(x0, x1, box.left, box.right);
    const [e0, e1] = extent(panel.epochs);
    const y = scale(e0, e1, box.top + 4, box.bottom - 4); // time runs down, to the weights
    const xAxis = { at: x, ticks: ticks(x0, x1, width / 90), format: plain, title: "weight" };
    axes(svg, box, { ...xAxis, title: h ? "" : "weight", format: h ? () => "" : plain },
      { at: y, ticks: ticks(e0, e1, 4), format: plain, title: "epoch: how the centers moved" + (panel.times > 1 ? `, ${panel.times} times as far` : "") });
    const last = panel.centers[panel.centers.length - 1];
    const stops = [];
    const count = Math.max(...panel.centers.map((c) => c.length));
    for (let j = 0; j < count; j++) {
      const way = panel.centers.map((c, k) => [c[j], panel.epochs[k]]).filter(([v]) => isNumber(v));
      const at = (v) => x(last[j] + panel.times * (v - last[j]));
      const d = way.map(([v, e], k) => `${k ? "L" : "M"}${at(v)} ${y(e)}`).join("");
      add(svg, "path", { class: "line", style: color(panel.series), d: d || "M0 0" });
      for (const [v, e] of way) {
        if (way.length <= 40) add(svg, "circle", { class: "dot", style: color(panel.series), cx: at(v), cy: y(e), r: 2.5 });
        const since = [null, `since epoch ${plain(way[0][1])}`, (v < way[0][0] ? "" : "+") + plain(v - way[0][0])];
        stops.push({ x: at(v), y: y(e), title: `center ${j + 1} of ${count}`, rows: [[panel.series, `epoch ${plain(e)}`, plain(v)], since] });
      }
    }
    if (h) {
      const total = h.counts.reduce((a, b) => a + b, 0);
      const step = (h.high - h.low) / h.counts.length;
      const top = Math.sqrt(Math.max(...h.counts) / total);
      const bar = scale(0, top, low.bottom, low.top);
      const shares = ticks(0, top * top * 100, 3).filter((v) => v > 0);
      axes(svg, low, xAxis, { at: (v) => bar(Math.sqrt(v / 100)), ticks: shares, format: (v) => plain(v) + " %", title: "" });
      add(svg, "text", { x: 0, y: low.top - 12 }, `weights at epoch ${plain(h.epoch)} (√ share per bin), ${(100 * h.on).toFixed(1)} % on centers`);
      h.counts.forEach((n, k) => {
        const left = h.low + k * step;
        const a = x(left), b = step ? x(left + step) : a + 2;
        if (n) add(svg, "rect", { class: "bar", style: color(panel.series), x: a, y: bar(Math.sqrt(n / total)), width: Math.max(0.6, b - a), height: low.bottom - bar(Math.sqrt(n / total)) });
        stops.push({ x: (a + b) / 2, y: low.bottom - 30, bin: true, title: `${plain(left)} to ${plain(left + step)}`, rows: [[panel.series, "weights", `${n} (${((100 * n) / total).toFixed(2)} %)`]] });
      });
      for (const c of h.centers) add(svg, "line", { class: "cross", x1: x(c), x2: x(c), y1: low.top, y2: low.bottom });
    }
    values(host, svg, { top: box.top, bottom: low.bottom }, stops,
      (s, px, py) => (s.bin ? (py > low.top - 10 ? Math.abs(s.x - px) : Infinity) : Math.hypot(s.x - px, s.y - py)), false);
  }
  const pickers = [(p) => label(p.series), (p) => `client ${p.client}, ${p.bits}`, (p) => p.layer];

  // The choices of a select follow from those before it.
  function offer(choose, spec, changed) {
    let able = spec.panels;
    [...choose.querySelectorAll("select")].forEach((select, k) => {
      if (k > changed) {
        const before = select.value;
        const options = [...new Set(able.map(pickers[k]))];
        select.replaceChildren(...options.map((o) => new Option(o, o)));
        if (options.includes(before)) select.value = before;
        select.disabled = options.length < 2;
      }
      able = able.filter((p) => pickers[k](p) === select.value);
    });
  }

  // --- the numbers of a chart as a table ---

  function numbers(spec) {
    const f = valueOf(spec);
    const cell = (v) => (isNumber(v) ? f(v) : "");
    if (spec.kind === "lines") {
      const xs = [...new Set(spec.lines.flatMap((l) => l.x))].sort((a, b) => a - b);
      const rows = xs.map((v) => [plain(v), ...spec.lines.map((l) => cell(l.y[l.x.indexOf(v)]))]);
      return [[spec.x, ...spec.lines.map((l) => label(l.series))], rows];
    }
    if (spec.kind === "dots") {
      const each = (r) => r.values.map((v, i) => [r.name, String(r.clients[i]), String(r.seeds[i]), f(v)]);
      return [["method", "client", "seed", spec.name], spec.rows.flatMap(each)];
    }
    if (spec.kind === "scatter") {
      const rows = spec.points.map((p) => [p.name, bytes(p.x), cell(p.y), isNumber(p.std) ? spread(spec, p.std) : ""]);
      return [["method", "model", spec.name, "std"], rows];
    }
    const rows = spec.panels.flatMap((p) => p.epochs.map((e, k) => [...pickers.map((g) => g(p)), plain(e), p.centers[k].map(plain).join("  ")]));
    return [["method", "client", "layer", "epoch", "centers"], rows];
  }

  function fill(details, spec) {
    if (details.querySelector("table")) return;
    const [head, rows] = numbers(spec);
    const table = add(add(details, "div", { class: "scroll", tabindex: 0 }), "table");
    const top = add(add(table, "thead"), "tr");
    head.forEach((h) => add(top, "th", { scope: "col" }, h));
    const body = add(table, "tbody");
    for (const row of rows) {
      const tr = add(body, "tr");
      row.forEach((v) => add(tr, "td", {}, v));
    }
  }

  // --- tables that are sorted by a click on a column's name ---

  // Numbers by data-value, else text; what has none comes last either way. Numbers begin with the largest.
  function sortBy(table, column, up) {
    const value = (row) => row.cells[column].dataset.value ?? "";
    const numeric = [...table.tBodies[0].rows].every((r) => value(r) === "" || !isNaN(value(r)));
    const order = (a, b) => {
      const [p, q] = [value(a), value(b)];
      if (p === "" || q === "") return (p === "") - (q === "");
      return (numeric ? p - q : p.localeCompare(q)) * (up ? 1 : -1);
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
  }
  document.querySelectorAll("table.sortable").forEach((table) =>
    [...table.tHead.rows[0].cells].forEach((head, column, all) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const before = head.getAttribute("aria-sort");
        const text = head.dataset.kind === "text";
        const up = before ? before === "descending" : text;
        all.forEach((h) => h.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        sortBy(table, column, up);
      });
    }));

  // --- the page ---

  const draws = { nothing: (host) => host.replaceChildren(), lines: drawLines, dots: drawDots, scatter: drawScatter, weights: drawWeights };
  const hosts = [...document.querySelectorAll(".chart")];
  const measure = document.getElementById("measure"); // charts of another metric are called "accuracy:2"
  const measured = new Set(["accuracy", "clients", "sizes"]);
  const specOf = ({ dataset: { chart } }) =>
    measure && measure.value && measured.has(chart) ? page.charts[`${chart}:${measure.value}`] || { kind: "nothing" } : page.charts[chart];
  const draw = () => {
    hosts.forEach((host) => draws[specOf(host).kind](host, specOf(host), "small" in host.dataset));
    document.querySelectorAll("tr[data-series]").forEach((row) => (row.hidden = !shown(+row.dataset.series)));
  };

  document.querySelectorAll(".switches button").forEach((button) =>
    button.addEventListener("click", () => {
      const set = off[button.dataset.kind], k = +button.dataset.index;
      if (!set.delete(k)) set.add(k);
      button.setAttribute("aria-pressed", String(!set.has(k)));
      draw();
    }));
  document.querySelectorAll(".zoom").forEach((button) =>
    button.addEventListener("click", () => {
      const host = button.closest("figure").querySelector(".chart");
      host.zoomed = !host.zoomed;
      button.setAttribute("aria-pressed", String(host.zoomed));
      drawLines(host, specOf(host));
    }));
  if (measure)
    measure.addEventListener("change", () => {
      document.querySelectorAll("figure details").forEach((d) => {
        d.querySelector(".scroll")?.remove();
        d.open = false;
      });
      draw();
    });
  hosts.forEach((host) => {
    const spec = specOf(host);
    const figure = host.closest("figure");
    const details = figure.querySelector("details");
    if (details) details.addEventListener("toggle", () => details.open && specOf(host).kind !== "nothing" && fill(details, specOf(host)));
    if (spec.kind !== "weights") return;
    const choose = host.previousElementSibling;
    offer(choose, spec, -1);
    [...choose.querySelectorAll("select")].forEach((s, k) =>
      s.addEventListener("change", () => { offer(choose, spec, k); drawWeights(host, spec); }));
  });
  let width = document.body.clientWidth;
  draw();
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    draw();
  }).observe(document.body);
})();
