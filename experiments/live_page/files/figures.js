// Figures: a treemap of memory, bars of time, the course of a search, a frontier, a timeline.

import { el, gib, roomy, seconds, svg } from "/parts.js";

// Light fills, on which dark text is read in both themes (after Okabe and Ito).
const FILLS = ["#8ccbee", "#f2c14e", "#7fd1b0", "#f0a58f", "#d3b3e5", "#c9d46a", "#c8ccd1", "#e9b6d2", "#a7b6ff", "#d7c4a3", "#9fe0e6", "#ffd9a8", "#bcd9a5", "#e0e3e7", "#f7b5b5"];
export const fill = (number) => FILLS[number % FILLS.length];

const described = (width, height, label, ...children) =>
  svg("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", "aria-label": label }, ...children);

// Rectangles whose areas are as their sizes, as near to squares as rows of them can be.
export function squares(sizes, x, y, width, height) {
  const total = sizes.reduce((sum, size) => sum + size, 0);
  const scale = (width * height) / total;
  const order = sizes.map((size, place) => [size * scale, place]).filter(([area]) => area > 0)
    .sort((a, b) => b[0] - a[0]);
  const found = new Array(sizes.length).fill(null);
  let start = 0;
  while (start < order.length) {
    const short = Math.min(width, height);
    let end = start, area = 0, worst = Infinity;
    while (end < order.length) {
      const next = area + order[end][0];
      const [most, least] = [order[start][0], order[end][0]];
      const ratio = Math.max((short * short * most) / (next * next), (next * next) / (short * short * least));
      if (ratio > worst) break;
      [worst, area, end] = [ratio, next, end + 1];
    }
    const thick = area / short;
    let along = 0;
    for (let place = start; place < end; place += 1) {
      const long = order[place][0] / thick;
      found[order[place][1]] = width >= height
        ? { x, y: y + along, width: thick, height: long }
        : { x: x + along, y, width: long, height: thick };
      along += long;
    }
    if (width >= height) { x += thick; width -= thick; } else { y += thick; height -= thick; }
    start = end;
  }
  return found;
}

export function treemap(parts, label) {
  const [width, height] = [roomy(), 250];
  const places = squares(parts.map((part) => part.bytes), 0, 0, width, height);
  const has = (place) => place && place.width > 62 && place.height > 34;
  // Areas without room for their names are told below.
  const small = parts.filter((part, number) => !has(places[number]));
  const drawn = described(width, height, label, parts.map((part, number) => {
    const place = places[number];
    if (!place) return null;
    const group = svg("g", {}, svg("title", {}, `${part.name}: ${gib(part.bytes)}`),
      svg("rect", { ...place, fill: part.fill, stroke: "var(--paper)", "stroke-width": 2 }));
    if (has(place)) {
      group.append(
        svg("text", { class: "on", x: place.x + 6, y: place.y + 16 }, clipped(part.name, place.width)),
        svg("text", { class: "on", x: place.x + 6, y: place.y + 31 }, gib(part.bytes)));
    }
    return group;
  }));
  return el("div", {}, drawn, legend(small.map((part) => ({ name: `${part.name} ${gib(part.bytes)}`, fill: part.fill }))));
}

const clipped = (text, width) =>
  (text.length * 6.6 > width - 10 ? `${text.slice(0, Math.max(1, Math.floor((width - 16) / 6.6)))}…` : text);

// The predicted time within its bounds, on a line from nothing.
export function boundsBar(low, middle, high) {
  const [width, height] = [roomy(), 46];
  const most = Math.min(high, 3 * middle) * 1.08;
  const x = (value) => 8 + ((width - 16) * Math.min(value, most)) / most;
  const label = `90 % of measurements lie between ${seconds(low)} and ${seconds(high)}`;
  return described(width, height, label,
    svg("line", { class: "axis", x1: 8, x2: width - 8, y1: 14, y2: 14, "stroke-width": 2 }),
    svg("line", { class: "range", x1: x(low), x2: x(high), y1: 14, y2: 14 }),
    svg("circle", { class: "dot", cx: x(middle), cy: 14, r: 6 }),
    svg("text", { x: x(low), y: 38, "text-anchor": "middle" }, seconds(low)),
    svg("text", { x: Math.min(x(high), width - 30), y: 38, "text-anchor": "middle" }, high > most ? `${seconds(high)} →` : seconds(high)));
}

// Parts of a whole, the largest first, a bar each.
export function bars(rows, label, width = roomy()) {
  const left = 0.5 * width, bar = 0.5 * width - 100;
  // Where there is no room beside it, a bar stands below its name.
  const below = width < 480, line = below ? 40 : 24, height = rows.length * line + 4;
  const most = Math.max(...rows.map((row) => row.value), 1e-12);
  const [from, long, drop] = below ? [0, width - 100, 16] : [left, bar, 0];
  return described(width, height, label, rows.map((row, number) => svg("g", {},
    svg("text", { x: 0, y: number * line + 16 }, clipped(row.name, below ? width : left - 5)),
    svg("rect", { x: from, y: number * line + 4 + drop, width: Math.max(1, (long * row.value) / most), height: 15, rx: 2, fill: row.fill || "var(--plot)" }),
    svg("text", { x: from + (long * row.value) / most + 6, y: number * line + 16 + drop }, row.words))));
}

