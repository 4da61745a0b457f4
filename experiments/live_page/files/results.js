// The answer for training: time and bounds, plan and its choices, memory, where the time goes.

import { card, dollars, el, gib, lasting, more, percent, roomy, seconds, table, whole } from "/parts.js";
import { bars, boundsBar, course, drawTimeline, fill, legend, scatter, treemap } from "/figures.js";
import { chooser, list } from "/fields.js";

const CLASSES = ["weights", "gradients", "optimizer", "activations", "logits", "buffers", "temporaries"];

// How each answer to whether a plan fits looks.
export const FIT = { yes: "good", near: "near", no: "bad" };

const fullest = (figures) => {
  const left = figures.prediction.stages.map((stage, number) => figures.rooms[number] - stage.peak_reserved_bytes);
  return left.indexOf(Math.min(...left));
};

export function timeCard(figures, money) {
  const found = figures.prediction, stage = fullest(figures);
  const held = found.stages[stage].peak_reserved_bytes + figures.outside_bytes;
  const room = figures.rooms[stage] + figures.outside_bytes;
  const facts = [
    ["tokens a second", whole(found.tokens_per_s)],
    ["a GPU", whole(found.tokens_per_s / figures.gpus)],
    ["MFU", percent(found.mfu, 1)],
    ["fullest GPU", `${gib(held)} of ${gib(room)}`],
    ["GPUs", whole(figures.gpus)],
  ];
  if (money.tokens) {
    const whole_s = (1e9 * money.tokens) / found.tokens_per_s;
    facts.push([`${money.tokens} B tokens`, lasting(whole_s)]);
    if (money.price) facts.push(["dollars for them", dollars((whole_s / 3600) * figures.gpus * money.price)]);
  } else if (money.price) {
    facts.push(["dollars a million tokens", dollars((1e6 / found.tokens_per_s / 3600) * figures.gpus * money.price)]);
  }
  return card("time", "An iteration takes",
    el("p", { class: "time", id: "iteration", "data-seconds": found.iteration_s }, seconds(found.iteration_s)),
    el("p", { class: FIT[figures.fit.is], id: "fits" }, figures.fit.words),
    boundsBar(found.iteration_s_low, found.iteration_s, found.iteration_s_high),
    el("p", { class: "soft" }, `90 % of measurements lie between ${seconds(found.iteration_s_low)} and ${seconds(found.iteration_s_high)}.`),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    found.notes.map((note) => el("p", { class: "soft" }, `Note: ${note}.`)));
}

const knobWords = (name, labels) => (value) => {
  if (name === "engine") return value;
  if (name.startsWith("offload") || name.endsWith("layers")) return percent(value, 1).replace(".0 %", " %");
  return String(value);
};

export function planCard(figures, choices, names, turned, back) {
  const knobs = Object.entries(choices || {}).filter(([name, values]) =>
    name !== "engine" && values.length > 1 && name in figures.knobs);
  const turn = (name) => chooser(`knob-${name}`, names.labels[name], choices[name], figures.knobs[name],
    knobWords(name, names.labels), (value) => turned(name, value));
  const few = ["stages", "tensor_parallel", "micro_batch", "zero", "checkpointed_layers"];
  return card("plan", "The plan",
    figures.words.map((line) => el("p", {}, line)),
    knobs.length || choices ? el("fieldset", {}, el("legend", {}, "Turn its choices"),
      choices && choices.engine ? list("knob-engine", "engine", choices.engine, figures.knobs.engine, (value) => turned("engine", value)) : null,
      knobs.filter(([name]) => few.includes(name)).map(([name]) => turn(name)),
      more("All choices", knobs.filter(([name]) => !few.includes(name)).map(([name]) => turn(name)))) : null,
    back ? el("div", { class: "row" }, el("button", { type: "button", onclick: back }, "Back to the plan as it was found")) : null);
}

