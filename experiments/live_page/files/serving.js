// Serving: which layout of GPUs serves a load best.

import { ask, Latest, Refused } from "/asking.js";
import { card, dollars, el, percent, seconds, table, whole } from "/parts.js";
import { scatter } from "/figures.js";
import { list, optional, powers, slider } from "/fields.js";

export const LOAD = {
  model: "llama3-70b", gpu: "H100", gpus: 8, weights: "bf16", engine: "vllm", prompt: 1000, output: 500,
  lengths: "lognormal", export: "vllm",
};
const latest = new Latest(), playing = new Latest();
// So long nothing may change before the best layout is played, request by request.
const QUIET_MS = 300;
let timer = null;

export function servingForm(load, names, changed) {
  const set = (name) => (value) => {
    if (value === null) delete load[name];
    else load[name] = value;
    changed();
  };
  return [
    list("model", "model", names.models.map((one) => one.name), load.model, set("model")),
    list("gpu", "GPU", names.serving_gpus, load.gpu, set("gpu")),
    slider("gpus", "GPUs", powers(1, 64), load.gpus, set("gpus")),
    list("weights", "precision of weights", ["bf16", "fp8", "fp8_block", "nvfp4"], load.weights, set("weights")),
    list("engine", "engine", ["vllm", "sglang", "trtllm"], load.engine, (value) => {
      load.export = value === "trtllm" ? undefined : value;
      set("engine")(value);
    }),
    slider("prompt", "tokens of a prompt", powers(128, 131072), load.prompt, set("prompt")),
    slider("output", "tokens of an output", powers(16, 16384), load.output, set("output")),
    list("lengths", "lengths vary", [["lognormal", "log-normal"], ["uniform", "uniform"], ["fixed", "not at all"]], load.lengths, set("lengths")),
    optional("rate", "requests a second (empty: as many as can be)", load.rate, set("rate")),
    optional("ttft", "goal: seconds to the first token", load.ttft, set("ttft")),
    optional("tpot", "goal: seconds of each further token", load.tpot, set("tpot")),
    optional("dollars", "dollars an hour of a GPU", load.dollars, set("dollars")),
  ];
}

export async function served(load, results) {
  const answer = await latest.run((signal) => ask("serving", { load }, signal));
  if (answer === null) return null;
  results.replaceChildren(...cards(answer));
  playing.stop();
  clearTimeout(timer);
  timer = setTimeout(() => void playedLater({ ...load }, results), QUIET_MS);
  return answer;
}

// Percentiles of the best layout, once the question rests; without them the answer stands.
async function playedLater(load, results) {
  try {
    const answer = await playing.run((signal) => ask("serving_played", { load }, signal));
    const place = results.querySelector("#played");
    if (answer && place) place.replaceWith(playedCard(answer.played));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
  }
}

export function stopPlaying() {
  playing.stop();
  clearTimeout(timer);
}

function playedCard(played) {
  if (!played) return card("played", "As played, request by request", el("p", { class: "soft" }, "Separate GPUs for prompts are timed in closed form alone."));
  const share = percent(played.share);
  return card("played", "As played, request by request",
    el("dl", { class: "facts" }, [
      [`first token, ${share} of requests`, `within ${seconds(played.ttft_s)}`],
      [`each further token, ${share}`, `within ${seconds(played.tpot_s)}`],
      ["requests a second", played.requests_per_s.toFixed(2)],
    ].map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
}

function cards(answer) {
  const best = answer.best, all = [best, ...(answer.others || [])];
  const facts = [
    ["requests a second", best.requests_per_s.toFixed(2)],
    ["to the first token", seconds(best.ttft_s)],
    ["each further token", seconds(best.tpot_s)],
    ["output tokens/s a GPU", whole(best.output_tokens_per_s_per_gpu)],
    ["in flight", whole(best.in_flight)],
  ];
  if (best.dollars_per_million_tokens) facts.push(["a million tokens", dollars(best.dollars_per_million_tokens)]);
  const lines = [answer.command_lines || []].flat();
  return [
    card("served", "The layout that serves this load best",
      el("p", { class: "time", id: "layout" }, best.plan),
      el("p", { class: "soft" }, `Best of ${answer.layouts} layouts by the model, ${best.scheduler}; measured runs differ by 15 % or so.`),
      el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))))),
    card("layouts", "Throughput against time per token",
      scatter(all.map((one) => ({ x: 1e3 * one.tpot_s, y: one.requests_per_s, name: one.plan, title: `${one.plan}: ${one.requests_per_s.toFixed(2)} requests/s, ${(1e3 * one.tpot_s).toFixed(1)} ms a token` })),
        { name: "ms a token", words: (value) => value.toFixed(0) }, { name: "requests/s", words: (value) => value.toPrecision(2) },
        "Requests a second against the time of a token, by layout"),
      table("Layouts, the best first", ["layout", "requests/s", "first token", "each token", "output tokens/s a GPU"],
        all.map((one) => [one.plan, one.requests_per_s.toFixed(2), seconds(one.ttft_s), seconds(one.tpot_s), whole(one.output_tokens_per_s_per_gpu)]), 0)),
    lines.length ? card("commands", "How to start it", el("pre", { tabindex: "0" }, lines.join("\n"))) : null,
    card("played", "As played, request by request", el("p", { class: "soft" }, "Played once the question rests.")),
  ].filter(Boolean);
}
