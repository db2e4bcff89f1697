"use strict";

const gallery = JSON.parse(document.getElementById("data").textContent);

const SMALL = 256; // smaller images, in pixels, are enlarged without smoothing
const rewards = (entry) => entry.answers.map((a) => a.reward).filter((r) => r !== null);
const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;
const largest = (values) => (values.length ? Math.max(...values) : null);

/** Names of the sort orders by change, and of the change: over the steps, or between two runs. */
const CHANGES = gallery.comparing
  ? ["largest difference", "second run better", "second run worse", "difference"]
  : ["largest change", "largest improvement", "largest decline", "change"];

/** Sort keys in descending order; entries without a value come last. */
const SORTS = {
  [CHANGES[0]]: (e) => e.change === null ? null : Math.abs(e.change),
  [CHANGES[1]]: (e) => e.change,
  [CHANGES[2]]: (e) => e.change === null ? null : -e.change,
  "newest": (e) => e.step,
  "oldest": (e) => -e.step,
  "highest reward": (e) => rewards(e).length ? mean(rewards(e)) : null,
  "lowest reward": (e) => rewards(e).length ? -mean(rewards(e)) : null,
  "largest advantage": (e) => largest(
    e.answers.map((a) => a.advantage).filter((a) => a !== null).map(Math.abs)),
  "largest reward spread": (e) => e.spread,
};
const VIEWS = { "held-out": "held-out examples", training: "sampled groups" };

/** The current selection. */
const state = { kinds: new Set(), shown: [], index: 0, answer: null, layers: { gold: true, predicted: true } };

const form = document.getElementById("filters");
const field = (name) => form.elements.namedItem(name);

/** Return whether an answer matches the filters; an entry is shown if any of its answers does. */
function matches(answer, entry) {
  const step = field("step").value;
  const [min, max] = [field("min_reward").value, field("max_reward").value];
  const query = field("text").value.trim().toLowerCase();
  if (state.kinds.size && !state.kinds.has(answer.kind)) return false;
  if (step !== "" && answer.step !== Number(step)) return false;
  if (min !== "" && !(answer.reward !== null && answer.reward >= Number(min))) return false;
  if (max !== "" && !(answer.reward !== null && answer.reward <= Number(max))) return false;
  if (!query) return true;
  const texts = [entry.id, entry.question, entry.gold, ...answer.parts.map(([, text]) => text)];
  return texts.some((text) => text.toLowerCase().includes(query));
}

function refresh() {
  const view = field("view").value;
  const key = SORTS[field("sort").value];
  const rank = (entry) => key(entry) ?? -Infinity;
  state.shown = gallery.entries
    .filter((e) => (!view || e.view === view) && e.answers.some((a) => matches(a, e)))
    .map((entry) => [rank(entry), entry])
    .sort(([a], [b]) => (a === b ? 0 : b - a))
    .map(([, entry]) => entry);
  fillStrip();
  go(0);
}

function fillStrip() {
  const items = state.shown.map((entry, index) => {
    const uri = gallery.pictures[entry.pictures[0]];
    const picture = uri
      ? element("img", { src: uri, alt: "", decoding: "async" })
      : element("span", { class: "blank" }, entry.question.slice(0, 80));
    const dots = entry.answers.map((a) => element("i", { class: a.kind.replace(" ", "-"), title: a.kind }));
    const change = element("span", { class: entry.change > 0 ? "up" : entry.change < 0 ? "down" : "" },
      entry.change ? formatSigned(entry.change) : "");
    const label = `${entry.question.slice(0, 200)} (step ${entry.step})`;
    return element("li", null, element("button", {
      type: "button", title: label, "aria-label": label, onclick: () => go(index),
    }, picture, element("span", { class: "dots" }, ...dots),
    element("span", { class: "note" }, `step ${entry.step}`, change)));
  });
  document.getElementById("strip").replaceChildren(...items);
}

/** Show one of the entries. */
function go(index) {
  const count = state.shown.length;
  state.index = Math.max(0, Math.min(index, count - 1));
  state.answer = null;
  document.getElementById("position").textContent = count ? `${state.index + 1} of ${count}` : "none";
  document.getElementById("previous").disabled = state.index === 0;
  document.getElementById("next").disabled = state.index >= count - 1;
  const strip = document.getElementById("strip");
  strip.querySelector("[aria-current]")?.removeAttribute("aria-current");
  const button = strip.children[state.index]?.firstElementChild;
  if (button) {
    button.setAttribute("aria-current", "true");
    const [box, around] = [button.getBoundingClientRect(), strip.getBoundingClientRect()];
    strip.scrollBy(box.left - around.left - 8, box.top - around.top - 8); // does not scroll the page
  }
  showEntry();
}

