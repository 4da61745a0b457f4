"use strict";
// Plots and a table over the rows of each run: any column over any other, sorted and filtered.
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999933", "#882255", "#44aa99", "#999999"];
  const MOST_SHOWN = 500, MOST_GROUPS = COLOURS.length;
  let count = 0;

  const made = (node, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat(Infinity).filter((child) => child !== null));
    return node;
  };
  const el = (tag, attributes = {}, ...children) => made(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) => made(document.createElementNS(NS, tag), attributes, children);
  const words = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value !== "number") return String(value);
    return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(5)));
  };

  function begin(holder) {
    const { columns, rows } = JSON.parse(holder.querySelector("script").textContent);
    const kinds = columns.map((_, place) => {
      const there = rows.map((row) => row[place]).filter((value) => value !== null && value !== "");
      const distinct = new Set(there.map(String)).size;
      return { number: there.length > 0 && there.every((value) => typeof value === "number"), distinct };
    });
    const numbers = columns.map((name, place) => [name, place]).filter(([, place]) => kinds[place].number);
    const groups = columns.map((name, place) => [name, place]).filter(([, place]) => kinds[place].distinct > 1 && kinds[place].distinct <= MOST_GROUPS);
    const state = { x: null, y: null, group: null, logX: false, logY: false, filter: "", sorted: null, down: false };
    const told = el("p", { class: "told soft", role: "status" });
    const plot = el("div"), body = el("div");

    const filtered = () => {
      const asked = state.filter.toLowerCase();
      return asked ? rows.filter((row) => row.some((value) => words(value).toLowerCase().includes(asked))) : rows;
    };
    const choice = (label, options, value, change) => {
      const id = `asked-${(count += 1)}`;
      const select = el("select", { id, onchange: () => change(select.value === "" ? null : Number(select.value)) },
        options.map(([name, place]) => el("option", { value: place, selected: place === value }, name)));
      return el("div", {}, el("label", { for: id }, label), select);
    };
    const box = (label, change) => {
      const input = el("input", { type: "checkbox", onchange: () => change(input.checked) });
      return el("label", {}, input, ` ${label}`);
    };

    function drawPlot() {
      plot.replaceChildren();
      if (state.x === null || state.y === null) return;
      const points = filtered().filter((row) => typeof row[state.x] === "number" && typeof row[state.y] === "number"
        && (!state.logX || row[state.x] > 0) && (!state.logY || row[state.y] > 0));
      if (!points.length) { plot.append(el("p", { class: "soft" }, "No row has both numbers.")); return; }
      const [width, height, left, low] = [720, 360, 74, 44];
      const scale = (place, log) => {
        const values = points.map((row) => (log ? Math.log10(row[place]) : row[place]));
        let [least, most] = [Math.min(...values), Math.max(...values)];
        const room = 0.05 * (most - least || Math.abs(most) || 1);
        [least, most] = [least - room, most + room];
        return { least, most, at: (value) => ((log ? Math.log10(value) : value) - least) / (most - least), back: (share) => { const value = least + share * (most - least); return log ? 10 ** value : value; } };
      };
      const across = scale(state.x, state.logX), up = scale(state.y, state.logY);
      const x = (value) => left + (width - left - 16) * across.at(value), y = (value) => height - low - (height - low - 12) * up.at(value);
      const keys = state.group === null ? [] : [...new Set(points.map((row) => words(row[state.group])))];
      const colour = (row) => COLOURS[state.group === null ? 0 : keys.indexOf(words(row[state.group])) % COLOURS.length];
      const label = `${columns[state.y]} over ${columns[state.x]}, ${points.length} rows; the table below has the numbers`;
      plot.append(svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
        svg("line", { class: "axis", x1: left, x2: left, y1: 12, y2: height - low }),
        svg("line", { class: "axis", x1: left, x2: width - 16, y1: height - low, y2: height - low }),
        [0, 0.25, 0.5, 0.75, 1].map((share) => [
          svg("text", { x: left + (width - left - 16) * share, y: height - low + 16, "text-anchor": "middle" }, words(Number(across.back(share).toPrecision(3)))),
          svg("text", { x: left - 6, y: height - low - (height - low - 12) * share + 4, "text-anchor": "end" }, words(Number(up.back(share).toPrecision(3))))]),
        svg("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, columns[state.x]),
        svg("text", { x: 12, y: height / 2, transform: `rotate(-90 12 ${height / 2})`, "text-anchor": "middle" }, columns[state.y]),
        points.map((row) => svg("circle", { cx: x(row[state.x]), cy: y(row[state.y]), r: 4.5, fill: colour(row), onmouseenter: () => tell(row) }))));
      if (keys.length) {
        plot.append(el("ul", { class: "legend" }, keys.map((key, place) => {
          const dot = el("span");
          dot.style.background = COLOURS[place % COLOURS.length];
          return el("li", {}, dot, key || "none");
        })));
      }
    }

    function tell(row) {
      told.textContent = columns.map((name, place) => [name, words(row[place])]).filter(([, value]) => value).slice(0, 12).map(([name, value]) => `${name} ${value}`).join(", ");
    }

    function drawTable() {
      let found = filtered();
      if (state.sorted !== null) {
        const place = state.sorted, sign = state.down ? -1 : 1;
        found = [...found].sort((a, b) => {
          if (a[place] === null || b[place] === null) return (a[place] === null) - (b[place] === null);
          return sign * (kinds[place].number ? a[place] - b[place] : words(a[place]).localeCompare(words(b[place])));
        });
      }
      const head = columns.map((name, place) => el("th", { scope: "col", "aria-sort": state.sorted === place ? (state.down ? "descending" : "ascending") : null },
        el("button", { type: "button", onclick: () => { state.down = state.sorted === place && !state.down; state.sorted = place; drawTable(); } }, `${name}${state.sorted === place ? (state.down ? " ↓" : " ↑") : ""}`)));
      const more = found.length > MOST_SHOWN ? `, the first ${MOST_SHOWN} shown` : "";
      body.replaceChildren(el("p", { class: "soft" }, `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows${more}`),
        el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": holder.dataset.caption },
          el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, found.slice(0, MOST_SHOWN).map((row) =>
            el("tr", {}, row.map((value, place) => el("td", { class: kinds[place].number ? "number" : null }, words(value)))))))));
    }

    const draw = () => { drawPlot(); drawTable(); };
    const set = (name) => (value) => { state[name] = value; draw(); };
    if (numbers.length > 1) {
      const varied = numbers.filter(([, place]) => kinds[place].distinct > 1);
      [state.x, state.y] = [(varied[0] || numbers[0])[1], (varied[1] || numbers[1])[1]];
    }
    const filter = el("input", { type: "search", id: `asked-${(count += 1)}`, oninput: () => set("filter")(filter.value) });
    holder.append(el("h3", {}, holder.dataset.caption), el("div", { class: "tools" },
      numbers.length > 1 ? [
        choice("across", numbers, state.x, set("x")), choice("up", numbers, state.y, set("y")),
        choice("coloured by", [["nothing", ""], ...groups], null, set("group")),
        box("log across", set("logX")), box("log up", set("logY"))] : null,
      el("div", {}, el("label", { for: filter.id }, "rows with the text"), filter)), plot, told, body);
    draw();
  }
  for (const holder of document.querySelectorAll(".asked")) begin(holder);
})();