export function memoryCard(figures, shown, pick) {
  const found = figures.prediction, number = Math.min(shown ?? fullest(figures), found.stages.length - 1);
  const stage = found.stages[number];
  const named = CLASSES.filter((name) => stage.memory[name] > 0)
    .map((name) => ({ name, bytes: stage.memory[name], fill: fill(CLASSES.indexOf(name)) }));
  const allocated = named.reduce((sum, part) => sum + part.bytes, 0);
  const extra = [
    { name: "fragments", bytes: Math.max(0, stage.peak_reserved_bytes - allocated), fill: fill(8) },
    { name: "outside torch", bytes: figures.outside_bytes, fill: fill(9) },
    { name: "free", bytes: Math.max(0, figures.rooms[number] - stage.peak_reserved_bytes), fill: fill(13) },
  ].filter((part) => part.bytes > 0);
  const parts = [...named, ...extra];
  const rows = found.stages.map((one, place) => [
    `stage ${place}`, ...CLASSES.map((name) => gib(one.memory[name])), gib(one.peak_reserved_bytes), gib(figures.rooms[place]), gib(one.host_bytes)]);
  const stages = found.stages.map((_, place) => [String(place), `stage ${place}`]);
  return card("memory", "Memory of a GPU",
    stages.length > 1 ? list("stage", "stage", stages, String(number), (value) => pick(Number(value))) : null,
    treemap(parts, `Memory of stage ${number}: ${parts.map((part) => `${part.name} ${gib(part.bytes)}`).join(", ")}`),
    figures.fullest.map((line) => el("p", { class: "soft" }, line)),
    more("As a table", table("Memory of a GPU of each stage at its peak, and the host's",
      ["stage", ...CLASSES, "reserved", "room", "host"], rows)));
}

export function goesCard(figures, names, isAlone) {
  const parts = Object.entries(figures.breakdown.parts)
    .map(([key, value]) => ({ key, value, name: names.parts[key] }))
    .filter((part) => part.value > 5e-4 * figures.prediction.iteration_s)
    .sort((a, b) => b.value - a.value)
    .map((part) => ({ ...part, words: `${seconds(part.value)}, ${percent(part.value / figures.prediction.iteration_s)}` }));
  return card("goes", "Where a GPU's time goes",
    bars(parts, figures.goes, roomy(isAlone)),
    more("As a table", table("Mean over all GPUs; parts add up to the iteration", ["part", "time", "share"],
      parts.map((part) => [part.name, seconds(part.value), percent(part.value / figures.prediction.iteration_s, 1)]))));
}

export function refusedCard(what, back) {
  return card("refused", "No answer",
    el("p", { class: "bad" }, `${what} was refused: correct it, and the answer comes back.`),
    back ? el("div", { class: "row" }, el("button", { type: "button", onclick: back }, "Back to the last answer")) : null);
}

export function searchCard(search, stop) {
  const head = search.verdict || (search.running ? "Searching…" : "");
  const last = search.points[search.points.length - 1];
  const told = last ? `${whole(search.plans)} plans and ${whole(search.stages)} stages in ${last.at.toFixed(1)} s` : "";
  const gap = search.gap === null || search.gap === undefined ? "" : `, gap ${percent(search.gap, 1)}`;
  return card("search", "The search and its proof",
    el("p", { id: "verdict" }, head),
    course(search.points, `Best plan and lower bound over the seconds of the search. ${head}`),
    legend([{ name: "best plan", fill: "var(--plot)" }, { name: "lower bound: no plan is faster", fill: "var(--second)" }]),
    el("p", { class: "soft" }, told + gap),
    search.running ? el("div", { class: "row" }, el("button", { type: "button", onclick: stop, id: "stop" }, "Stop the search")) : null,
    search.simulated ? el("p", { class: "soft" }, `The event simulator plays it in ${seconds(search.simulated)}.`) : null);
}

export function compareCard(state, pin, unpin) {
  const told = state.comparison;
  const children = [el("div", { class: "row" },
    el("button", { type: "button", onclick: pin }, state.pinned ? "Pin this plan instead" : "Pin this plan to compare others with it"),
    state.pinned ? el("button", { type: "button", onclick: unpin }, "Unpin") : null)];
  if (state.pinned && told) {
    const [first, second] = [state.pinned, state.figures];
    const pair = (name, of) => [name, of(first), of(second)];
    children.push(el("p", { id: "compared" }, told.verdict),
      table("The two plans side by side", ["", "pinned", "this"], [
        pair("plan", (one) => one.line),
        pair("iteration", (one) => seconds(one.prediction.iteration_s)),
        pair("bounds", (one) => `${seconds(one.prediction.iteration_s_low)} to ${seconds(one.prediction.iteration_s_high)}`),
        pair("tokens/s", (one) => whole(one.prediction.tokens_per_s)),
        pair("fullest GPU", (one) => gib(Math.max(...one.prediction.stages.map((stage) => stage.peak_reserved_bytes)))),
        pair("fits", (one) => (one.prediction.fits ? "yes" : "no")),
      ]),
      told.parts.length ? more("Why one wins: by where a GPU's time goes",
        table("The largest differences first", ["part", "pinned", "this", "difference"],
          told.parts.filter((part) => part.first_s || part.second_s).map((part) => [
            part.part, seconds(part.first_s), seconds(part.second_s),
            `${part.second_s >= part.first_s ? "+" : "-"}${seconds(Math.abs(part.second_s - part.first_s))}`]))) : null);
  }
  return card("compare", "Two plans side by side", ...children);
}

