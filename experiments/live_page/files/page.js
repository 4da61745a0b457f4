// The page: what is asked, what is shown, and the link that restores both.

import { ask, follow, Latest, Refused } from "/asking.js";
import { brief } from "/brief.js";
import { card, download, el, fold } from "/parts.js";
import { check, list, mark, optional, powers, slider } from "/fields.js";
import { compareCard, gainsCard, goesCard, memoryCard, paretoCard, planCard, refusedCard, searchCard, timeCard, timelineCard } from "/results.js";
import { LOAD, served, servingForm, stopPlaying } from "/serving.js";

const TABS = { train: "Training", adapt: "Fine-tuning", serve: "Serving" };
const PROBLEM = {
  model: "llama3-8b", hardware: "h100-80gb", nodes: 1, gpus_per_node: 8, sequence_length: 4096,
  global_batch: 64, attention: "flash", precision: "bf16",
};
// What is fine-tuned, in the space of sharded data parallelism.
const ADAPTED = {
  model: "llama3-8b", hardware: "rtx-4090-24gb", nodes: 1, gpus_per_node: 1, sequence_length: 2048,
  global_batch: 8, attention: "flash", precision: "bf16", space: "fsdp", train: "adapters",
};
const ADAPTER = ["adapter_rank", "base"];
// So long nothing may change before a search begins.
const QUIET_MS = 600;

const $ = (id) => document.getElementById(id);
const form = $("form"), results = $("results");
const latest = new Latest(), searching = new Latest(), extra = new Latest();

const state = {
  tab: "train", problem: { ...PROBLEM }, plan: null, knobs: {}, load: { ...LOAD },
  money: { price: null, tokens: null }, auto: true, seconds: 20,
  figures: null, choices: null, search: null, stage: null, pinned: null, comparison: null,
  gains: null, pareto: null, timeline: null, pasted: {}, exported: null,
  // What is told of a wrong value, what was refused (nothing is shown then), and the last answer.
  error: null, refused: null, answered: null,
  // The questions of tabs that are not shown.
  kept: { adapt: { problem: ADAPTED, plan: null, knobs: {} } },
};
let names = null, timer = null, choicesAsked = 0;

// The link: everything that was asked, and the plan.

const coded = (text) => btoa(String.fromCharCode(...new TextEncoder().encode(text)))
  .replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
const decoded = (text) => new TextDecoder().decode(
  Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0)));

function link() {
  const { tab, problem, plan, knobs, load, money } = state;
  return `#${coded(JSON.stringify({ v: 1, tab, problem, plan, knobs, load, money }))}`;
}

function restore() {
  if (location.hash.length < 2) return false;
  try {
    const kept = JSON.parse(decoded(location.hash.slice(1)));
    for (const name of ["tab", "problem", "plan", "knobs", "load", "money"]) {
      if (kept[name] !== undefined) state[name] = kept[name];
    }
    if (!(state.tab in TABS)) state.tab = "train";
    if (state.tab === "adapt") state.kept = { train: { problem: { ...PROBLEM }, plan: null, knobs: {} } };
    return true;
  } catch {
    tell(new Refused("the link is damaged: copy it again"));
    return false;
  }
}

const keep = () => history.replaceState(null, "", link());

// Words for people.

function tell(error, field) {
  const place = $("problem");
  place.hidden = !error;
  place.textContent = error ? error.message : "";
  state.error = error && { message: error.message, field: field || error.field };
  mark(form, state.error);
  tellBrief(error && error.message);
}
function tellBrief(error) {
  const words = brief(state, error).filter(Boolean);
  $("brief").hidden = !words.length;
  $("brief-words").replaceChildren(...words);
}
const say = (words) => { $("status").textContent = words; };

const verdict = () => (state.search && state.search.verdict) || "";

// The answer; null where a newer question ended it, undefined where it was refused.
async function trying(work, field) {
  try {
    const answer = await work();
    if (answer !== null) tell(null);
    return answer;
  } catch (error) {
    if (error instanceof Refused) tell(error, field);
    else throw error;
    return undefined;
  }
}

