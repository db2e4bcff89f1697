"use strict";

const SIZE = { width: 480, height: 250, left: 50, right: 472, top: 8, bottom: 224 };
const MOST_FAINT = 4; // with more lines, only their moving means are drawn

const charts = [];
/** The zoomed range by horizontal axis: charts over the same axis are zoomed together. */
const zooms = new Map();
/** Keys of the lines that are switched off. */
const hiddenLines = new Set();

/** One chart in its figure: drawing, legend, value readout and zoom. */
class Chart {
  constructor(figure, data, number) {
    this.figure = figure;
    this.data = data;
    this.number = number;
    this.lines = data.lines.map((line) => ({ ...line, x: page.xs[line.x], key: this.keyOf(line) }));
    this.xs = [...new Set([...this.lines.flatMap((line) => line.x)])].sort((a, b) => a - b);
    this.domain = this.findDomain();
    this.inSight = true;
    this.cursor = null; // index of the value in `xs` that the readout shows
    this.build();
  }

  /** Lines of runs are switched in all charts at once. */
  keyOf(line) {
    return comparing && this.data.axis === "step" ? `run ${line.series}` : `${this.number} ${line.name}`;
  }

  get shown() { return this.lines.filter((line) => !hiddenLines.has(line.key)); }
  get range() { return zooms.get(this.data.axis) ?? this.domain; }

  findDomain() {
    const { logarithmic_x, ticks } = this.data;
    const [first, last] = [this.xs[0] ?? 0, this.xs.at(-1) ?? 1];
    if (logarithmic_x) return [first / 1.25, last * 1.25];
    const margin = ticks ? 0.5 : this.data.axis === "step" ? Math.max(0.5, 0.02 * (last - first))
      : 0.06 * (last - first) || 1;
    return [first - margin, last + margin];
  }

  build() {
    const title = this.data.title;
    this.plot = this.figure.querySelector(".plot");
    Object.assign(this.plot, { tabIndex: 0, role: "group" });
    this.plot.setAttribute("aria-label", `${title}. Arrow keys: values; + and −: zoom; 0: reset.`);
    this.line = element("div", { class: "cursor", hidden: true });
    this.selection = element("div", { class: "selection", hidden: true });
    this.readout = element("div", { class: "readout", hidden: true, role: "status" });
    this.reset = element("button", { class: "reset", type: "button", hidden: true,
      onclick: () => zoomTo(this.data.axis, null) }, "reset zoom");
    this.figure.querySelector("figcaption").append(this.reset);
    this.listen();
    const only = this.lines[0]?.name.replaceAll("_", " ").toLowerCase();
    const named = this.lines.length === 1 && title.toLowerCase().includes(only);
    const global = comparing && this.data.axis === "step";
    if (!named && !global && only !== "run") {
      this.figure.querySelector(".legend").append(...this.lines.map((line) =>
        legendButton(line.key, line.series, line.name, this.lines.map((l) => l.key))));
    }
  }

