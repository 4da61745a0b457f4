// Elements, numbers with units, and tables: what all parts of the page are made of.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

export const el = (tag, attributes, ...children) =>
  filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

// The width of a figure: that of the column, so that its letters stay readable on a phone.
export function roomy(isAlone = false) {
  const width = document.getElementById("results").clientWidth;
  // Where there is room cards stand two and two.
  return Math.max(260, Math.min(isAlone ? 720 : 560, (width > 780 && !isAlone ? width / 2 - 8 : width) - 36));
}

export const GIB = 2 ** 30;
export const gib = (bytes) => `${(bytes / GIB).toFixed(1)} GiB`;
export const seconds = (value) =>
  value >= 0.0995 ? `${value.toFixed(3)} s` : `${(1e3 * value).toFixed(2)} ms`;
export const whole = (value) => Math.round(value).toLocaleString("en");
export const percent = (value, digits = 0) => `${(100 * value).toFixed(digits)} %`;
export const dollars = (value) =>
  `$${value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 2 : 0 })}`;

export function lasting(value) {
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${(value / 60).toFixed(1)} min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86400).toFixed(1)} days`;
}

// A table of rows of cells; numbers stand to the right.
export function table(caption, head, rows, best = -1) {
  const kind = (cell) => (/^[-+]?[$]?[\d.,]+( ?(s|ms|%|GiB|x|h|min|days))?$/.test(cell) ? "number" : null);
  const kinds = head.map((_, place) => (rows.every((row) => kind(String(row[place])) || row[place] === "-") ? "number" : null));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, head.map((cell, place) => el("th", { scope: "col", class: kinds[place] }, cell)))),
      el("tbody", {}, rows.map((row, number) => el("tr", { class: number === best ? "best" : null },
        row.map((cell, place) => el("td", { class: kinds[place] }, cell)))))));
}

export const more = (summary, ...children) =>
  el("details", {}, el("summary", {}, summary), ...children);

// Where the screen is narrow, what is rarely asked is folded.
export const fold = (summary, ...children) => el("details",
  { class: "fold", open: !window.matchMedia("(max-width: 60rem)").matches }, el("summary", {}, summary), ...children);

export const card = (id, title, ...children) =>
  el("section", { class: "card", id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title), ...children);

export function download(name, text, kind) {
  const address = URL.createObjectURL(new Blob([text], { type: kind }));
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1e3);
}
