"use strict";

const DRAWN_POINTS = 420; // more points than this are averaged before drawing

/** Return a linear or logarithmic scale from values to positions. */
function makeScale([low, high], start, end, logarithmic) {
  const map = logarithmic ? Math.log10 : (value) => value;
  const [a, b] = [map(low), map(high)];
  return {
    to: (value) => start + ((map(value) - a) / (b - a || 1)) * (end - start),
    from: (position) => {
      const value = a + ((position - start) / (end - start)) * (b - a);
      return logarithmic ? 10 ** value : value;
    },
  };
}

/** Return about `count` round numbers between two values. */
function makeTicks([low, high], count, { logarithmic = false, integer = false } = {}) {
  if (logarithmic) {
    const ticks = (factors) => {
      const powers = [];
      for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++) powers.push(Number(`1e${e}`));
      return powers.flatMap((p) => factors.map((f) => f * p)).filter((v) => v >= low && v <= high);
    };
    const found = [[1], [1, 3], [1, 2, 5]].map(ticks).find((list) => list.length > 2) ?? [];
    const every = Math.ceil(found.length / (count + 1));
    if (found.length) return found.filter((_, index) => index % every === 0);
  }
  const raw = Math.max((high - low) / count, integer ? 1 : 1e-300);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power)
    .find((s) => s >= raw * 0.999 && (!integer || Number.isInteger(s))) ?? 10 * power;
  const first = Math.ceil(low / step - 1e-9);
  const length = Math.max(0, Math.floor(high / step + 1e-9) - first + 1);
  return Array.from({ length }, (_, index) => (first + index) * step);
}

/** Format a tick with three significant digits; small and large numbers have an exponent. */
function formatTick(value, span) {
  if (Math.abs(value) < 1e-9 * span) return "0";
  const short = Number(value.toPrecision(3));
  const plain = Math.abs(short) >= 1e-3 && Math.abs(short) < 1e5;
  return plain ? String(short) : short.toExponential().replace("+", "");
}

/** Return the centered mean over `size` values, or fewer at the ends and around missing ones. */
function movingMean(values, size) {
  const half = Math.floor(size / 2);
  return values.map((_, index) => {
    const known = values.slice(Math.max(0, index - half), index + half + 1).filter((v) => v !== null);
    return known.length ? mean(known) : null;
  });
}

/** Return points with the values of `keys`, averaged in parts if there are too many to see. */
function averaged(points, keys) {
  const size = Math.ceil(points.length / DRAWN_POINTS);
  if (size <= 1) return points;
  const parts = [];
  for (let i = 0; i < points.length; i += size) parts.push(points.slice(i, i + size));
  return parts.map((part) => Object.fromEntries(keys.map((key) => {
    const known = part.map((point) => point[key]).filter((v) => v !== null);
    return [key, known.length ? mean(known) : null];
  })));
}

/** Return the path through the positions, with gaps where one is null. */
function makePath(positions) {
  let pen = "M";
  return positions.map(([x, y]) => {
    if (y === null || !Number.isFinite(y)) { pen = "M"; return ""; }
    const part = `${pen}${x.toFixed(1)} ${y.toFixed(1)}${pen === "M" ? "h.01" : ""}`; // a lone point is a dot
    pen = "L";
    return part;
  }).join("");
}