  listen() {
    let start = null;
    const fraction = (event) => {
      const box = this.plot.getBoundingClientRect();
      const position = ((event.clientX - box.left) / box.width) * SIZE.width;
      return Math.max(SIZE.left, Math.min(SIZE.right, position));
    };
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.button === 0) start = fraction(event);
      if (event.isTrusted) this.plot.setPointerCapture(event.pointerId);
      this.point(this.scaleX.from(fraction(event)));
    });
    this.plot.addEventListener("pointermove", (event) => {
      const position = fraction(event);
      this.point(this.scaleX.from(position));
      if (start === null) return;
      const [left, right] = [Math.min(start, position), Math.max(start, position)];
      this.selection.hidden = right - left < 6;
      this.selection.style.left = `${(100 * left) / SIZE.width}%`;
      this.selection.style.width = `${(100 * (right - left)) / SIZE.width}%`;
    });
    this.plot.addEventListener("pointerup", (event) => {
      const position = fraction(event);
      if (start !== null && Math.abs(position - start) >= 6) {
        zoomTo(this.data.axis, [start, position].map(this.scaleX.from).sort((a, b) => a - b));
      }
      start = null;
      this.selection.hidden = true;
    });
    this.plot.addEventListener("pointercancel", () => { start = null; this.selection.hidden = true; });
    this.plot.addEventListener("pointerleave", () => this.point(null));
    this.plot.addEventListener("blur", () => this.point(null));
    this.plot.addEventListener("dblclick", () => zoomTo(this.data.axis, null));
    this.plot.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const { scaleX, xs } = this;
    const ends = [SIZE.left, SIZE.right];
    const middle = this.cursor === null ? (SIZE.left + SIZE.right) / 2 : scaleX.to(xs[this.cursor]);
    const zoomBy = (factor) => {
      const range = ends.map((end) => scaleX.from(middle + (end - middle) * factor));
      const all = range[0] <= this.domain[0] && range[1] >= this.domain[1];
      zoomTo(this.data.axis, all ? null : range);
    };
    const move = (by) => {
      if (event.shiftKey) {
        zoomTo(this.data.axis, ends.map((end) => scaleX.from(end + by * 0.25 * (SIZE.right - SIZE.left))));
      } else {
        const visible = xs.map((_, i) => i).filter((i) => xs[i] >= this.range[0] && xs[i] <= this.range[1]);
        if (!visible.length) return;
        const next = this.cursor === null ? (by > 0 ? visible[0] : visible.at(-1)) : this.cursor + by;
        this.point(xs[Math.max(visible[0], Math.min(visible.at(-1), next))]);
      }
    };
    const actions = {
      ArrowLeft: () => move(-1), ArrowRight: () => move(1), "+": () => zoomBy(0.5), "=": () => zoomBy(0.5),
      "-": () => zoomBy(2), 0: () => zoomTo(this.data.axis, null), Escape: () => zoomTo(this.data.axis, null),
    };
    if (!actions[event.key]) return;
    actions[event.key]();
    event.preventDefault();
    event.stopPropagation(); // the arrow keys also change the entry of the gallery
    if (this.cursor !== null) this.point(xs[this.cursor]);
  }

  /** Show the values nearest to a place on the horizontal axis; null: hide them. */
  point(value) {
    this.line.hidden = this.readout.hidden = value === null || !this.xs.length;
    if (this.readout.hidden) { this.cursor = null; return; }
    const nearest = this.xs.reduce((a, b) => (Math.abs(b - value) < Math.abs(a - value) ? b : a));
    this.cursor = this.xs.indexOf(nearest);
    const rows = this.shown.flatMap((line) => line.x.flatMap((x, index) =>
      x === nearest && line.y[index] !== null ? [[line, line.labels?.[index] ?? line.name, line.y[index]]] : []));
    const { axis, ticks } = this.data;
    const name = ticks ? ticks[nearest] : formatNumber(nearest, 6);
    const head = axis === "step" ? `step ${name}: ` : `${axis} ${name}: `;
    const list = rows.length === 1 && !rows[0][0].labels ? [this.format(rows[0][2])]
      : rows.slice(0, 14).map(([line, label, y]) =>
        element("div", null, swatch(line.series), element("span", null, label), element("b", null, this.format(y))));
    this.readout.replaceChildren(head, ...list);
    const position = this.scaleX.to(nearest) / SIZE.width;
    this.line.style.left = `${100 * position}%`;
    this.line.hidden = position < SIZE.left / SIZE.width || position > SIZE.right / SIZE.width;
    this.readout.style.left = position > 0.55 ? "" : `calc(${100 * position}% + .8rem)`;
    this.readout.style.right = position > 0.55 ? `calc(${100 * (1 - position)}% + .8rem)` : "";
  }

  format(value) {
    return this.data.share ? `${formatNumber(100 * value)} %` : formatNumber(value);
  }

  /** Return the points of a line in the range, with one on either side. */
  pointsOf(line) {
    const [low, high] = this.range;
    const kept = line.x.map((_, i) => i).filter((i) =>
      (line.x[i + 1] ?? line.x[i]) >= low && (line.x[i - 1] ?? line.x[i]) <= high);
    const value = (list, i) => (list ? list[i] : null);
    const points = kept.map((i) => ({ x: line.x[i], y: line.y[i], low: value(line.low, i), high: value(line.high, i) }));
    return averaged(points, ["x", "y", "low", "high"]);
  }

  /** Return the range of the vertical axis for the values in sight. */
  findRange(values) {
    const { share } = this.data;
    const known = values.filter((v) => v !== null && (!this.isLog || v > 0));
    let [low, high] = known.length ? [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))] : [0, 1];
    if (this.isLog) return low === high ? [low / 2, high * 2] : [low / 1.2, high * 1.2];
    const whole = this.data.axis === "step" && !zooms.has("step");
    if (share && whole) return [0, high > 0.45 ? 1.03 : Math.max(0.05, 1.15 * high)];
    const margin = 0.06 * (high - low) || Math.abs(high) * 0.06 || 1;
    if (low >= 0 && whole) return [0, high + margin];
    [low, high] = [low - margin, high + margin];
    return share ? [Math.max(0, low), Math.min(1.03, high)] : [low, high];
  }

  draw() {
    this.dirty = false;
    const { logarithmic, logarithmic_x, stacked } = this.data;
    this.isLog = logarithmic && this.shown.some((line) => line.y.some((v) => v > 0)); // no logarithm of 0
    this.scaleX = makeScale(this.range, SIZE.left, SIZE.right, logarithmic_x);
    let drawn = this.shown.map((line) => ({ line, points: this.pointsOf(line) }));
    if (stacked) drawn = this.stack(drawn);
    const values = drawn.flatMap(({ points }) => points.flatMap((p) => [p.y, p.low, p.high]));
    const range = this.findRange(values);
    this.scaleY = makeScale(range, SIZE.bottom, SIZE.top, this.isLog);
    const clip = `clip-${this.number}`;
    const box = { x: SIZE.left, y: 0, width: SIZE.right - SIZE.left, height: SIZE.bottom + 3 };
    const content = svg("g", { "clip-path": `url(#${clip})` });
    for (const { line, points } of drawn) content.append(...this.drawLine(line, points, drawn.length));
    const image = svg("svg", { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: "img", "aria-label": this.data.title },
      svg("clipPath", { id: clip }, svg("rect", box)), ...this.drawAxes(range), content);
    this.plot.replaceChildren(image, this.selection, this.line, this.readout);
    this.reset.hidden = !zooms.has(this.data.axis);
  }

  drawAxes(range) {
    const parts = [];
    const add = (kind, x, y, label) => parts.push(svg("text", { x, y, class: kind }, label));
    const span = range[1] - range[0];
    const ticks = makeTicks(range, 5, { logarithmic: this.isLog });
    for (const value of ticks) {
      const y = this.scaleY.to(value);
      parts.push(svg("line", { x1: SIZE.left, x2: SIZE.right, y1: y, y2: y, class: "grid" }));
      const label = this.data.share ? `${Number((100 * value).toPrecision(3))} %` : formatTick(value, this.isLog ? value : span);
      add("y", SIZE.left - 6, y + 3.5, label);
    }
    const { axis, logarithmic_x, ticks: names } = this.data;
    const places = names ? names.map((_, i) => i)
      : makeTicks(this.range, 6, { logarithmic: logarithmic_x, integer: axis === "step" });
    for (const value of places.filter((v) => v >= this.range[0] && v <= this.range[1])) {
      add("x", this.scaleX.to(value), SIZE.bottom + 17, names ? names[value] : formatTick(value, logarithmic_x ? value : 1));
    }
    parts.push(svg("line", { x1: SIZE.left, x2: SIZE.right, y1: SIZE.bottom, y2: SIZE.bottom, class: "grid" }));
    return parts;
  }

  drawLine(line, points, count) {
    const stroke = (positions, style) => {
      const path = svg("path", { d: makePath(positions), fill: "none", "stroke-linejoin": "round", "stroke-linecap": "round", ...style });
      path.style.stroke = color(line.series);
      return path;
    };
    const fill = (d, opacity) => {
      const path = svg("path", { d: `${d}Z`, "fill-opacity": opacity });
      path.style.fill = color(line.series);
      return path;
    };
    const positions = (key) => points.map((p) => [this.scaleX.to(p.x),
      p[key] === null || (this.isLog && p[key] <= 0) ? null : this.scaleY.to(p[key])]);
    const band = (opacity) => {
      const both = [...positions("high"), ...positions("low").reverse()].filter(([, y]) => y !== null);
      return both.length ? [fill(makePath(both), opacity)] : [];
    };
    if (this.data.stacked) return band(0.85);
    const thick = { "stroke-width": 1.9, "stroke-dasharray": dashes(line.series) };
    if (line.labels) return this.drawPoints(line, points, stroke, thick);
    if (this.data.measured || points.length < 3) {
      const dots = positions("y").filter(([, y]) => y !== null).map(([x, y]) => this.drawDot(x, y, line.series));
      return [...(line.low ? band(count > 3 ? 0.06 : 0.16) : []), stroke(positions("y"), thick), ...dots];
    }
    const size = Math.max(1, Math.floor(points.length / 20));
    const smooth = movingMean(points.map((p) => p.y), size);
    const smoothed = smooth.map((y, i) => [this.scaleX.to(points[i].x),
      y === null || (this.isLog && y <= 0) ? null : this.scaleY.to(y)]);
    const faint = size > 1 && count <= MOST_FAINT;
    return [...(faint ? [stroke(positions("y"), { "stroke-width": 0.9, opacity: 0.3 })] : []), stroke(smoothed, thick)];
  }

  /** Draw one dot per run, its interval, and the line through the means of equal places. */
  drawPoints(line, points, stroke, style) {
    const parts = [];
    const means = new Map();
    for (const p of points) means.set(p.x, [...(means.get(p.x) ?? []), p.y]);
    parts.push(stroke([...means].map(([x, ys]) => [this.scaleX.to(x), this.scaleY.to(mean(ys))]), { ...style, opacity: 0.5 }));
    for (const p of points) {
      const x = this.scaleX.to(p.x);
      if (p.low !== null) {
        const whisker = [[x, this.scaleY.to(p.low)], [x, this.scaleY.to(p.high)]];
        parts.push(stroke(whisker, { "stroke-width": 1.2, opacity: 0.6 }));
      }
      parts.push(this.drawDot(x, this.scaleY.to(p.y), line.series));
    }
    return parts;
  }

  drawDot(x, y, series) {
    const dot = svg("circle", { cx: x, cy: y, r: 3.2 });
    dot.style.fill = color(series);
    return dot;
  }

  /** Return the lines with their lower and upper bounds in the stack. */
  stack(drawn) {
    let base = [];
    return drawn.map(({ line, points }) => {
      const stacked = points.map((p, i) => ({ ...p, low: base[i] ?? 0, high: (base[i] ?? 0) + (p.y ?? 0) }));
      base = stacked.map((p) => p.high);
      return { line, points: stacked };
    });
  }
}