// An answer to another question must not stand beside the error: it is put aside.
function refuse(what) {
  const isInside = results.contains(document.activeElement);
  searching.stop();
  clearTimeout(timer);
  state.refused = what;
  say(`${what} was refused`);
  show();
  if (isInside) results.querySelector("button")?.focus();
}

const ANSWER = ["problem", "plan", "knobs", "figures", "choices", "search", "comparison", "gains", "pareto", "timeline", "exported"];
function remember() {
  state.refused = null;
  state.answered = Object.fromEntries(ANSWER.map((name) => [name, state[name]]));
  state.answered.problem = { ...state.problem };
  state.answered.knobs = { ...state.knobs };
}
function back() {
  Object.assign(state, state.answered, { refused: null });
  remember();
  tell(null);
  say(verdict());
  makeForm();
  show();
  keep();
}

// Questions about training.

async function predictNow() {
  // Choices beside the plan before would draw this one before its figures are here.
  choicesAsked += 1;
  const body = { problem: state.problem, plan: state.plan, knobs: state.knobs };
  const began = performance.now();
  const figures = await trying(() => latest.run((signal) => ask("predict", body, signal)));
  if (figures === undefined) refuse("The question");
  if (!figures) return;
  state.figures = figures;
  results.dataset.answered = String(performance.now() - began);
  stale();
  remember();
  show();
  keep();
  void offerChoices();
  void compareNow();
}

function stale() {
  state.gains = state.timeline = state.exported = null;
}

async function offerChoices() {
  const own = (choicesAsked += 1);
  const job = state.figures.job;
  try {
    const answer = await ask("choices", { problem: state.problem, plan: job });
    if (own !== choicesAsked) return;
    state.choices = answer.choices;
    show("plan");
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
  }
}

function problemChanged() {
  searching.stop();
  state.search = null;
  void predictNow();
  clearTimeout(timer);
  if (state.auto) timer = setTimeout(() => void searchNow(), QUIET_MS);
}

function knobTurned(name, value) {
  searching.stop();
  if (state.search) state.search.running = false;
  state.knobs[name] = value;
  void predictNow();
}

async function searchNow() {
  clearTimeout(timer);
  state.search = { running: true, points: [], plans: 0, stages: 0, gap: null, verdict: "" };
  const own = state.search;
  say("searching");
  show();
  const took = (figures) => {
    // A prediction that was asked before would come after the plan that was found.
    latest.stop();
    state.refused = null;
    state.figures = own.figures = figures;
    state.plan = figures.job;
    state.knobs = {};
    stale();
  };
  const heard = (event) => {
    own.points.push({ at: event.wall_s, best: event.best_s, bound: event.bound_s });
    [own.plans, own.stages, own.gap] = [event.plans, event.stages, event.gap];
    if (event.figures) {
      took(event.figures);
      remember();
    }
    show(event.figures ? undefined : "search");
  };
  const body = { problem: state.problem, seconds: state.seconds };
  const end = await trying(() => searching.run((signal) => follow("search", body, signal, heard)));
  own.running = false;
  if (end === undefined) own.verdict = `The search was refused: ${state.error.message}`;
  else if (!end) own.verdict = "Stopped: the plan is the best until then.";
  if (state.search !== own || (!end && state.refused)) return;
  state.refused = null;
  if (end) {
    own.points.push({ at: end.wall_s, best: end.figures ? end.figures.prediction.iteration_s : null, bound: end.bound_s });
    Object.assign(own, { verdict: end.verdict, gap: end.gap, plans: end.plans, simulated: end.simulated_s });
    if (end.figures) {
      took(end.figures);
      say(end.verdict);
    } else {
      tell(new Refused(end.verdict));
      say("no plan fits");
    }
  } else {
    say(end === undefined ? "the search was refused" : "stopped");
  }
  if (state.figures && end !== undefined) remember();
  show();
  keep();
  if (state.figures) {
    void offerChoices();
    void compareNow();
  }
}

async function compareNow() {
  if (!state.pinned || !state.figures) return;
  const { pinned, figures } = state;
  const body = { first: pinned.job, second: figures.job };
  const comparison = await ask("compare", body).catch(() => null);
  if (state.pinned !== pinned || state.figures !== figures) return;
  state.comparison = comparison;
  show("compare");
}

