"use strict";

const SMALL = 256; // smaller images, in pixels, are enlarged without smoothing
const rewards = (entry) => entry.answers.map((a) => a.reward).filter((r) => r !== null);
const largest = (values) => (values.length ? Math.max(...values) : null);

/** Names of the sort orders by change, and of the change: over the steps, or between two runs. */
const CHANGES = comparing
  ? ["largest difference", "B better", "B worse", "B − A"]
  : ["largest change", "largest improvement", "largest decline", "change"];

/** Sort keys in descending order; entries without a value come last. */
const SORTS = {
  [CHANGES[0]]: (e) => e.change === null ? null : Math.abs(e.change),
  [CHANGES[1]]: (e) => e.change,
  [CHANGES[2]]: (e) => e.change === null ? null : -e.change,
  "newest": (e) => e.step,
  "oldest": (e) => -e.step,
  "largest reward spread": (e) => e.spread,
  "highest reward": (e) => rewards(e).length ? mean(rewards(e)) : null,
  "lowest reward": (e) => rewards(e).length ? -mean(rewards(e)) : null,
  "largest advantage": (e) => largest(
    e.answers.map((a) => a.advantage).filter((a) => a !== null).map(Math.abs)),
};
/** Filters of groups: with equal rewards, no completion has an advantage. */
const SIGNALS = {
  "": () => true, "rewards differ": (e) => e.spread > 0, "rewards equal": (e) => e.spread === 0,
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
  const texts = [entry.id, entry.question, entry.gold, ...answer.parts.map(([, text]) => text),
    ...answer.turns.flatMap((turn) => [turn.read ?? "", ...turn.parts.map(([, text]) => text)])];
  return texts.some((text) => text.toLowerCase().includes(query));
}

function refresh() {
  const view = field("view").value;
  const key = SORTS[field("sort").value];
  const rank = (entry) => key(entry) ?? -Infinity;
  const signal = SIGNALS[field("signal").value];
  state.shown = page.entries
    .filter((e) => (!view || e.view === view) && signal(e) && e.answers.some((a) => matches(a, e)))
    .map((entry) => [rank(entry), entry])
    .sort(([a], [b]) => (a === b ? 0 : b - a))
    .map(([, entry]) => entry);
  fillStrip();
  go(0);
}