/** Draw the charts in sight now, and the others when they come into sight. */
const sight = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    const chart = charts[target.dataset.chart];
    chart.inSight = isIntersecting;
    if (isIntersecting && chart.dirty) chart.draw();
  }
}, { rootMargin: "300px" });

function redraw(chosen) {
  for (const chart of chosen) {
    chart.dirty = true;
    if (chart.inSight) chart.draw();
  }
}

/** Zoom all charts over an axis to a range; null: show everything. */
function zoomTo(axis, range) {
  if (range === null) zooms.delete(axis); else zooms.set(axis, range);
  redraw(charts.filter((chart) => chart.data.axis === axis));
}

/** Return a button that switches a line; with Shift or a double click, it is shown alone. */
function legendButton(key, series, name, keys) {
  const update = () => {
    for (const button of document.querySelectorAll(".legend button, #runs button")) {
      button.setAttribute("aria-pressed", String(!hiddenLines.has(button.dataset.key)));
    }
    redraw(charts.filter((chart) => chart.lines.some((line) => keys.includes(line.key))));
  };
  const toggle = () => {
    if (!hiddenLines.delete(key)) hiddenLines.add(key);
    update();
  };
  const alone = () => {
    const isAlone = keys.every((other) => hiddenLines.has(other) === (other !== key));
    for (const other of keys) if (isAlone || other === key) hiddenLines.delete(other); else hiddenLines.add(other);
    update();
  };
  const button = element("button", { type: "button", "aria-pressed": "true", title: "Click: show or hide. Double click or Shift: show this one alone.",
    ondblclick: () => { toggle(); alone(); }, onclick: (event) => {
      if (event.detail > 1) return; // the second click of a double click
      if (event.shiftKey) alone(); else toggle();
    } }, swatch(series), element("span", null, name));
  button.dataset.key = key;
  return button;
}

function startCharts() {
  if (comparing) {
    const keys = page.runs.map((_, number) => `run ${number}`);
    document.getElementById("runs")?.append(...page.runs.map((name, number) =>
      legendButton(keys[number], number, name, keys)));
  }
  for (const figure of document.querySelectorAll(".chart")) {
    const chart = new Chart(figure, page.charts[figure.dataset.chart], charts.length);
    charts.push(chart);
    chart.draw();
    sight.observe(figure);
  }
}

startCharts();