function showEntry() {
  const container = document.getElementById("entry");
  const entry = state.shown[state.index];
  if (!entry) {
    container.replaceChildren(element("p", { class: "empty" }, "No entry matches these filters."));
    return;
  }
  const side = element("div", { class: "entry-side" }, ...pictures(entry), ...facts(entry));
  const answers = element("div", { class: "answers" }, ...entry.answers.map((a) => answerCard(a, entry)));
  container.replaceChildren(side, answers);
}

/** Return the images, the first with the task's drawings of the gold and the predicted answers. */
function pictures(entry) {
  const uris = entry.pictures.map((name) => gallery.pictures[name]);
  const parts = uris.filter(Boolean).map((uri, index) => {
    const small = Math.max(...(entry.sizes[index] ?? [SMALL])) < SMALL;
    const picture = element("div", { class: small ? "picture small" : "picture" },
      element("img", { src: uri, alt: `image ${index + 1}` }));
    if (index === 0) picture.append(element("div", { class: "marks" }, ...layers(entry)));
    return picture;
  });
  const toggle = (name, label) => element("label", { class: name },
    element("input", { type: "checkbox", checked: state.layers[name], onchange: (event) => {
      state.layers[name] = event.target.checked;
      redraw(entry);
    } }), element("i"), label);
  const toggles = [];
  if (entry.goldMarks) toggles.push(toggle("gold", "gold"));
  if (entry.answers.some((a) => a.marks)) toggles.push(toggle("predicted", "predicted"));
  if (toggles.length && parts.length) parts.push(element("div", { class: "layers" }, ...toggles));
  return parts;
}

function layers(entry) {
  const images = [];
  const add = (name, kind) => {
    const uri = gallery.pictures[name];
    if (uri) images.push(element("img", { src: uri, alt: "", class: kind }));
  };
  if (state.layers.predicted) {
    // Of the answers at successive evaluations, the last one is highlighted.
    const last = entry.view === "held-out" ? entry.answers.at(-1) : null;
    const first = state.answer ?? (last?.marks ? last : null);
    const rest = entry.answers.filter((a) => a.marks && a !== first);
    for (const answer of rest) add(answer.marks, first ? "soft" : "");
    if (first) add(first.marks, "");
  }
  if (state.layers.gold) add(entry.goldMarks, images.length ? "striped" : "");
  return images;
}

/** Update the drawings and highlight the selected answer. */
function redraw(entry) {
  document.querySelector(".marks")?.replaceChildren(...layers(entry));
  entry.answers.forEach((answer, index) => {
    const card = document.querySelector(".answers").children[index];
    card.classList.toggle("selected", answer === state.answer);
  });
}

function facts(entry) {
  const size = (pair) => `${pair[0]} × ${pair[1]}`;
  const rows = [
    ["gold", untrusted("dd", "gold-answer", entry.gold)],
    entry.change === null ? null : [CHANGES[3], element("dd", null, formatSigned(entry.change))],
    ["step", element("dd", null, String(entry.step))],
    entry.sizes.length ? ["image size", element("dd", null, entry.sizes.map(size).join(", "))] : null,
    entry.resizedSizes.length ? ["resized to", element("dd", null, entry.resizedSizes.map(size).join(", "))] : null,
    ["id", untrusted("dd", "", entry.id)],
  ].filter(Boolean);
  return [
    untrusted("p", "question", entry.question),
    element("dl", { class: "facts" }, ...rows.flatMap(([name, dd]) => [element("dt", null, name), dd])),
    ...(entry.prompt ? [element("details", { class: "prompt" },
      element("summary", null, "formatted prompt"), untrusted("div", "part", entry.prompt))] : []),
  ];
}

/** Create an element with text of a model or a dataset, isolated from the layout around it. */
function untrusted(tag, kind, text) {
  return element(tag, { class: `untrusted ${kind}`, dir: "auto" }, text);
}

