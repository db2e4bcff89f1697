"use strict";

/** An element with properties, classes and children; text never becomes markup. */
function element(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A number as people read it. */
function shortNumber(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return String(Number(value.toPrecision(digits)));
}

function signed(value) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : value < 0 ? "−" : "±") + shortNumber(Math.abs(value), 2);
}

/** The chosen theme is kept where the browser lets a page from disk keep anything. */
const theme = {
  key: "vlm-grpo-theme",
  stored() {
    try { return localStorage.getItem(this.key); } catch { return null; }
  },
  set(name) {
    document.documentElement.dataset.theme = name;
    try { localStorage.setItem(this.key, name); } catch { /* not kept, then */ }
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
