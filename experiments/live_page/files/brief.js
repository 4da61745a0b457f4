// The answer in one line, which stays in sight on a narrow screen while the question is turned.

import { el, gib, percent, seconds } from "/parts.js";
import { FIT } from "/results.js";

// How far a search has come with the plan that is shown; nothing of a plan that was turned since.
const proof = (search, figures) => {
  if (!search) return null;
  if (search.running) return "searching…";
  if (search.figures !== figures) return null;
  if (search.gap === 0) return "proven";
  return search.gap ? `gap ${percent(search.gap, 1)}` : null;
};

// What is told of a plan and its search, of a served load, or of why there is no answer.
export function brief(state, error) {
  if (error) return [el("span", { class: "bad" }, error)];
  if (state.tab === "serve") {
    const best = state.served && state.served.best;
    return best ? [el("strong", {}, best.plan), el("span", {}, `${best.requests_per_s.toFixed(2)} requests/s`)] : [];
  }
  if (!state.figures) return [];
  const { fit, prediction, rooms, outside_bytes: outside } = state.figures;
  const left = prediction.stages.map((stage, place) => rooms[place] - stage.peak_reserved_bytes);
  const stage = left.indexOf(Math.min(...left));
  const room = `${gib(prediction.stages[stage].peak_reserved_bytes + outside).replace(" GiB", "")} of ${gib(rooms[stage] + outside)}`;
  return [
    el("strong", {}, seconds(prediction.iteration_s)),
    el("span", { class: FIT[fit.is] }, { yes: "fits", near: `fits, ${percent(fit.probability)} sure`, no: "does not fit" }[fit.is]),
    el("span", {}, room),
    proof(state.search, state.figures) ? el("span", { class: "soft" }, proof(state.search, state.figures)) : null,
  ];
}