// The best plan and the bound of a search over its seconds: a gap as it closes.
export function course(points, label) {
  const [width, height, left, low] = [roomy(), 170, 52, 24];
  const known = points.filter((point) => point.best || point.bound);
  if (!known.length) return el("p", { class: "soft" }, "No plan yet.");
  const values = known.flatMap((point) => [point.best, point.bound]).filter(Boolean);
  let [least, most] = [Math.min(...values), Math.max(...values)];
  const room = Math.max(0.08 * (most - least), 0.01 * most);
  [least, most] = [least - room, most + room];
  const end = Math.max(...points.map((point) => point.at), 0.01);
  const x = (at) => left + ((width - left - 10) * at) / end;
  const y = (value) => 8 + ((height - low - 8) * (most - value)) / (most - least);
  const steps = (name) => {
    let path = "", last = null;
    for (const point of known) {
      if (!point[name]) continue;
      path += last === null ? `M${x(point.at)},${y(point[name])}` : `H${x(point.at)}V${y(point[name])}`;
      last = point[name];
    }
    return last === null ? null : svg("path", { class: name === "best" ? "line" : "bound", d: `${path}H${x(end)}` });
  };
  return described(width, height, label,
    svg("line", { class: "axis", x1: left, x2: left, y1: 8, y2: height - low }),
    svg("line", { class: "axis", x1: left, x2: width - 10, y1: height - low, y2: height - low }),
    [least + room, most - room].map((value) => svg("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, seconds(value).replace(" s", ""))),
    svg("text", { x: left, y: height - 6 }, "0"),
    svg("text", { x: width - 10, y: height - 6, "text-anchor": "end" }, `${end.toFixed(1)} s of search`),
    steps("bound"), steps("best"));
}

// Points in two numbers, each with its name.
export function scatter(points, across, up, label) {
  const [width, height, left, low] = [roomy(), 260, 62, 38];
  const span = (name) => {
    const values = points.map((point) => point[name]);
    const [least, most] = [Math.min(...values), Math.max(...values)];
    const room = 0.1 * (most - least || most || 1);
    return [Math.max(0, least - room), most + room];
  };
  const [x0, x1] = span("x"), [y0, y1] = span("y");
  const x = (value) => left + ((width - left - 16) * (value - x0)) / (x1 - x0);
  const y = (value) => 10 + ((height - low - 10) * (y1 - value)) / (y1 - y0);
  return described(width, height, label,
    svg("line", { class: "axis", x1: left, x2: left, y1: 10, y2: height - low }),
    svg("line", { class: "axis", x1: left, x2: width - 16, y1: height - low, y2: height - low }),
    [x0, x1].map((value, place) => svg("text", { x: x(value), y: height - low + 15, "text-anchor": place ? "end" : "start" }, across.words(value))),
    [y0, y1].map((value) => svg("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, up.words(value))),
    svg("text", { class: "soft", x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, across.name),
    svg("text", { class: "soft", x: 12, y: height / 2, transform: `rotate(-90 12 ${height / 2})`, "text-anchor": "middle" }, up.name),
    points.map((point) => svg("g", {}, svg("title", {}, point.title),
      svg("circle", { class: "dot", cx: x(point.x), cy: y(point.y), r: point.r || 5 }),
      svg("text", { x: x(point.x) + (point.r || 5) + 3, y: y(point.y) - 5 }, point.name))));
}

// One iteration, a lane for each stream of each stage, on a canvas as wide as the zoom asks.
export function drawTimeline(canvas, played, zoom, shown) {
  const lanes = played.lanes.length, line = 11, gap = 12;
  const height = shown.length * (lanes * line + gap) + 4;
  const width = Math.max(300, Math.floor(canvas.parentElement.clientWidth * zoom));
  const dense = Math.min(window.devicePixelRatio || 1, 16000 / width);
  canvas.width = width * dense;
  canvas.height = height * dense;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(dense, dense);
  const style = getComputedStyle(document.documentElement);
  pen.fillStyle = style.getPropertyValue("--tint");
  shown.forEach((_, row) => {
    for (let lane = 0; lane < lanes; lane += 1) pen.fillRect(0, row * (lanes * line + gap) + lane * line, width, line - 2);
  });
  const scale = width / played.iteration_s;
  for (const [stage, lane, kind, start, end] of played.tasks) {
    const row = shown.indexOf(stage);
    if (row < 0) continue;
    pen.fillStyle = fill(kind);
    pen.fillRect(start * scale, row * (lanes * line + gap) + lane * line, Math.max(0.6, (end - start) * scale), line - 2);
  }
  pen.fillStyle = style.getPropertyValue("--soft");
  pen.font = "10px system-ui, sans-serif";
  shown.forEach((stage, row) => pen.fillText(`stage ${stage}`, 2, row * (lanes * line + gap) + lanes * line + 8));
}

export const legend = (items) => el("ul", { class: "legend" }, items.map((item) => el("li", {},
  svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("rect", { width: 10, height: 10, rx: 2, fill: item.fill })), item.name)));