export function gainsCard(gains, ask) {
  const children = [el("div", { class: "row" }, el("button", { type: "button", onclick: ask }, "Ask what would buy time"))];
  if (gains) {
    const words = (row) => [row.change, seconds(row.iteration_s), `${(1 / row.ratio).toFixed(2)} x`,
      row.fits ? "yes" : "no", row.sure ? "yes" : "no"];
    const fitting = gains.rows.filter((row) => row.fits).sort((a, b) => a.iteration_s - b.iteration_s);
    const others = gains.rows.filter((row) => !row.fits);
    children.push(table("The same plan otherwise", ["change", "iteration", "speedup", "fits", "beyond the bounds"], fitting.map(words)),
      others.length ? more(`${others.length} where it would not fit`, table("The same plan does not fit", ["change", "iteration", "speedup", "fits", "beyond the bounds"], others.map(words))) : null);
  }
  return card("gains", "What faster links, more memory or other GPUs would buy", ...children);
}

export function paretoCard(points, money, ask, running, use) {
  const children = [el("div", { class: "row" },
    el("button", { type: "button", onclick: ask, disabled: running }, running ? "Searching…" : "Search other numbers of nodes"))];
  const found = (points || []).filter((point) => point.iteration_s);
  if (found.length) {
    const cost = (point) => (point.iteration_s / 3600) * point.gpus * (money.price || 1);
    const unit = money.price ? "dollars a step" : "GPU hours a step";
    children.push(scatter(found.map((point) => ({
      x: point.iteration_s, y: cost(point), name: `${point.gpus}`, r: 4 + 8 * (point.memory_bytes / point.room_bytes),
      title: `${point.gpus} GPUs: ${seconds(point.iteration_s)}, ${gib(point.memory_bytes)}`,
    })), { name: "seconds an iteration", words: (value) => value.toPrecision(3) }, { name: unit, words: (value) => value.toPrecision(2) },
    `Time against ${unit} for ${found.map((point) => `${point.gpus} GPUs`).join(", ")}`),
    el("p", { class: "soft" }, "Beside each point its GPUs; larger points fill more of their memory."),
    table("The best plan on each number of nodes", ["nodes", "GPUs", "iteration", unit, "fullest GPU", "proof", "plan"],
      found.map((point) => [String(point.nodes), whole(point.gpus), seconds(point.iteration_s), cost(point).toPrecision(3), gib(point.memory_bytes),
        point.status === "OPTIMAL" ? "proven" : "not proven", point.figures.line])),
    el("div", { class: "row" }, found.map((point) => el("button", { type: "button", onclick: () => use(point) }, `Take ${point.nodes} ${point.nodes === 1 ? "node" : "nodes"}`))));
  }
  for (const point of (points || []).filter((one) => one.why)) {
    children.push(el("p", { class: "soft" }, `${point.nodes} nodes: ${point.why}`));
  }
  return card("pareto", "Time, memory and money", ...children);
}

export function timelineCard(played, ask, running) {
  const children = [el("div", { class: "row" },
    el("button", { type: "button", onclick: ask, disabled: running }, running ? "Playing…" : "Play one iteration"))];
  if (played) {
    const shown = played.stages <= 8 ? [...Array(played.stages).keys()] : [0, 1, 2, 3, ...[4, 3, 2, 1].map((back) => played.stages - back)];
    let zoom = 1;
    const draw = () => requestAnimationFrame(() => drawTimeline(canvas, played, zoom, shown));
    const canvas = el("canvas", { onrepaint: draw, role: "img", "aria-label": `Timeline of one iteration of ${seconds(played.iteration_s)}; the table below has the busy time of each stream` });
    const holder = el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Timeline, scrolls sideways" }, canvas);
    const cut = played.whole > played.tasks.length ? ` The beginning and the end are drawn: ${whole(played.tasks.length)} of ${whole(played.whole)} tasks.` : "";
    children.push(el("p", {}, `Played task by task: ${seconds(played.iteration_s)}.${cut}`),
      chooser("zoom", "zoom", [1, 2, 4, 8, 16, 32], 1, (value) => `${value} x`, (value) => { zoom = value; draw(); }), holder,
      legend(played.kinds.map((kind, number) => ({ name: kind.words, fill: fill(number) }))),
      more("As a table", table("Seconds that each stream of a stage is busy", ["stage", ...Object.keys(played.busy_s[0]).map((name) => name.replaceAll("_", " "))],
        played.busy_s.map((busy, stage) => [`stage ${stage}`, ...Object.values(busy).map(seconds)]))));
    draw();
  }
  return card("timeline", "One iteration, played", ...children);
}