async function askExtra(name, question, body, key) {
  say(`${name}…`);
  const { figures } = state;
  const answer = await trying(() => extra.run((signal) => ask(question, body, signal)));
  if (answer === undefined) say(`${name}: refused`);
  if (!answer) return;
  if (state.figures !== figures || state.refused) {
    say(`${name}: the plan has changed`);
    return;
  }
  state[key] = answer;
  say([`${name}: done.`, verdict()].join(" "));
  show(key);
}

async function paretoNow() {
  state.pareto = { running: true, points: [] };
  const own = state.pareto;
  show("pareto");
  const heard = (event) => {
    own.points.push(event);
    show("pareto");
  };
  const body = { problem: state.problem, seconds: state.seconds };
  await trying(() => extra.run((signal) => follow("pareto", body, signal, heard)));
  own.running = false;
  show("pareto");
}

async function exportNow(framework) {
  await askExtra("export", "export", { plan: state.figures.job, framework }, "exported");
}

// What is shown. A part alone is drawn again where nothing else changed.

const CARDS = {
  time: () => timeCard(state.figures, state.money),
  search: () => (state.search ? searchCard(state.search, () => searching.stop()) : null),
  plan: () => planCard(state.figures, state.choices, names, knobTurned,
    Object.keys(state.knobs).length ? () => { state.knobs = {}; void predictNow(); } : null),
  memory: () => memoryCard(state.figures, state.stage, (stage) => { state.stage = stage; show("memory"); }),
  goes: () => goesCard(state.figures, names, Boolean(state.search)),
  timeline: () => timelineCard(state.timeline, () => void askExtra("playing", "timeline", { plan: state.figures.job }, "timeline"), false),
  compare: () => compareCard(state,
    () => { state.pinned = state.figures; void compareNow(); show("compare"); },
    () => { state.pinned = state.comparison = null; show("compare"); }),
  gains: () => gainsCard(state.gains, () => void askExtra("what would buy time", "gains", { plan: state.figures.job }, "gains")),
  pareto: () => paretoCard(state.pareto && state.pareto.points, state.money, () => void paretoNow(),
    Boolean(state.pareto && state.pareto.running),
    (point) => { state.problem.nodes = point.nodes; state.plan = point.figures.job; state.knobs = {}; makeForm(); void predictNow(); }),
  exported: () => takeCard(),
};
const ID_OF = { exported: "take" };

function takeCard() {
  const frameworks = el("select", { "aria-label": "framework", "data-field": "framework" }, names.frameworks.map((name) => el("option", { value: name }, name)));
  const found = state.exported;
  if (found) frameworks.value = found.framework;
  return card("take", "Take it with you",
    el("div", { class: "row" },
      el("button", { type: "button", onclick: () => void planFile() }, "Plan file"),
      el("button", { type: "button", onclick: () => void traceFile() }, "Trace for Perfetto"),
      el("button", { type: "button", id: "copy", onclick: () => void copyLink() }, "Copy a link to this page")),
    el("div", { class: "row" }, frameworks,
      el("button", { type: "button", onclick: () => void exportNow(frameworks.value) }, "Launch line or configuration")),
    found ? [
      el("p", { class: found.exact ? "good" : "bad" }, found.exact ? "Said exactly." : "Not said exactly:"),
      found.remarks.map((remark) => el("p", { class: "soft" }, remark)),
      el("pre", { tabindex: "0" }, found.text),
      el("button", { type: "button", onclick: () => download(`plan-${found.framework}.txt`, found.text, "text/plain") }, "Download it"),
    ] : null);
}

async function planFile() {
  const file = await trying(() => ask("plan_file", { plan: state.figures.job }));
  if (file) download("plan.yaml", file.text, "text/yaml");
}

async function traceFile() {
  const file = await trying(() => ask("trace", { plan: state.figures.job }));
  if (file) download("plan.trace.json", file.text, "application/json");
}

async function copyLink() {
  keep();
  try {
    await navigator.clipboard.writeText(location.href);
    say("the link is copied");
  } catch {
    say("the link is in the address bar");
  }
}

