"use strict";

const FLIPS_AT_ONCE = 12;
const entryById = new Map(page.entries.filter((e) => e.view === "held-out").map((e) => [e.id, e]));

function formatP(p) {
  return p < 0.001 ? "< 0.001" : p.toFixed(3);
}

function formatMetric(value, test, signed = false) {
  const number = test.share ? 100 * value : value;
  const text = test.share ? Math.abs(number).toFixed(1) : formatNumber(Math.abs(number));
  const sign = number < 0 ? "−" : signed && number > 0 ? "+" : "";
  return `${sign}${text}${test.share ? (signed ? " points" : " %") : ""}`;
}

/** Return "better" or "worse" if the interval of the difference does not contain 0, else "". */
function verdict(test) {
  const [low, high] = test.interval;
  if (low <= 0 && high >= 0) return "";
  return (low > 0) !== test.lowerIsBetter ? "better" : "worse";
}

/** Fill the section that compares two runs, which its two menus choose. */
function startPairs() {
  const section = document.getElementById("pairs");
  const menus = ["a", "b"].map((name) => section.querySelector(`select[name=${name}]`));
  const taking = [...new Set(page.pairs.flatMap((pair) => [pair.a, pair.b]))];
  for (const menu of menus) menu.append(...taking.map((run) => new Option(page.runs[run], run)));
  [menus[0].value, menus[1].value] = [taking[0], taking.at(-1)];
  const show = () => showPair(...menus.map((menu) => Number(menu.value)));
  section.addEventListener("change", show);
  section.querySelector("button").addEventListener("click", () => {
    [menus[0].value, menus[1].value] = [menus[1].value, menus[0].value];
    show();
  });
  show();
}

/** Return the comparison of run B with run A; stored is one direction only. */
function findPair(a, b) {
  const pair = page.pairs.find((p) => (p.a === a && p.b === b) || (p.a === b && p.b === a));
  if (!pair || pair.a === a) return pair;
  return {
    ...pair, a, b, steps: [...pair.steps].reverse(), onlyA: pair.onlyB, onlyB: pair.onlyA,
    better: pair.worse, worse: pair.better,
    tests: pair.tests.map((t) => ({ ...t, a: t.b, b: t.a, higher: t.lower, lower: t.higher,
      interval: [-t.interval[1], -t.interval[0]] })),
    flips: pair.flips.map((f) => ({ ...f, a: f.b, b: f.a, better: !f.better,
      outputs: [...f.outputs].reverse() })),
  };
}

function showPair(a, b) {
  const place = document.getElementById("pair");
  const pair = findPair(a, b);
  if (!pair) {
    place.replaceChildren(element("p", { class: "empty-note" }, "Choose two different runs."));
    return;
  }
  place.replaceChildren(describeMatch(pair), ...(pair.tests.length ? [tableOf(pair), explain(pair), ...flipLists(pair)] : []));
  setChanges(pair);
}

/** Say on which examples the two runs are compared, and which are left out. */
function describeMatch(pair) {
  const [a, b] = [page.runs[pair.a], page.runs[pair.b]];
  const count = (n) => `${n} example${n === 1 ? "" : "s"}`;
  const parts = [`${count(pair.n)} in common, matched by id, at steps ${pair.steps[0]} (A) and ${pair.steps[1]} (B).`];
  if (pair.onlyA) parts.push(`${count(pair.onlyA)} only in ${a}: left out.`);
  if (pair.onlyB) parts.push(`${count(pair.onlyB)} only in ${b}: left out.`);
  if (pair.changed) parts.push(`${pair.changed} ids stand for another question or gold answer in the other run: left out.`);
  if (!pair.tests.length) parts.push("There is nothing to test: no example has a value of the same metric in both runs.");
  else if (pair.tests[0].name !== pair.primary) {
    parts.push(`${pair.primary} is not a mean over examples in both runs and cannot be paired.`);
  }
  const uneven = pair.onlyA || pair.onlyB || pair.changed || !pair.tests.length;
  return element("p", { class: uneven ? "match uneven" : "match" }, parts.join(" "));
}

