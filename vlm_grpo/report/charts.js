"use strict";

/** Under the pointer: the step, and every line's value there. */
for (const figure of document.querySelectorAll(".chart")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  const readout = figure.querySelector(".readout");
  const cursor = element("div", { class: "cursor", hidden: true });
  plot.append(cursor);
  const xs = [...new Set(data.lines.flatMap((line) => line.x))];
  const [left, right] = data.span;
  const [first, last] = data.steps;

  const written = (value) => {
    if (value === null || value === undefined) return "–";
    return data.share ? `${shortNumber(100 * value)} %` : shortNumber(value);
  };
  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width - left) / (right - left);
    const wanted = first + share * (last - first);
    const near = xs.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
    const values = data.lines.map((line) => {
      const value = written(line.y[line.x.indexOf(near)]);
      return data.lines.length > 1 ? `${line.name} ${value}` : value;
    });
    readout.textContent = `step ${shortNumber(near, 6)}: ${values.join(" · ")}`;
    const place = left + ((near - first) / (last - first)) * (right - left);
    cursor.style.left = `${100 * place}%`;
    cursor.hidden = readout.hidden = false;
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => { cursor.hidden = readout.hidden = true; });
}
