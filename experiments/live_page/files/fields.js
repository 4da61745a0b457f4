// Fields of the question: sliders with a number beside them, lists, texts.

import { el } from "/parts.js";

let count = 0;
const named = (name) => `field-${name.replaceAll(".", "-")}-${(count += 1)}`;

const nearest = (values, value) =>
  values.reduce((best, one, place) => (Math.abs(one - value) < Math.abs(values[best] - value) ? place : best), 0);

// A slider over listed values, with a number for any other.
export function slider(name, label, values, value, changed, words = String) {
  const id = named(name);
  const number = el("input", { id, type: "number", "data-field": name, value, min: values[0], step: "any" });
  const range = el("input", {
    type: "range", min: 0, max: values.length - 1, step: 1, "aria-label": `${label}, slider`,
    "data-slider": name, value: nearest(values, value), "aria-valuetext": words(value),
  });
  range.addEventListener("input", () => {
    number.value = values[range.value];
    range.setAttribute("aria-valuetext", words(values[range.value]));
    changed(values[range.value]);
  });
  number.addEventListener("change", () => {
    const given = Number(number.value);
    if (number.value === "" || !Number.isFinite(given)) return;
    range.value = nearest(values, given);
    changed(given);
  });
  return el("div", { class: "field" }, el("label", { for: id }, label),
    el("div", { class: "slid" }, range, number));
}

// A slider over the values that a choice may take, told in words.
export function chooser(name, label, values, value, words, changed) {
  const id = named(name);
  const place = nearest(values, value);
  const told = el("output", { for: id }, words(values[place]));
  const range = el("input", {
    id, type: "range", min: 0, max: values.length - 1, step: 1, value: place, "data-field": name,
    "aria-valuetext": words(values[place]), disabled: values.length < 2,
  });
  range.addEventListener("input", () => {
    told.textContent = words(values[range.value]);
    range.setAttribute("aria-valuetext", told.textContent);
    changed(values[range.value]);
  });
  return el("div", { class: "field" }, el("label", { for: id }, label),
    el("div", { class: "slid" }, range, told));
}

export function list(name, label, options, value, changed) {
  const id = named(name);
  const select = el("select", { id, "data-field": name },
    options.map((option) => (typeof option === "string" ? [option, option] : option))
      .map(([key, words]) => el("option", { value: key, selected: key === value }, words)));
  select.addEventListener("change", () => changed(select.value));
  return el("div", { class: "field" }, el("label", { for: id }, label), select);
}

// A number that may be left out.
export function optional(name, label, value, changed) {
  const id = named(name);
  const input = el("input", { id, type: "number", min: 0, step: "any", "data-field": name, value: value ?? "" });
  input.addEventListener("change", () => changed(input.value === "" ? null : Number(input.value)));
  return el("div", { class: "field" }, el("label", { for: id }, label), input);
}

export function check(label, value, changed) {
  const box = el("input", { type: "checkbox" });
  box.checked = value;
  box.addEventListener("change", () => changed(box.checked));
  return el("label", { class: "check" }, box, label);
}

// Powers of two between two numbers.
export const powers = (first, last) =>
  Array.from({ length: Math.round(Math.log2(last / first)) + 1 }, (_, step) => first * 2 ** step);

// Say what is wrong below the field that an error names, if it is one of the form's.
export function mark(root, error) {
  for (const field of root.querySelectorAll("[aria-invalid]")) {
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-describedby");
  }
  root.querySelector("#wrong")?.remove();
  const key = error && error.field.split(".").pop();
  const field = key && root.querySelector(`[data-field="${CSS.escape(key)}"]`);
  if (!field) return;
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", "wrong");
  field.closest(".field").append(el("p", { class: "bad", id: "wrong" }, error.message));
  for (let at = field.closest("details"); at; at = at.parentElement.closest("details")) at.open = true;
}