function show(only) {
  if (state.tab === "serve") return;
  if ($("problem").hidden) tellBrief(null);
  if (state.refused) {
    results.replaceChildren(refusedCard(state.refused, state.answered && back));
    return;
  }
  if (!state.figures) {
    const part = CARDS.search();
    results.replaceChildren(...(part ? [part] : []));
    return;
  }
  if (only && results.childElementCount) {
    const old = $(ID_OF[only] || only), part = CARDS[only]();
    if (old && part) {
      replaced(old, part);
      return;
    }
  }
  const focused = focus();
  const opened = new Set([...results.querySelectorAll("details[open]")].map(nameOf));
  const pairs = [["time", state.search ? "search" : "goes"], ["plan", "memory"]];
  results.replaceChildren(...pairs.map((pair) => el("div", { class: "pair" }, pair.map((name) => CARDS[name]()))),
    ...Object.keys(CARDS).filter((name) => !pairs.flat().includes(name)).map((name) => CARDS[name]()).filter(Boolean));
  reopen(results, opened);
  refocus(focused);
}

// Keep what a person has opened and where the keyboard is.
const nameOf = (details) => `${details.closest("section").id}:${details.firstElementChild.textContent}`;
const reopen = (root, opened) => {
  for (const details of root.querySelectorAll("details")) if (opened.has(nameOf(details))) details.open = true;
};
function focus() {
  const at = document.activeElement;
  if (!at || !results.contains(at)) return null;
  const home = at.closest("section");
  return { section: home && home.id, field: at.dataset.field, text: at.textContent, tag: at.tagName };
}
function refocus(at) {
  if (!at || !at.section || !$(at.section)) return;
  const same = [...$(at.section).querySelectorAll(at.tag)].find((one) =>
    (at.field ? one.dataset.field === at.field : one.textContent === at.text));
  if (same) same.focus({ preventScroll: true });
}
function replaced(old, part) {
  const focused = focus();
  const opened = new Set([...old.querySelectorAll("details[open]")].map(nameOf));
  old.replaceWith(part);
  reopen(part, opened);
  refocus(focused);
}

// The form.

function setProblem(name) {
  return (value) => {
    if (value === null || value === "") delete state.problem[name];
    else state.problem[name] = value;
    problemChanged();
  };
}