function answerCard(answer, entry) {
  const run = gallery.comparing ? runNumber(answer.run) : "";
  const head = element("header", null,
    element("b", { class: run }, answer.label),
    element("span", { class: `badge ${answer.kind.replace(" ", "-")}` }, answer.kind),
    element("span", { class: "spacer" }),
    element("span", { class: "total" }, `reward ${formatNumber(answer.reward)}`),
    answer.advantage === null ? null : element("span",
      { class: answer.advantage > 0 ? "up" : answer.advantage < 0 ? "down" : "" },
      `advantage ${formatSigned(answer.advantage)}`),
    answer.stop === null ? null : element("span", null,
      `${answer.tokens ?? "?"} tokens, stop reason: ${answer.stop}`));
  const hasParts = answer.parts.some(([part]) => part !== "answer");
  const parts = answer.parts.flatMap(([part, text]) => [
    hasParts ? element("span", { class: "part-name" }, part) : null,
    untrusted("div", `part ${part === "answer" ? "answer-text" : part}`, text),
  ]);
  if (!answer.parts.length) parts.push(element("div", { class: "part thinking" }, "(empty)"));
  const parsed = answer.parsed === null ? null : element("span", null, `parsed as ${answer.parsed.slice(0, 120)}`);
  const failures = Object.entries(answer.failures).map(([name, message]) =>
    element("details", { class: "failure" }, element("summary", null, `${name} failed`),
      untrusted("div", "part", message)));
  const select = () => {
    state.answer = state.answer === answer ? null : answer;
    redraw(entry);
  };
  const card = element("section", { tabIndex: 0, onclick: select, onkeydown: (event) => {
    if (event.key === "Enter") select();
  } }, head, ...parts.filter(Boolean), element("div", { class: "rewards" },
    ...values(answer.rewards, "reward"), ...values(answer.metrics, "metric"), parsed), ...failures);
  card.className = matches(answer, entry) ? "answer" : "answer dim";
  return card;
}

function values(named, kind) {
  return Object.entries(named).map(([name, value]) => {
    const share = value === null ? 0 : Math.max(0, Math.min(1, value));
    const bar = element("i");
    bar.style.width = `${100 * share}%`;
    const shown = value === null ? (kind === "reward" ? "failed" : "–") : formatNumber(value);
    return element("span", { class: kind, title: kind }, name.replaceAll("_", " "),
      element("span", { class: "meter" }, bar), shown);
  });
}

function runNumber(run) {
  const names = [...new Set(gallery.entries.flatMap((e) => e.answers.map((a) => a.run)))];
  return `run-${names.indexOf(run)}`;
}

/** Fill the filters with the values that occur in the data. */
function fillFilters() {
  const present = (list) => [...new Set(list)];
  const answers = gallery.entries.flatMap((e) => e.answers);
  const sorts = Object.keys(SORTS).filter((name) => gallery.entries.some((e) => SORTS[name](e) !== null));
  field("sort").append(...sorts.map((name) => new Option(name, name)));
  const views = present(gallery.entries.map((e) => e.view));
  form.querySelector("[data-for=view]").hidden = views.length < 2;
  if (views.length > 1) field("view").append(new Option("everything", ""));
  field("view").append(...views.map((name) => new Option(VIEWS[name], name)));
  const steps = present(answers.map((a) => a.step)).sort((a, b) => a - b);
  field("step").append(new Option("all", ""), ...steps.map((step) => new Option(step, step)));
  const chips = gallery.kinds.map((kind) => {
    const count = answers.filter((a) => a.kind === kind).length;
    return element("button", { type: "button", class: "chip", "aria-pressed": "false", disabled: !count,
      onclick: (event) => {
        const on = !state.kinds.has(kind);
        if (on) state.kinds.add(kind); else state.kinds.delete(kind);
        event.currentTarget.setAttribute("aria-pressed", String(on));
        refresh();
      } }, `${kind} `, element("b", null, String(count)));
  });
  form.querySelector(".kinds").append(...chips);
}

function startGallery() {
  fillFilters();
  form.addEventListener("input", refresh);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => {
    state.kinds.clear();
    for (const chip of form.querySelectorAll(".chip")) chip.setAttribute("aria-pressed", "false");
    setTimeout(refresh); // the fields are reset only after this event
  });
  document.getElementById("previous").addEventListener("click", () => go(state.index - 1));
  document.getElementById("next").addEventListener("click", () => go(state.index + 1));
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches?.("input:not([type=checkbox]), select, textarea");
    if (typing || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "ArrowLeft") go(state.index - 1);
    else if (event.key === "ArrowRight") go(state.index + 1);
    else return;
    event.preventDefault();
  });
  refresh();
}

if (gallery.entries.length) startGallery();