function fillStrip() {
  const items = state.shown.map((entry, index) => {
    const uri = page.pictures[entry.pictures[entry.marked]];
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
  const isGroup = entry.view === "training";
  container.classList.toggle("group", isGroup);
  const side = element("div", { class: "entry-side" },
    element("div", null, ...pictures(entry)), element("div", null, ...facts(entry)));
  const answers = element("div", { class: "answers" }, ...entry.answers.map((a) => answerCard(a, entry)));
  container.replaceChildren(side, answers);
}

/** Return the images, one of them with the task's drawings of the gold and the predicted answers. */
function pictures(entry) {
  const parts = entry.pictures.map((_, index) =>
    makePicture(entry, index, index === entry.marked ? layers(entry) : null)).filter(Boolean);
  const toggle = (name, label) => element("label", { class: name },
    element("input", { type: "checkbox", checked: state.layers[name] ?? true, onchange: (event) => {
      state.layers[name] = event.target.checked;
      redrawMarks(entry);
    } }), element("i"), label);
  const toggles = [];
  if (entry.goldMarks) toggles.push(toggle("gold", "gold"));
  if (entry.answers.some((a) => a.marks)) toggles.push(toggle("predicted", "predicted"));
  for (const name of Object.keys(entry.layers)) {
    if (entry.layers[name]) toggles.push(toggle(name, name.replaceAll("_", " ")));
  }
  if (toggles.length && parts.length) parts.push(element("div", { class: "layers" }, ...toggles));
  return parts;
}

/** Return an image with drawings over it, which a click enlarges; null if it is not in the page. */
function makePicture(entry, index, marks) {
  const uri = page.pictures[entry.pictures[index]];
  if (!uri) return null;
  const size = entry.sizes[index] ?? [SMALL, SMALL];
  const picture = element("div", { class: Math.max(...size) < SMALL ? "picture small" : "picture",
    tabIndex: 0, role: "button", "aria-label": `Enlarge image ${index + 1}`,
    onclick: (event) => { event.stopPropagation(); enlarge(picture, size); },
    onkeydown: (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopPropagation();
      enlarge(picture, size);
    } }, element("img", { src: uri, alt: `image ${index + 1}` }));
  if (marks) picture.append(element("div", { class: "marks" }, ...marks));
  return picture;
}

/** Return the image of an entry that is drawn on, with one answer and the gold answer drawn on it. */
function drawAnswer(entry, answer) {
  const marks = [markImage(answer?.marks, ""), markImage(entry.goldMarks, answer?.marks ? "striped" : "")];
  return makePicture(entry, entry.marked, marks.filter(Boolean));
}

function markImage(name, kind) {
  const uri = page.pictures[name];
  return uri ? element("img", { src: uri, alt: "", class: kind }) : null;
}

/** Show a picture as large as the window allows; Escape or a click closes it. */
function enlarge(picture, [width, height]) {
  const copy = picture.cloneNode(true);
  copy.removeAttribute("tabindex");
  copy.removeAttribute("role");
  copy.style.width = `min(94vw, ${(88 * width) / height}vh)`;
  const dialog = element("dialog", { class: "lightbox", "aria-label": "Enlarged image",
    onclick: () => dialog.close(), onclose: () => dialog.remove() },
  element("button", { type: "button", class: "quiet", "aria-label": "Close" }, "×"), copy);
  document.body.append(dialog);
  dialog.showModal();
}

function layers(entry) {
  const images = [];
  const add = (name, kind) => images.push(...[markImage(name, kind)].filter(Boolean));
  for (const [name, file] of Object.entries(entry.layers)) {
    if (state.layers[name] ?? true) add(file, "layer");
  }
  if (state.layers.predicted) {
    // Of the answers at successive evaluations, the last one is highlighted.
    const last = entry.view === "held-out" ? entry.answers.at(-1) : null;
    const first = state.answer ?? (last?.marks ? last : null);
    const rest = entry.answers.filter((a) => a.marks && a !== first);
    for (const answer of rest) add(answer.marks, first ? "soft" : "");
    if (first) add(first.marks, "");
  }
  if (state.layers.gold) add(entry.goldMarks, images.some((image) => image.className !== "layer") ? "striped" : "");
  return images;
}

/** Update the drawings and highlight the selected answer. */
function redrawMarks(entry) {
  document.querySelector(".entry-side .marks")?.replaceChildren(...layers(entry));
  entry.answers.forEach((answer, index) => {
    const card = document.querySelector("#entry .answers").children[index];
    card.classList.toggle("selected", answer === state.answer);
  });
}

function facts(entry) {
  const size = (pair) => `${pair[0]} × ${pair[1]}`;
  const rows = [
    ["gold", untrusted("dd", "gold-answer", entry.gold)],
    entry.change === null ? null : [CHANGES[3], element("dd", null, formatSigned(entry.change))],
    ["step", element("dd", null, String(entry.step))],
    entry.view === "training" ? ["rewards", element("dd", null, describeGroup(entry))] : null,
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

/** Describe the rewards of a group, from which its advantages are computed. */
function describeGroup(entry) {
  const known = rewards(entry);
  if (!known.length) return "none could be scored";
  const average = mean(known);
  const deviation = Math.sqrt(known.reduce((sum, r) => sum + (r - average) ** 2, 0) / Math.max(1, known.length - 1));
  const range = `mean ${formatNumber(average)}, deviation ${formatNumber(deviation)}, from ${
    formatNumber(Math.min(...known))} to ${formatNumber(Math.max(...known))}`;
  return entry.spread === 0 ? `${range}: all equal, no learning signal` : range;
}

/** Create an element with text of a model or a dataset, isolated from the layout around it. */
function untrusted(tag, kind, text) {
  return element(tag, { class: `untrusted ${kind}`, dir: "auto" }, text);
}

function answerCard(answer, entry) {
  const name = element("b", null, answer.label);
  if (comparing) name.style.color = color(page.runs.indexOf(answer.run));
  const head = element("header", null, name,
    element("span", { class: `badge ${answer.kind.replace(" ", "-")}` }, answer.kind),
    element("span", { class: "spacer" }),
    element("span", { class: "total" }, `reward ${formatNumber(answer.reward)}`),
    answer.advantage === null ? null : advantageBar(answer.advantage, entry),
    answer.stop === null ? null : element("span", null, `${answer.tokens ?? "?"} tokens, `,
      answer.stop === "length" ? element("b", { class: "cut" }, "truncated") : `stop reason: ${answer.stop}`));
  const parts = [...answer.turns.flatMap((turn, index) => turnParts(turn, index, entry)),
    ...(answer.turns.at(-1)?.read === null || !answer.turns.length ? textParts(answer.parts) : [])];
  if (!answer.parts.length) parts.push(element("div", { class: "part thinking" }, "(empty)"));
  const parsed = answer.parsed === null ? null : element("span", null, `parsed as ${answer.parsed.slice(0, 120)}`);
  const failures = Object.entries(answer.failures).map(([name, message]) =>
    element("details", { class: "failure" }, element("summary", null, `${name} failed`),
      untrusted("div", "part", message)));
  const select = () => {
    state.answer = state.answer === answer ? null : answer;
    redrawMarks(entry);
  };
  const isGroup = entry.view === "training";
  const picture = isGroup && answer.marks ? drawAnswer(entry, answer) : null;
  const card = element("section", { tabIndex: 0, onclick: select, onkeydown: (event) => {
    if (event.key === "Enter") select();
  } }, head, picture, ...parts.filter(Boolean), element("div", { class: "rewards" },
    ...values(answer.rewards, "reward"), ...values(answer.metrics, "metric"), parsed), ...failures);
  card.className = matches(answer, entry) ? "answer" : "answer dim";
  return card;
}

/** Return the parts of a text, with their names if there are several kinds. */
function textParts(parts) {
  const isNamed = parts.some(([part]) => part !== "answer");
  return parts.flatMap(([part, text]) => [
    isNamed ? element("span", { class: "part-name" }, part) : null,
    untrusted("div", `part ${part === "answer" ? "answer-text" : part}`, text),
  ]);
}

/** Return a turn of an episode: its text, its call drawn on the source, and what was read next. */
function turnParts(turn, index, entry) {
  if (turn.read === null) return []; // the answer
  const marks = [markImage(turn.boxes, "")].filter(Boolean);
  const seen = turn.pictures.map((_, number) => makePicture(turn, number, null));
  const images = [marks.length ? makePicture(entry, 0, marks) : null, ...seen].filter(Boolean);
  return [
    element("span", { class: "part-name" }, `turn ${index + 1}`),
    ...turn.parts.map(([part, text]) => untrusted("div", `part ${part === "thinking" ? part : "text"}`, text)),
    element("div", { class: turn.isError ? "read error" : "read" },
      element("span", { class: "part-name" }, turn.isError ? "read (an error)" : "read"),
      untrusted("div", "part", turn.read.replaceAll("<image>", "").trim()),
      images.length ? element("div", { class: "seen" }, ...images) : null),
  ];
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

/** Return the advantage, with a bar that is longest for the largest one of the group. */
function advantageBar(advantage, entry) {
  const most = largest(entry.answers.map((a) => Math.abs(a.advantage ?? 0))) || 1;
  const bar = element("i", { class: advantage < 0 ? "negative" : "" });
  bar.style.width = `${(50 * Math.abs(advantage)) / most}%`;
  return element("span", { class: `advantage ${advantage > 0 ? "up" : advantage < 0 ? "down" : ""}` },
    `advantage ${formatSigned(advantage)}`, element("span", { class: "balance" }, bar));
}

/** Fill the filters with the values that occur in the data. */
function fillFilters() {
  const present = (list) => [...new Set(list)];
  const answers = page.entries.flatMap((e) => e.answers);
  const sorts = Object.keys(SORTS).filter((name) => page.entries.some((e) => SORTS[name](e) !== null));
  field("sort").append(...sorts.map((name) => new Option(name, name)));
  const views = present(page.entries.map((e) => e.view));
  form.querySelector("[data-for=view]").hidden = views.length < 2;
  if (views.length > 1) field("view").append(new Option("everything", ""));
  field("view").append(...views.map((name) => new Option(VIEWS[name], name)));
  field("signal").append(...Object.keys(SIGNALS).map((name) => new Option(name || "all", name)));
  form.querySelector("[data-for=signal]").hidden = !views.includes("training");
  const steps = present(answers.map((a) => a.step)).sort((a, b) => a - b);
  field("step").append(new Option("all", ""), ...steps.map((step) => new Option(step, step)));
  const chips = page.kinds.map((kind) => {
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