const withPasted = (kind, found) => {
  const options = found.map((name) => [name, name]);
  if (state.pasted[kind]) options.unshift([state.pasted[kind].text, `pasted: ${state.pasted[kind].name}`]);
  else if (/\n|^\s*\{/.test(state.problem[kind])) options.unshift([state.problem[kind], "pasted"]);
  return options;
};

function trainingForm() {
  const hardware = names.hardware.find((one) => one.name === state.problem.hardware);
  const most = hardware ? hardware.gpus : 8;
  const counts = powers(1, 128).filter((count) => count <= most);
  if (!counts.includes(most)) counts.push(most);
  return [
    ...(state.tab === "adapt" ? adapterFields() : []),
    list("model", "model", withPasted("model", names.models.map((one) => one.name)), state.problem.model, setProblem("model")),
    list("hardware", "hardware", withPasted("hardware", names.hardware.map((one) => one.name)), state.problem.hardware, (value) => {
      const row = names.hardware.find((one) => one.name === value);
      if (row && state.problem.gpus_per_node > row.gpus) state.problem.gpus_per_node = row.gpus;
      setProblem("hardware")(value);
      makeForm();
    }),
    pasteField(),
    slider("nodes", "nodes", powers(1, 4096), state.problem.nodes, setProblem("nodes")),
    slider("gpus_per_node", "GPUs of each node", counts, state.problem.gpus_per_node, setProblem("gpus_per_node")),
    slider("global_batch", "sequences of a step", powers(1, 16384), state.problem.global_batch, setProblem("global_batch")),
    slider("sequence_length", "tokens of a sequence", powers(512, 1048576), state.problem.sequence_length, setProblem("sequence_length")),
    list("precision", "precision", names.precisions, state.problem.precision, setProblem("precision")),
    slider("keep_free_gib", "GiB to keep free on each GPU", [0, 1, 2, 4, 6, 8, 12, 16, 20], state.problem.keep_free_gib || 0, setProblem("keep_free_gib")),
    el("details", {}, el("summary", {}, "More of the question"),
      list("attention", "attention", ["flash", "math"], state.problem.attention, setProblem("attention")),
      list("space", "plans to choose from", [["", "as the model asks"], ...names.spaces.map((name) => [name, name])], state.problem.space || "", setProblem("space")),
      list("engine", "engine", [["", "the space's own"], ...names.engines.map((name) => [name, name])], state.problem.engine || "", setProblem("engine")),
      optional("intra_node_gbytes_per_s", "GB/s inside a node (empty: the hardware's)", state.problem.intra_node_gbytes_per_s, setProblem("intra_node_gbytes_per_s")),
      optional("inter_node_gbytes_per_s", "GB/s of a node's network (empty: the hardware's)", state.problem.inter_node_gbytes_per_s, setProblem("inter_node_gbytes_per_s"))),
    fold("Goal",
      optional("tokens", "tokens to train on, in billions", state.money.tokens, (value) => { state.money.tokens = value; show(); keep(); }),
      optional("price", "dollars an hour of a GPU", state.money.price, (value) => { state.money.price = value; show(); keep(); })),
    fold("Search",
      slider("seconds", "seconds at most", [1, 2, 5, 10, 20, 60, 120], state.seconds, (value) => { state.seconds = value; }),
      check("search again when the question changes", state.auto, (value) => { state.auto = value; }),
      el("div", { class: "row" }, el("button", { type: "button", class: "main", id: "search-now", onclick: () => void searchNow() }, "Search"))),
  ].filter(Boolean);
}

function adapterFields() {
  const trained = (value) => {
    // What goes with adapters alone is left out with them.
    if (value === "all") for (const name of ADAPTER) delete state.problem[name];
    setProblem("train")(value);
    makeForm();
  };
  const train = list("train", "what is trained", [["adapters", "adapters (LoRA) beside frozen weights"], ["all", "all weights"]], state.problem.train, trained);
  const loss = list("loss", "loss", [["whole", "logits of all tokens at once"], ["chunked", "in chunks"]], state.problem.loss || "whole", setProblem("loss"));
  if (state.problem.train !== "adapters") return [train, loss];
  return [train,
    slider("adapter_rank", "rank", powers(1, 256), state.problem.adapter_rank || 16, setProblem("adapter_rank")),
    list("base", "frozen weights", [["16bit", "16 bits"], ["8bit", "8 bits"], ["4bit", "4 bits (NF4)"]], state.problem.base || "16bit", setProblem("base")),
    loss];
}

function pasteField() {
  const text = el("textarea", { id: "paste", "data-field": "text", spellcheck: "false", placeholder: "config.json, launch script, plan file, hardware file" });
  const pick = el("input", { id: "pick", type: "file" });
  pick.addEventListener("change", async () => {
    if (!pick.files.length) return;
    text.value = await pick.files[0].text();
    void pasteNow(text.value);
  });
  return el("details", {}, el("summary", {}, "Your own: pick or paste a file"),
    el("div", { class: "field" }, el("label", { for: "pick" }, "a model's config.json, a launch script or configuration, a plan file, or a hardware file"), pick),
    el("div", { class: "field" }, el("label", { for: "paste" }, "or its content"), text),
    el("button", { type: "button", id: "read", onclick: () => void pasteNow(text.value) }, "Read it"),
    el("div", { id: "read-as" }));
}

async function pasteNow(text) {
  const body = { text, hardware: state.problem.hardware };
  const found = await trying(() => ask("paste", body), "text");
  if (found === undefined) refuse("The pasted text");
  if (!found) return;
  searching.stop();
  clearTimeout(timer);
  if (found.kind === "model" || found.kind === "hardware") {
    state.pasted[found.kind] = { text, name: found.name };
    state.problem[found.kind] = text;
    makeForm();
    problemChanged();
  } else {
    asPlan(found.plan);
    makeForm();
    state.search = null;
    await predictNow();
  }
  $("read-as").replaceChildren(el("p", {}, `Read as ${{ model: `the model ${found.name}`, hardware: `the hardware ${found.name}`, plan: "a plan", launch: `a launch file of ${found.name}` }[found.kind]}.`),
    ...found.remarks.map((remark) => el("p", { class: "soft" }, remark)));
  $("read-as").closest("details").open = true;
}

// A plan that says its own problem becomes the question.
function asPlan(job) {
  const { workload, cluster } = job;
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  state.problem = {
    model: text(workload.model), hardware: text(cluster.hardware), nodes: cluster.nodes, gpus_per_node: cluster.gpus_per_node,
    sequence_length: workload.sequence_length, global_batch: workload.global_batch, attention: workload.attention, precision: workload.precision,
  };
  for (const name of ["optimizer", "train", "adapter_rank", "adapter_targets", "base", "loss", "states", "gradients"]) {
    if (workload[name] !== undefined) state.problem[name] = workload[name];
  }
  for (const name of ["keep_free_gib", "intra_node_gbytes_per_s", "inter_node_gbytes_per_s"]) {
    if (cluster[name] !== undefined) state.problem[name] = cluster[name];
  }
  [state.plan, state.knobs] = [job, {}];
}

async function serveNow() {
  say("asking");
  const began = performance.now();
  const answer = await trying(() => served(state.load, results));
  if (answer === undefined) {
    state.served = null;
    stopPlaying();
    results.replaceChildren(refusedCard("The question", null));
    say("The question was refused");
  }
  if (answer) {
    state.served = answer;
    tellBrief(null);
    results.dataset.answered = String(performance.now() - began);
    say("answered");
  }
  keep();
}

function makeForm() {
  const opened = new Map([...form.querySelectorAll("details > summary")].map((one) => [one.textContent, one.parentElement.open]));
  form.replaceChildren(...(state.tab === "serve" ? servingForm(state.load, names, () => void serveNow()) : trainingForm()));
  for (const summary of form.querySelectorAll("summary")) {
    if (opened.has(summary.textContent)) summary.parentElement.open = opened.get(summary.textContent);
  }
  mark(form, state.error);
}

function makeTabs() {
  const tabs = $("tabs");
  tabs.replaceChildren(...Object.entries(TABS).map(([key, words]) => el("button", {
    type: "button", role: "tab", id: `tab-${key}`, "aria-selected": String(key === state.tab), "aria-controls": "answer",
    tabindex: key === state.tab ? 0 : -1, onclick: () => pick(key),
  }, words)));
}

$("tabs").addEventListener("keydown", (event) => {
  const keys = Object.keys(TABS), now = keys.indexOf(state.tab);
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  pick(keys[(now + step + keys.length) % keys.length]);
  $(`tab-${state.tab}`).focus();
});

function pick(tab) {
  if (tab === state.tab) return;
  searching.stop();
  clearTimeout(timer);
  if (state.tab !== "serve") {
    const { problem, plan, knobs } = state;
    state.kept[state.tab] = { problem, plan, knobs };
  }
  stopPlaying();
  state.tab = tab;
  if (tab in state.kept) Object.assign(state, state.kept[tab]);
  for (const name of ["figures", "choices", "search", "comparison", "pinned", "pareto", "refused", "answered"]) state[name] = null;
  stale();
  tell(null);
  results.replaceChildren();
  begin(Boolean(state.plan));
}

function begin(isRestored = false) {
  makeTabs();
  makeForm();
  if (state.tab === "serve") void serveNow();
  else if (isRestored && state.plan) void predictNow();
  else {
    void predictNow();
    if (state.auto) void searchNow();
  }
  keep();
}

// Links inside the page must leave the address alone: it restores the page.
for (const link of document.querySelectorAll('a[href^="#"]')) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    const place = $(link.getAttribute("href").slice(1));
    place.focus({ preventScroll: true });
    place.scrollIntoView();
  });
}

form.addEventListener("submit", (event) => event.preventDefault());
window.matchMedia("(max-width: 60rem)").addEventListener("change", () => show());
// Styles follow the theme by themselves; what is painted must be painted again.
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const canvas of results.querySelectorAll("canvas")) canvas.dispatchEvent(new Event("repaint"));
});
window.addEventListener("hashchange", () => { if (location.hash !== link() && restore()) begin(true); });

say("starting: a few seconds");
names = await trying(() => ask("names", {}));
if (names) {
  say("");
  const isRestored = restore();
  begin(isRestored);
}