function tableOf(pair) {
  const many = page.pairs.length > 1;
  const head = ["metric", "n", "A", "B", "B − A", "95 % interval", "B better", "B worse", "test", "p",
    ...(many ? [`p, ${page.pairs.length} pairs`] : [])];
  const rows = pair.tests.map((test) => {
    const [better, worse] = test.lowerIsBetter ? [test.lower, test.higher] : [test.higher, test.lower];
    const kind = verdict(test);
    const difference = element("td", { class: kind }, formatMetric(test.b - test.a, test, true));
    const interval = test.interval.map((v) => formatMetric(v, test, true)).join(" to ");
    const adjusted = test === pair.tests[0] ? formatP(test.adjusted) : "";
    const cells = [test.n, formatMetric(test.a, test), formatMetric(test.b, test), difference, interval, better, worse,
      test.test, formatP(test.p_value), ...(many ? [adjusted] : [])];
    return element("tr", null, element("th", { scope: "row" }, test.name.replaceAll("_", " ")),
      ...cells.map((cell) => cell instanceof Element ? cell : element("td", null, String(cell))));
  });
  return element("div", { class: "scroll" }, element("table", { class: "numbers" },
    element("thead", null, element("tr", null, ...head.map((name) => element("th", null, name)))),
    element("tbody", null, ...rows)));
}

function explain(pair) {
  const tests = new Set(pair.tests.map((test) => test.test));
  const parts = [];
  if (tests.has("McNemar")) parts.push("McNemar: exact test of the examples on which exactly one run is right.");
  if (tests.has("sign flips")) parts.push("Sign flips: permutation test of the mean difference, exact or with 10,000 permutations.");
  parts.push("Intervals: bootstrap of the paired differences.");
  if (page.pairs.length > 1) parts.push("The last column is adjusted for the number of pairs by Holm's method.");
  return element("p", { class: "detail" }, parts.join(" "));
}

/** Return the two lists of examples whose value differs. */
function flipLists(pair) {
  const binary = pair.tests[0].test === "McNemar";
  const name = pair.tests[0].name.replaceAll("_", " ");
  const title = (better) => binary ? (better ? "wrong → right" : "right → wrong") : `${name}: B ${better ? "better" : "worse"}`;
  const list = (better) => {
    const flips = pair.flips.filter((flip) => flip.better === better);
    const total = better ? pair.better : pair.worse;
    const cards = element("div", { class: "flips" });
    const more = element("button", { type: "button", class: "quiet", onclick: () => add() });
    const add = () => {
      const next = flips.slice(cards.children.length, cards.children.length + FLIPS_AT_ONCE);
      cards.append(...next.map((flip) => flipCard(flip, pair)));
      const left = flips.length - cards.children.length;
      more.hidden = left <= 0;
      more.textContent = `${left} more`;
    };
    add();
    const cut = total > flips.length ? element("p", { class: "detail" },
      `The first ${flips.length} of ${total}, the largest differences first; the runs' evaluation folders have all.`) : null;
    return element("div", { class: better ? "flip-list better" : "flip-list worse" },
      element("h3", null, title(better), " ", element("span", { class: "count" }, String(total))),
      total ? null : element("p", { class: "empty-note" }, "None."), cards, more, cut);
  };
  return [element("div", { class: "flip-lists" }, list(false), list(true))];
}

/** Return the card of an example, with both answers drawn and written. */
function flipCard(flip, pair) {
  const entry = entryById.get(flip.id);
  const side = (run, value, index) => {
    const answer = entry?.answers.filter((a) => a.run === page.runs[run]).at(-1);
    const name = element("b", null, `${"AB"[index]} · ${page.runs[run]}`);
    name.style.color = color(run);
    const better = (index === 1) === flip.better;
    return element("div", { class: "flip-side" },
      element("header", null, name, element("span", { class: better ? "up" : "down" }, formatNumber(value))),
      entry ? drawAnswer(entry, answer) : null,
      untrusted("div", "part answer-text", flip.outputs[index] || "(empty)"));
  };
  return element("article", { class: "flip" },
    untrusted("p", "flip-question", entry ? entry.question : flip.id),
    entry ? untrusted("p", "gold-answer", entry.gold)
      : element("p", { class: "detail" }, "Without a picture: samples hold the first held-out examples only."),
    element("div", { class: "flip-sides" }, side(pair.a, flip.a, 0), side(pair.b, flip.b, 1)));
}

/** Sort and color the gallery by the change from run A to run B. */
function setChanges(pair) {
  const score = (entry, run) => entry.answers.filter((a) => a.run === page.runs[run]).at(-1)?.score ?? null;
  for (const entry of page.entries) {
    const [a, b] = [score(entry, pair.a), score(entry, pair.b)];
    entry.change = a === null || b === null ? null : b - a;
  }
  if (page.entries.length) refresh();
}

if (page.entries.length) startGallery();
if (page.pairs.length) startPairs();
