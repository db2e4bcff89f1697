"use strict";

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
