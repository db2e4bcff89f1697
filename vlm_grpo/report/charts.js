"use strict";

/** Show the step under the pointer, and the value of every line at it. */
for (const figure of document.querySelectorAll(".chart")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  const readout = figure.querySelector(".readout");
  const cursor = element("div", { class: "cursor", hidden: true });
  plot.append(cursor);
  const xs = [...new Set(data.lines.flatMap((line) => line.x))];
  const [left, right] = data.span;
  const [first, last] = data.steps;

  const format = (value) => {
    if (value === null || value === undefined) return "–";
    return data.share ? `${formatNumber(100 * value)} %` : formatNumber(value);
  };
  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const fraction = ((event.clientX - box.left) / box.width - left) / (right - left);
    const target = first + fraction * (last - first);
    const nearest = xs.reduce((a, b) => (Math.abs(b - target) < Math.abs(a - target) ? b : a));
    const values = data.lines.map((line) => {
      const value = format(line.y[line.x.indexOf(nearest)]);
      return data.lines.length > 1 ? `${line.name} ${value}` : value;
    });
    readout.textContent = `step ${formatNumber(nearest, 6)}: ${values.join(" · ")}`;
    const position = left + ((nearest - first) / (last - first)) * (right - left);
    cursor.style.left = `${100 * position}%`;
    cursor.hidden = readout.hidden = false;
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => { cursor.hidden = readout.hidden = true; });
}
