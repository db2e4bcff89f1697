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
