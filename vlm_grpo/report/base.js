"use strict";

/** The data of the page: charts, entries, pictures, runs and their comparisons. */
const page = JSON.parse(document.getElementById("data").textContent);
const comparing = page.runs.length > 0;

/** Create an element with properties, event listeners and children; text is never parsed as HTML. */
function element(tag, properties, ...children) {
  const created = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (name === "class") created.className = value;
    else if (name.startsWith("on")) created.addEventListener(name.slice(2), value);
    else if (name in created) created[name] = value;
    else created.setAttribute(name, value);
  }
  created.append(...children.filter((child) => child !== null && child !== undefined));
  return created;
}

/** Create an SVG element with attributes and children. */
function svg(tag, attributes, ...children) {
  const created = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes ?? {})) created.setAttribute(name, value);
  created.append(...children);
  return created;
}

const COLORS = 10;
const DASHES = ["none", "7 3", "2 2.5", "9 3 2 3"];

/** The look of a series: ten colors, of which the first five are solid and the others dashed. */
const color = (series) => `var(--series-${series % COLORS})`;
const dashes = (series) => DASHES[Math.floor(series / 5) % DASHES.length];

/** Return a short sample of a series' line. */
function swatch(series) {
  const line = svg("line", { x1: 1, x2: 25, y1: 5, y2: 5, "stroke-width": 3, "stroke-dasharray": dashes(series) });
  line.style.stroke = color(series);
  return svg("svg", { viewBox: "0 0 26 10", class: "swatch", "aria-hidden": "true" }, line);
}

const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;

/** Format a number with few significant digits. */
function formatNumber(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return String(Number(value.toPrecision(digits)));
}

function formatSigned(value) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : value < 0 ? "−" : "±") + formatNumber(Math.abs(value), 2);
}

/** The color theme: the stored choice, or else the browser's preference. */
const theme = {
  key: "vlm-grpo-theme",
  stored() {
    try { return localStorage.getItem(this.key); } catch { return null; }
  },
  set(name) {
    document.documentElement.dataset.theme = name;
    try { localStorage.setItem(this.key, name); } catch { /* pages from disk may have no storage */ }
  },
  start() {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const preferred = () => (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = this.stored() ?? preferred();
    dark.addEventListener("change", () => {
      if (!this.stored()) document.documentElement.dataset.theme = preferred();
    });
    document.getElementById("theme").addEventListener("click", () => {
      this.set(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    });
  },
};
theme.start();
