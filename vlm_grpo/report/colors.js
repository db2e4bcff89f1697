"use strict";

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
